"""Asynchronous GRPO: the engine keeps generating while the policy trains, with a decoupled loss.

    hflow run recipes/grpo_async.py

It differs from `recipes/grpo.py` in three settings. The engine has a device of its own (`placement`). It may
run ahead of training (`schedule.max_staleness=2`), so that samples are up to two weight syncs old. And
`prox="recompute"` corrects the loss for that: ratios are clipped around the policy at the start of the step,
and weighted for the policy that generated the tokens. A sync interrupts running samples, which keep their
tokens and continue with the new weights. The plan shows the largest lag of a trained token; older samples
are not trained.

Expect the same held-out accuracy as `recipes/grpo.py`. Variants:

    hflow run recipes/grpo_async.py schedule.max_staleness=0             # synchronous
    hflow run recipes/grpo_async.py nodes.actor_train.prox=loglinear     # without the extra forward pass
    hflow run recipes/grpo_async.py schedule.interrupt=false             # finish samples before a sync
"""

from hflow import Dataset, Model, Recipe, Text, nodes, rewards, use

data = Dataset("train", prompt=Text, answer=Text)
heldout = Dataset("heldout", prompt=Text, answer=Text)
actor = Model("actor", trainable=True)


recipe = Recipe(
    "grpo_async",
    data,
    [
        use(nodes.actor_gen, actor, group=8),
        use(rewards.exact, name="score", returns="reward"),
        nodes.group_advantage,
        use(nodes.actor_train, actor, minibatches=2, prox="recompute"),
        use(nodes.actor_gen, actor, name="eval_gen", data=heldout, every=20, temperature=0.0),
        use(rewards.exact, name="accuracy", on="eval_gen", returns="accuracy"),
    ],
)
