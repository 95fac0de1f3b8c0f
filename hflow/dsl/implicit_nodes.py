"""The library's `actor_inf`, which a recipe need not list: `prox="recompute"` brings it along."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hflow.dsl.definition import Definition, define, definition_of
from hflow.dsl.verbs import infer
from hflow.types import Output, PerToken


@infer(returns="prox_logprobs")
def actor_inf(out: Output) -> PerToken:
    """Log-probs under the weights at the step's start: the proximal policy."""
    return out.logprobs


def implicit_nodes(nodes: Sequence[Definition]) -> list[Definition]:
    """One `actor_inf` for every train node that reads prox_logprobs.

    The graph drops those that nobody reads, and those of streams where a listed node makes the
    field; so a configuration may still change `prox`.
    """
    taken = {node.name for node in nodes}
    made: list[Definition] = []
    for node in nodes:
        fields = {node.reads.get(p.name, p.name) for p in node.signature.parameters}
        if node.kind.verb != "train" or "prox_logprobs" not in fields:
            continue
        model = node.kind.models[0]
        name = f"{model.name}_inf" if f"{model.name}_inf" not in taken else f"{node.name}_prox"
        made.append(_for_train(node, name))
        taken.add(name)
    return made


def _for_train(node: Definition, name: str) -> Definition:
    """`actor_inf` on the model, stream and cadence of a train node."""
    same = {option: node.kind.settings[option] for option in ("on", "every", "after")}
    library = definition_of(actor_inf)
    assert library is not None, "actor_inf is decorated above"
    kind = library.kind.variant((node.kind.models[0],), same)
    return replace(
        define(kind, library.body, of=replace(library, name=name, where=node.where)), implicit=True
    )
