"""`stale_grpo.py` with masked importance sampling, as in `recipes/mis.py`."""

from stale_grpo import actor, before, data, evaluation

from hflow import Recipe, nodes, use

correction = [
    use(nodes.behav_weights, lower=0.5, upper=2.0, outside="mask"),
    use(nodes.is_trusted, statistic="k3", extent="sequence-mean", upper=0.1),
]
training = use(nodes.actor_train, actor, minibatches=2, prox="recompute", mask="is_trusted")
recipe = Recipe("stale_mis", data, [*before, *correction, training, *evaluation])
