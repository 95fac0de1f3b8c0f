"""PPO: a critic, KL to the initial policy in the reward, GAE, clipped losses.

    hflow run recipes/ppo.py

There are three models: the actor, its critic and the reference. The reward is a rule: the right answer, if
it ended by itself. For a reward model, list `use(nodes.rew_inf, rm)` instead of `score`. The actor starts
from the checkpoint of `recipes/sft.py`, and the critic from the same weights with a new value head. In the
first steps only the critic is trained (`after=10` of `actor_train`). The run is synchronous, so
`prox="none"` makes the loss that of PPO. Expect the held-out accuracy to rise from 0.52 to about 0.91 in
280 steps.

The weight of the KL can follow a target, in nats per sequence:

    hflow run recipes/ppo.py nodes.kl_reward.target=0.5

Or the KL can be part of the loss instead of the reward:

    hflow run recipes/ppo.py nodes.kl_reward.beta=0 nodes.actor_train.kl_coef=0.05
"""

from hflow import Dataset, Model, Recipe, Text, compute, nodes, use

data = Dataset("train", prompt=Text, answer=Text)
heldout = Dataset("heldout", prompt=Text, answer=Text)
actor = Model("actor", trainable=True)
critic = Model("critic", head="value", trainable=True, init_from=actor)
ref = Model("ref", init_from=actor)


@compute(per="sample", timeout=5.0, returns="reward")
def score(completion: str, answer: str, stop_reason: str) -> float:
    return float(stop_reason == "stop" and completion.strip() == answer.strip())


recipe = Recipe(
    "ppo",
    data,
    [
        use(nodes.actor_gen, actor),
        score,
        use(nodes.ref_inf, ref),
        use(nodes.critic_inf, critic),
        use(nodes.kl_reward, beta=0.05),
        nodes.gae,
        use(nodes.critic_train, critic, minibatches=2, epochs=4),
        use(nodes.actor_train, actor, minibatches=2, prox="none", after=10),
        use(nodes.actor_gen, actor, name="eval_gen", data=heldout, every=20, temperature=0.0),
        use(score, name="accuracy", on="eval_gen", returns="accuracy"),
    ],
)
