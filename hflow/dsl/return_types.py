"""What a body returns, read from its result annotation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, get_args, get_origin

from hflow.dsl.annotations import ALLOWED_TYPES, Form, hint_text, is_metrics, read_hint, result_hints
from hflow.errors import RecipeError
from hflow.graph.ir import Returned
from hflow.types import Tensor, Trajectory, Unit

ErrorFactory = Callable[[str], RecipeError]
"""Makes the error for a text, with the body's name and place."""


@dataclass(frozen=True)
class ReturnTypes:
    """Trajectories (streams) first, then fields, then perhaps metrics."""

    fields: tuple[Returned, ...] = ()
    streams: tuple[str, ...] = ()
    metrics: bool = False
    grouped: bool = False
    """Whether the one trajectory is a list of them: a group."""


def read_fields(
    hint: Any, names: Sequence[str], function: str, form: Form, fault: ErrorFactory
) -> ReturnTypes:
    """The results of a body that returns fields.

    Args:
        hint: its result annotation.
        names: what `returns=` says; empty where it says nothing.
        function: its name, which names a single field.
        form: how its fields look.
        fault: makes errors.
    """
    hints, metrics = _split_metrics(hint)
    if not hints and not metrics:
        raise fault("it returns nothing; return a field or Metrics")
    names = names or ([function] if len(hints) == 1 else [])
    return ReturnTypes(_named(hints, names, form, fault), metrics=metrics)


def read_trajectories(hint: Any, names: Sequence[str], function: str, fault: ErrorFactory) -> ReturnTypes:
    """The results of a body that opens a stream: trajectories, then fields of the stream."""
    hints, metrics = _split_metrics(hint)
    num_streams = next((i for i, h in enumerate(hints) if not _is_trajectory(h)), len(hints))
    if num_streams == 0 or any(_is_trajectory(h) for h in hints[num_streams:]):
        raise fault("it must return a Trajectory, or several, before anything else")
    if num_streams == 1:
        names = (function, *names)
    if len(names) < num_streams:
        raise fault(f"it returns {num_streams} trajectories: name each one in returns=")
    grouped = any(_is_list(h) for h in hints[:num_streams])
    if grouped and len(hints) > 1:
        raise fault("a list of trajectories (a group) is returned alone")
    fields = _named(hints[num_streams:], names[num_streams:], "sample", fault)
    return ReturnTypes(fields, tuple(names[:num_streams]), metrics, grouped)


def read_loss(hint: Any, fault: ErrorFactory) -> ReturnTypes:
    """The results of a train body: its loss, perhaps metrics."""
    hints, metrics = _split_metrics(hint)
    if len(hints) != 1:
        raise fault("a train body returns its loss, and Metrics after it if it likes")
    loss = _field(hints[0], "loss", "tensor", fault)
    if loss.unit not in (Unit.TOKEN, Unit.SEQUENCE, Unit.GROUP):
        raise fault("a loss is PerToken, PerSequence or PerGroup")
    return ReturnTypes((loss,), metrics=metrics)


def read_weight(hint: Any, fault: ErrorFactory) -> ReturnTypes:
    """The result of an update body: the new value of one weight tensor."""
    if hint is not Tensor:
        raise fault("an update body returns a Tensor, the target's new value")
    return ReturnTypes()


def _split_metrics(hint: Any) -> tuple[list[Any], bool]:
    hints = result_hints(hint)
    metrics = bool(hints) and is_metrics(hints[-1])
    return (hints[:-1] if metrics else hints), metrics


def _named(
    hints: Sequence[Any], names: Sequence[str], form: Form, fault: ErrorFactory
) -> tuple[Returned, ...]:
    if len(names) != len(hints):
        raise fault(f"it returns {len(hints)} fields, so returns= must name {len(hints)}, not {len(names)}")
    if len(set(names)) != len(names):
        raise fault(f"returns={tuple(names)!r} names a field twice")
    return tuple(_field(hint, name, form, fault) for hint, name in zip(hints, names, strict=True))


def _field(hint: Any, name: str, form: Form, fault: ErrorFactory) -> Returned:
    typed = read_hint(hint, form)
    if typed is None:
        raise fault(f"result {name!r} is {hint_text(hint)}; here a result is {ALLOWED_TYPES[form]}")
    return Returned(name, typed.unit, typed.scalar)


def _is_trajectory(hint: Any) -> bool:
    return hint is Trajectory or (_is_list(hint) and get_args(hint)[0] is Trajectory)


def _is_list(hint: Any) -> bool:
    return get_origin(hint) is list
