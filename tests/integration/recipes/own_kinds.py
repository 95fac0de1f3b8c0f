"""Nodes of kinds of one's own, at each level, and a per-sample body behind a batch node."""

from collections.abc import Mapping
from typing import Any, ClassVar

from hflow import (
    Dataset,
    Metrics,
    Model,
    NodeType,
    PerSequence,
    PerToken,
    Recipe,
    Sequences,
    Text,
    compute,
    nodes,
    use,
)
from hflow.dsl import Context, Option
from hflow.graph.ir import Level

data = Dataset("train", prompt=Text, answer=Text)
actor = Model("actor", trainable=True)


class Scale(NodeType):
    """A batch body whose result is multiplied."""

    options: ClassVar = NodeType.options | {"factor": Option("float", 2.0)}

    def run(self, context: Context, inputs: Mapping[str, Any]) -> Any:
        return context.options["factor"] * context.body(**inputs, **context.knobs)


class Shout(NodeType):
    """A sample's body whose text comes in upper case, in a process of the pool."""

    level: ClassVar = Level.SAMPLE
    provides: ClassVar = ()

    def run(self, context: Context, inputs: Mapping[str, Any]) -> Any:
        return context.body(**{name: text.upper() for name, text in inputs.items()}, **context.knobs)


class Awaited(NodeType):
    """A group's asynchronous body."""

    level: ClassVar = Level.GROUP
    provides: ClassVar = ()
    is_async: ClassVar = True

    async def run(self, context: Context, inputs: Mapping[str, Any]) -> Any:
        return 1.0 + await context.body(**inputs, **context.knobs)


@Shout(returns="reward")
def score(prompt: str, answer: str, *, plus: float = 0.5) -> float:
    return float(answer) / 200 + plus


@Awaited(returns="spread")
async def spread(reward: list[float]) -> float:
    return max(reward) - min(reward)


@Scale(returns="scaled")
def centred(reward: PerSequence, spread: PerSequence, seqs: Sequences) -> PerSequence:
    assert len(reward) == len(seqs) == 2 * seqs.num_groups
    return reward + spread


@compute(returns="weights")
def weights(scaled: PerSequence, behav_logprobs: PerToken, seqs: Sequences) -> tuple[PerToken, Metrics]:
    return scaled[seqs.index] + 0 * behav_logprobs, {"scaled": scaled}


@compute(per="sample")
def total(weights: list[float], scaled: float, num_tokens: int) -> float:
    return sum(weights) - scaled * num_tokens


@compute(per="group", returns="advantages")
def advantages(scaled: list[float], total: list[float]) -> list[float]:
    return [scaled[0] + total[0], -scaled[1] - total[1]]


recipe = Recipe(
    "own_kinds",
    data,
    [
        use(nodes.actor_gen, actor, group=2, max_tokens=3),
        score,
        spread,
        centred,
        weights,
        total,
        advantages,
        use(nodes.actor_train, actor, prox="none"),
    ],
)
