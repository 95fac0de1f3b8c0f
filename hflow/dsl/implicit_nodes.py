"""The library's `actor_inf`, which recipes need not list: `prox="recompute"` adds it.

Plans name this module, so it keeps its name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hflow.dsl.nodetype import Definition, define, definition_of
from hflow.dsl.verbs import infer
from hflow.types import Output, PerToken


@infer(returns="prox_logprobs")
def actor_inf(out: Output) -> PerToken:
    """Return the log-probs `[T]` under the weights at the start of the step: the proximal policy."""
    return out.logprobs


def implicit_nodes(nodes: Sequence[Definition[..., Any]]) -> list[Definition[..., Any]]:
    """Return one `actor_inf` for every train node that reads `prox_logprobs`.

    They are added whatever `prox` is, because a configuration may still change it. The graph drops those that
    no node reads, and those of streams on which a listed node returns the field.
    """
    taken_names = {node.name for node in nodes}
    added: list[Definition[..., Any]] = []
    for node in nodes:
        fields = {node.reads.get(p.name, p.field) for p in node.signature.parameters}
        if node.kind.runs_as != "train" or "prox_logprobs" not in fields:
            continue
        default_name = f"{node.kind.models[0].name}_inf"
        name = default_name if default_name not in taken_names else f"{node.name}_prox"
        added.append(_actor_inf_for(node, name))
        taken_names.add(name)
    return added


def _actor_inf_for(train_node: Definition[..., Any], name: str) -> Definition[..., Any]:
    """Return an `actor_inf` with the model, stream and cadence of a train node."""
    shared = {option: train_node.kind.option_values[option] for option in ("on", "every", "after")}
    library = definition_of(actor_inf)
    assert library is not None, "actor_inf is decorated above"
    kind = library.kind.variant((train_node.kind.models[0],), shared)
    base = replace(library, name=name, where=train_node.where)
    return replace(define(kind, library.body, base), implicit=True)
