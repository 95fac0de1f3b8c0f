"""Ready nodes: the same decorators as in a recipe, with the model left open.

`use(nodes.actor_train, actor, clip=0.1)` fills the model and sets options and knobs. A further
change means copying a node's few lines into the recipe.
"""

from hflow.dsl.implicit_nodes import actor_inf
from hflow.nodes.advantages import gae, group_advantage, kl_reward, leave_one_out, returns_to_go
from hflow.nodes.generation import actor_gen, pair, sft_view
from hflow.nodes.inference import critic_inf, ref_inf, rew_inf
from hflow.nodes.training import actor_train, critic_train, dpo, gspo_train, reward_train, sft_train

__all__ = [
    "actor_gen",
    "actor_inf",
    "actor_train",
    "critic_inf",
    "critic_train",
    "dpo",
    "gae",
    "group_advantage",
    "gspo_train",
    "kl_reward",
    "leave_one_out",
    "pair",
    "ref_inf",
    "returns_to_go",
    "rew_inf",
    "reward_train",
    "sft_train",
    "sft_view",
]
