"""GRPO whose engine goes on while it trains: decoupled loss, samples up to two syncs old.

    hflow run recipes/grpo_async.py

`recipes/grpo.py` with the engine on a device of its own (`placement`), a schedule that lets it run ahead
(`schedule.max_staleness`), and the loss that is right for that: `prox="recompute"` clips around the weights
at the step's start and corrects for those that drew the tokens. A sync interrupts what runs, which goes on
with the new weights. The plan states the largest lag of a trained token, and nothing older is trained.

    hflow run recipes/grpo_async.py schedule.max_staleness=0             # the synchronous run
    hflow run recipes/grpo_async.py nodes.actor_train.prox=loglinear     # without the extra forward pass
    hflow run recipes/grpo_async.py schedule.interrupt=false             # samples are finished before a sync
"""

from hflow import Dataset, Model, Recipe, Text, compute, nodes, use

data = Dataset("train", prompt=Text, answer=Text)
heldout = Dataset("heldout", prompt=Text, answer=Text)
actor = Model("actor", trainable=True)


@compute(per="sample", timeout=5.0, returns="reward")
def score(completion: str, answer: str) -> float:
    return float(completion.strip() == answer.strip())


recipe = Recipe(
    "grpo_async",
    data,
    [
        use(nodes.actor_gen, actor, group=8),
        score,
        nodes.group_advantage,
        use(nodes.actor_train, actor, minibatches=2, prox="recompute"),
        use(nodes.actor_gen, actor, name="eval_gen", data=heldout, every=20, temperature=0.0),
        use(score, name="accuracy", on="eval_gen", returns="accuracy"),
    ],
)
