"""A NodeType of one's own, a node with a memory, and postponed annotations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from hflow import (
    Dataset,
    Metrics,
    Model,
    PerSequence,
    PerToken,
    Recipe,
    Sequences,
    State,
    Text,
    compute,
    nodes,
    use,
)
from hflow.dsl import Context, Option, Shapes
from hflow.extend import NodeType

data = Dataset(prompt=Text, answer=Text)
actor = Model("actor", trainable=True)
ref = Model("ref", init_from=actor)


class Audit(NodeType):
    """A batch body whose result is clipped."""

    options: ClassVar = NodeType.options | {"limit": Option("float", 1.0, minimum=0.0)}

    def run(self, context: Context, inputs: Mapping[str, Any]) -> Any:
        return context.body(**inputs, **context.knobs).clamp(max=context.options["limit"])

    def cost(self, shapes: Shapes) -> float:
        return 0.001 + 1e-6 * shapes.sequences

    def draw(self) -> str:
        return "diamond"


@compute(per="sample", returns="reward")
def score(completion: str, answer: str) -> float:
    return float(completion.strip() == answer)


@Audit(limit=0.5, returns="audited")
def audit(reward: PerSequence, *, scale: float = 2.0) -> PerSequence:
    return reward * scale


@compute(returns="token_reward")
def adaptive_kl(
    audited: PerSequence,
    behav_logprobs: PerToken,
    ref_logprobs: PerToken,
    seqs: Sequences,
    state: State,
    *,
    target: float = 0.1,
) -> tuple[PerToken, Metrics]:
    beta = state.get("beta", 0.05)
    kl = behav_logprobs - ref_logprobs
    state["beta"] = beta * (1.1 if float(seqs.mean(kl).mean()) > target else 0.9)
    return seqs.at_end(audited) - beta * kl, {"kl": kl, "beta": beta}


@compute(returns="advantages")
def returns_to_go(token_reward: PerToken, seqs: Sequences) -> PerSequence:
    return seqs.sum(token_reward)


recipe = Recipe(
    "own_kind",
    data,
    [
        use(nodes.actor_gen, actor),
        score,
        audit,
        use(nodes.ref_inf, ref),
        adaptive_kl,
        returns_to_go,
        use(nodes.actor_train, actor, minibatches=2),
    ],
)
