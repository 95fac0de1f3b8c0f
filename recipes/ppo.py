"""PPO: a critic, KL to the starting policy in the reward, GAE, clipped losses.

    hflow run recipes/ppo.py

Four models, two of them trained (the reward is a rule here; `use(nodes.rew_inf, rm)` would be a fifth's).
Starts from the checkpoint of `recipes/sft.py`, as GRPO does; the critic starts from the same weights
with a fresh value head, and learns alone for the first steps (`after` of `actor_train`). With
`max_staleness=0`, `prox="none"` makes the loss plain clipped PPO.

The KL's weight can follow a target, in nats a sequence:

    hflow run recipes/ppo.py nodes.kl_reward.target=0.5

or the KL moves from the reward into the loss:

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
