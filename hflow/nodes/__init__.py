"""Ready-made nodes, decorated as in a recipe but without a model.

`use(nodes.actor_train, actor, clip=0.1)` sets the model, options and knobs. For any other change, copy the
function into the recipe: most are a few lines long.
"""

from typing import Any

from hflow.dsl.implicit_nodes import actor_inf
from hflow.environments.interface import ENVIRONMENTS, adapter_named
from hflow.nodes.advantages import (
    adaptive_entropy,
    best_advantage,
    gae,
    gdpo_advantage,
    gpg_advantage,
    group_advantage,
    hierarchical_advantage,
    kl_reward,
    leave_one_out,
    maxrl_advantage,
    opo_advantage,
    optimal_token_advantage,
    pass_at_k_advantage,
    reinforce_pp_baseline,
    returns_to_go,
    role_advantage,
    turn_advantage,
)
from hflow.nodes.inference import (
    actor_gen,
    chat_gen,
    chat_view,
    critic_inf,
    entropy_inf,
    kto_view,
    logit_gradient_inf,
    pair,
    ref_inf,
    rew_inf,
    reward_view,
    sft_view,
    topk_inf,
)
from hflow.nodes.off_policy import (
    behav_weights,
    is_trusted,
    m2po_mask,
)
from hflow.nodes.selection import best_worst_mask, observed_tokens, resample
from hflow.nodes.spans import (
    aligned_view,
    span_advantage,
    span_inf,
    step_ends,
    step_inf,
    traced_chat_gen,
    traced_gen,
)
from hflow.nodes.training import (
    actor_train,
    cispo_train,
    clip_cov_train,
    critic_train,
    distill_train,
    dpo,
    dppo_train,
    dro_train,
    gmpo_train,
    gspo_train,
    high_entropy_train,
    kl_cov_train,
    kto,
    orpo,
    reinforce_train,
    reward_train,
    sapo_train,
    sft_train,
    vespo_train,
)

__all__ = [
    "actor_gen",
    "actor_inf",
    "actor_train",
    "adaptive_entropy",
    "aligned_view",
    "behav_weights",
    "best_advantage",
    "best_worst_mask",
    "chat_gen",
    "chat_view",
    "cispo_train",
    "clip_cov_train",
    "critic_inf",
    "critic_train",
    "distill_train",
    "dpo",
    "dppo_train",
    "dro_train",
    "entropy_inf",
    "gae",
    "gdpo_advantage",
    "gmpo_train",
    "gpg_advantage",
    "group_advantage",
    "gspo_train",
    "hierarchical_advantage",
    "high_entropy_train",
    "is_trusted",
    "kl_cov_train",
    "kl_reward",
    "kto",
    "kto_view",
    "leave_one_out",
    "logit_gradient_inf",
    "m2po_mask",
    "maxrl_advantage",
    "observed_tokens",
    "opo_advantage",
    "optimal_token_advantage",
    "orpo",
    "pair",
    "pass_at_k_advantage",
    "ref_inf",
    "reinforce_pp_baseline",
    "reinforce_train",
    "resample",
    "returns_to_go",
    "rew_inf",
    "reward_train",
    "reward_view",
    "role_advantage",
    "sapo_train",
    "sft_train",
    "sft_view",
    "span_advantage",
    "span_inf",
    "step_ends",
    "step_inf",
    "topk_inf",
    "traced_chat_gen",
    "traced_gen",
    "turn_advantage",
    "vespo_train",
]


def __dir__() -> list[str]:
    """Return the names of the nodes, without the modules that define them."""
    return [*__all__, *ENVIRONMENTS]


def __getattr__(name: str) -> Any:
    """Return the node of an environment's adapter, such as `nodes.gymnasium`.

    Raises:
        AttributeError: if there is none with that name.
    """
    if name.startswith("_") or name not in ENVIRONMENTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return adapter_named(name).node
