"""Nodes of kinds of one's own, at each level and on a model, and a per-sample body behind a batch node.

Their results are right only if `setup` ran where they run.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from hflow import (
    Dataset,
    Metrics,
    Model,
    Output,
    PerSequence,
    PerToken,
    Recipe,
    Sequences,
    Text,
    compute,
    infer,
    nodes,
    use,
)
from hflow.extend import Context, Level, NodeType, Option

data = Dataset("train", prompt=Text, answer=Text)
actor = Model("actor", trainable=True)


class Scale(NodeType):
    """A batch body whose result is multiplied."""

    options: ClassVar = NodeType.options | {"factor": Option("float", 2.0)}

    def setup(self, context: Context) -> None:
        self.factor = context.options["factor"]

    def run(self, context: Context, inputs: Mapping[str, Any]) -> Any:
        return self.factor * context.body(**inputs, **context.knobs)


class Shout(NodeType):
    """A sample's body whose text comes in upper case, in a process of the pool."""

    level: ClassVar = Level.SAMPLE
    provides: ClassVar = ()

    def setup(self, context: Context) -> None:
        assert (context.directory / "own_kinds.py").is_file()
        self.upper = str.upper

    def run(self, context: Context, inputs: Mapping[str, Any]) -> Any:
        return context.body(**{name: self.upper(text) for name, text in inputs.items()}, **context.knobs)


class Awaited(NodeType):
    """A group's body, with an asynchronous run."""

    level: ClassVar = Level.GROUP
    provides: ClassVar = ()

    def setup(self, context: Context) -> None:
        from own_table import OFFSET

        self.offset = OFFSET

    async def run(self, context: Context, inputs: Mapping[str, Any]) -> Any:
        return self.offset + context.body(**inputs, **context.knobs)


class Look(infer):
    """A forward pass whose result is shifted."""

    def setup(self, context: Context) -> None:
        self.shift = 0.5

    def run(self, context: Context, inputs: Mapping[str, Any]) -> Any:
        return context.body(**inputs, **context.knobs) + self.shift


@Shout(returns="reward")
def score(prompt: str, answer: str, *, plus: float = 0.5) -> float:
    return float(answer) / 200 + plus


@Awaited(returns="spread")
def spread(reward: list[float]) -> float:
    return max(reward) - min(reward)


@Scale(returns="scaled")
def centred(reward: PerSequence, spread: PerSequence, seqs: Sequences) -> PerSequence:
    assert len(reward) == len(seqs) == 2 * seqs.num_groups
    return reward + spread


@Look(actor, returns="looked")
def look(out: Output) -> PerToken:
    return out.logprobs


@compute(returns="weights")
def weights(
    scaled: PerSequence, behav_logprobs: PerToken, looked: PerToken, seqs: Sequences
) -> tuple[PerToken, Metrics]:
    return scaled[seqs.index] + 0 * behav_logprobs, {"scaled": scaled, "looked": looked - behav_logprobs}


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
        look,
        weights,
        total,
        advantages,
        use(nodes.actor_train, actor, prox="none"),
    ],
)
