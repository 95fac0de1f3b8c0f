"""`first_pass`: a function of the whole minibatch, whose result the loss of a train node reads.

A loss is computed micro-batch by micro-batch. What depends on the whole minibatch, such as a mean or the
largest tokens, would change with the size of micro-batches and the number of ranks. So a train body may have
a first pass: a forward pass without gradient over all micro-batches of all ranks, and one call of a function
with the outcome. Its result is a parameter of the body, named like the function.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from hflow.base.errors import RecipeError
from hflow.dsl.return_types import ErrorFactory, read_fields
from hflow.dsl.signature import Signature, read_signature
from hflow.graph.errors import definition_location, recipe_error
from hflow.graph.ir import FIRST_PASS, Graph, Knob, Node, Parameter
from hflow.types import Unit

ATTRIBUTE = "__hflow_first_pass__"
"""The attribute of a body that holds the function of its first pass."""
OUTPUTS = ("logprobs", "entropy")
"""Parameters that receive the model's output, per token, under the weights of the update."""
RANDOM = "random"
"""The parameter that receives a number from 0 to 1 for each token."""

_UNITS = (Unit.TOKEN, Unit.SEQUENCE)

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class FirstPass:
    """The function of a first pass and what it receives."""

    function: Callable[..., Any]
    outputs: tuple[str, ...]
    """The parameters of `OUTPUTS` and `RANDOM` that it receives."""
    parameters: tuple[Parameter, ...]
    """The parameters that are parameters of the loss's body too."""
    provided: tuple[tuple[str, str], ...]
    knobs: tuple[Knob, ...]
    unit: Unit
    """The unit of the result."""


def first_pass(function: Callable[..., Any]) -> Callable[[Function], Function]:
    """Let a function of the whole minibatch run before the loss, below the decorator `@train`.

    For each optimizer step, the model first runs without gradient over all micro-batches of all ranks. Then
    the function is called with all tokens of the minibatch, in the order of the samples' ids, and the loss
    runs. Results do not depend on micro-batches or ranks.

    Args:
        function: the function. Its parameters before `*` are `logprobs` and `entropy` (PerToken, the model's
            output under the weights of this optimizer step), `random` (PerToken, numbers from 0 to 1 that
            depend only on the run's seed, the step, the sample and the position), a `Sequences`, and
            parameters of the body by name. Those after `*` are knobs of the node. It returns one PerToken or
            PerSequence, which the body receives in a parameter named like the function.
    """

    def attach(body: Function) -> Function:
        setattr(body, ATTRIBUTE, function)
        return body

    return attach


def first_pass_of(body: Callable[..., Any]) -> Callable[..., Any] | None:
    """Return the function of a body's first pass, if it has one."""
    return getattr(body, ATTRIBUTE, None)


def read_first_pass(function: Callable[..., Any]) -> FirstPass:
    """Read the signature of the function of a first pass.

    Raises:
        RecipeError: if a first pass cannot call it.
    """
    where = definition_location(function)

    def error(problem: str) -> RecipeError:
        return recipe_error(where, function.__name__, problem)

    signature = read_signature(function, where, "tensor", ("sequences",))
    results = read_fields(signature.result, (), function.__name__, "tensor", error)
    if len(results.fields) != 1 or results.metrics or results.fields[0].unit not in _UNITS:
        raise error("the function of a first pass must return one PerToken or PerSequence. Return one")
    names = (*OUTPUTS, RANDOM)
    return FirstPass(
        function,
        tuple(p.name for p in signature.parameters if p.name in names),
        tuple(p for p in signature.parameters if p.name not in names),
        signature.provided,
        signature.knobs,
        results.fields[0].unit,
    )


def with_first_pass(signature: Signature, function: Callable[..., Any], error: ErrorFactory) -> Signature:
    """Return the signature of a train body that reads a first pass: its result is provided, not an edge.

    Knobs of the first pass are knobs of the node.

    Raises:
        RecipeError: if the body lacks the result, or anything that the first pass reads.
    """
    first, name = read_first_pass(function), function.__name__
    by_name = {parameter.name: parameter for parameter in signature.parameters}
    result = by_name.pop(name, None)
    if result is None or result.unit is not first.unit or result.optional:
        raise error(f"its body must read what its first pass returns. Add a parameter {name!r} of that type")
    for wanted in first.parameters:
        if by_name.get(wanted.name) != wanted:
            raise error(
                f"its first pass {name} reads {wanted.name!r}, which its body does not read in the same way. "
                f"Add the parameter to the body; {', '.join((*OUTPUTS, RANDOM))} are provided"
            )
    for output in first.outputs:
        if output in by_name:
            raise error(
                f"{output!r} is a field for its body, but the model's for its first pass {name}. Rename it"
            )
    knobs = {knob.name: knob for knob in signature.knobs}
    for knob in first.knobs:
        if knobs.setdefault(knob.name, knob) != knob:
            raise error(
                f"knob {knob.name!r} differs from that of its first pass {name}. Give it one default and type"
            )
    return replace(
        signature,
        parameters=tuple(by_name.values()),
        provided=(*signature.provided, (name, FIRST_PASS)),
        knobs=tuple(knobs.values()),
    )


def first_pass_problem(first: FirstPass, node: Node, graph: Graph) -> str | None:
    """Return the reason why a first pass cannot work with its node's model and options, with the fix."""
    head = graph.model(node.spec.models[0]).head
    outputs = [name for name in first.outputs if name in OUTPUTS]
    if outputs and head != "lm":
        return f"its first pass reads {outputs[0]}, which a model with the head {head!r} does not have"
    is_computed = node.spec.option("prox") == "loglinear"
    if is_computed and any(parameter.name == "prox_logprobs" for parameter in first.parameters):
        return (
            "its first pass reads prox_logprobs, which prox='loglinear' computes later. Set prox='recompute'"
        )
    return None
