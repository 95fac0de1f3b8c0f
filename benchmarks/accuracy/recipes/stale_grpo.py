"""`recipes/grpo_async.py` with a trainer that takes its time, so that the engine really runs ahead.

Advantages are handed on after `seconds` only, at first after `first` seconds: the engine has drawn all that
`schedule.max_staleness` admits by then, and from there on draws a batch in less time than a step takes. So
samples wait in the queue until they are as old as the schedule lets them be.

Answers may have a scratchpad: what follows the last `=` counts.
"""

import time

from hflow import Dataset, Model, Recipe, Text, algo, compute, nodes, use
from hflow.types import PerSequence, Sequences, State

data = Dataset("train", prompt=Text, answer=Text)
heldout = Dataset("heldout", prompt=Text, answer=Text)
actor = Model("actor", trainable=True)


@compute(per="sample", timeout=5.0, returns="reward")
def score(completion: str, answer: str) -> float:
    return float(completion.strip().rpartition("=")[2] == answer)


@compute(returns="advantages", min_group=2)
def slow_advantage(
    reward: PerSequence, seqs: Sequences, state: State, *, seconds: float = 0.1, first: float = 0.0
) -> PerSequence:
    time.sleep(seconds if state.get("is_warm") else first)
    state["is_warm"] = True
    return algo.group_advantage(reward, seqs)


before = [use(nodes.actor_gen, actor, group=8), score, slow_advantage]
evaluation = [
    use(nodes.actor_gen, actor, name="eval_gen", data=heldout, every=20, temperature=0.0),
    use(score, name="accuracy", on="eval_gen", returns="accuracy"),
]
training = use(nodes.actor_train, actor, minibatches=2, prox="recompute")
recipe = Recipe("stale_grpo", data, [*before, training, *evaluation])
