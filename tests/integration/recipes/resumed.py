"""PPO with everything that a checkpoint has to hold: three models, a node with a state, an evaluation.

Bodies draw random numbers, which are the same after a resume.
"""

import random

import numpy as np

from hflow import Dataset, Model, PerToken, Recipe, Text, compute, nodes, use

data = Dataset("train", prompt=Text, answer=Text)
heldout = Dataset("heldout", prompt=Text, answer=Text)
actor = Model("actor", trainable=True)
critic = Model("critic", head="value", trainable=True, init_from=actor)
ref = Model("ref", init_from=actor)


@compute(per="sample", returns="reward")
def score(completion: str) -> float:
    """Varies with the tokens, so that every sample matters."""
    return sum(map(ord, completion)) % 7 / 7 + (random.random() + np.random.rand()) / 10


@compute(returns="noisy_reward")
def noisy(token_reward: PerToken) -> PerToken:
    import torch

    return token_reward + torch.rand_like(token_reward) / 10


recipe = Recipe(
    "resumed",
    data,
    [
        use(nodes.actor_gen, actor),
        score,
        use(nodes.ref_inf, ref),
        use(nodes.critic_inf, critic),
        use(nodes.kl_reward, beta=0.05, target=0.5),
        noisy,
        use(nodes.gae, reads={"token_reward": "noisy_reward"}),
        use(nodes.critic_train, critic, minibatches=2),
        use(nodes.actor_train, actor, minibatches=2, prox="none"),
        use(nodes.actor_gen, actor, name="eval_gen", data=heldout, every=2),
        use(score, name="mean", on="eval_gen", returns="mean"),
    ],
)
