"""Asynchronous PPO: the engine keeps generating while actor and critic train, with a decoupled loss.

    hflow run recipes/ppo_async.py

It differs from `recipes/ppo.py` as `recipes/grpo_async.py` does from `recipes/grpo.py`: an engine on a
device of its own, samples up to two weight syncs old, and `prox="recompute"`. The values are those of the
critic at the start of the step, whatever weights generated the tokens. Expect the same held-out accuracy as
`recipes/ppo.py`.
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
    "ppo_async",
    data,
    [
        use(nodes.actor_gen, actor),
        score,
        use(nodes.ref_inf, ref),
        use(nodes.critic_inf, critic),
        use(nodes.kl_reward, beta=0.05),
        nodes.gae,
        use(nodes.critic_train, critic, minibatches=2, epochs=4),
        use(nodes.actor_train, actor, minibatches=2, prox="recompute", after=10),
        use(nodes.actor_gen, actor, name="eval_gen", data=heldout, every=20, temperature=0.0),
        use(score, name="accuracy", on="eval_gen", returns="accuracy"),
    ],
)
