"""Result annotations: the trajectories, fields and metrics that a body returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, get_args, get_origin

from hflow.base.errors import RecipeError
from hflow.dsl.annotations import (
    ALLOWED_TYPES,
    Form,
    hint_text,
    is_metrics,
    read_hint,
    result_hints,
    tensordict_fields,
)
from hflow.graph.ir import Returned
from hflow.types import Tensor, Trajectory, Unit

ErrorFactory = Callable[[str], RecipeError]
"""Makes the exception for a problem with a body, with the body's name and location."""


@dataclass(frozen=True)
class ReturnTypes:
    """What a body returns: trajectories first, which open streams, then fields, then metrics."""

    fields: tuple[Returned, ...] = ()
    streams: tuple[str, ...] = ()
    metrics: bool = False
    is_list: bool = False
    """Whether the body returns a list of trajectories: one group, or those of one episode."""


def read_fields(
    hint: Any, names: Sequence[str], function: str, form: Form, error: ErrorFactory
) -> ReturnTypes:
    """Read the result annotation of a body that returns fields.

    Args:
        hint: the result annotation.
        names: the names in `returns=`; empty if it is not set.
        function: the name of the node, which is the default name of a single field.
        form: the form of the body's fields.
        error: makes the exception for a message.
    """
    hints, metrics = _split_metrics(hint)
    if not hints and not metrics:
        raise error("the function returns nothing. Return a field or Metrics")
    if form == "tensor" and any(tensordict_fields(h) is not None for h in hints):
        hints, names = _tensordict_results(hints, names, error)
    names = names or ([function] if len(hints) == 1 else [])
    return ReturnTypes(_named_fields(hints, names, form, error), metrics=metrics)


def read_trajectories(hint: Any, names: Sequence[str], function: str, error: ErrorFactory) -> ReturnTypes:
    """Read the result annotation of a body that opens streams: trajectories, then fields of the stream."""
    hints, metrics = _split_metrics(hint)
    num_streams = next((i for i, h in enumerate(hints) if not _is_trajectory(h)), len(hints))
    if num_streams == 0 or any(_is_trajectory(h) for h in hints[num_streams:]):
        raise error("the function must return one or more Trajectory first, then its fields")
    if num_streams == 1:
        names = (function, *names)
    if len(names) < num_streams:
        raise error(f"the function returns {num_streams} trajectories. Name each of them in returns=")
    is_list = any(_is_list(h) for h in hints[:num_streams])
    if is_list and num_streams > 1:
        raise error("a list of trajectories must be the only stream. Return one list, or single trajectories")
    fields = _named_fields(hints[num_streams:], names[num_streams:], "sample", error)
    return ReturnTypes(fields, tuple(names[:num_streams]), metrics, is_list)


def read_loss(hint: Any, error: ErrorFactory) -> ReturnTypes:
    """Read the result annotation of a train body: a loss, then perhaps metrics."""
    hints, metrics = _split_metrics(hint)
    if len(hints) != 1:
        raise error("the body of @train must return one loss, or one loss and Metrics")
    loss = _field(hints[0], "loss", "tensor", error)
    if loss.unit not in (Unit.TOKEN, Unit.SEQUENCE, Unit.GROUP):
        raise error("a loss must be PerToken, PerSequence or PerGroup")
    return ReturnTypes((loss,), metrics=metrics)


def read_weight(hint: Any, error: ErrorFactory) -> ReturnTypes:
    """Read the result annotation of an update body: the new value of one weight tensor."""
    if hint is not Tensor:
        raise error("the body of @update must return a Tensor, the target's new value")
    return ReturnTypes()


def _tensordict_results(
    hints: Sequence[Any], names: Sequence[str], error: ErrorFactory
) -> tuple[list[Any], list[str]]:
    """Return the annotations and names of the fields of a returned TensorDict."""
    fields = tensordict_fields(hints[0])
    if not fields or len(hints) > 1:
        raise error(
            "a returned TensorDict must be the only result besides Metrics, and its annotation must name its "
            "fields, as in Annotated[TensorDict, {'advantages': PerToken}]"
        )
    if names and sorted(names) != sorted(fields):
        raise error(
            f"returns={tuple(names)!r} differs from the annotation of the TensorDict. Remove returns="
        )
    return list(fields.values()), list(fields)


def _split_metrics(hint: Any) -> tuple[list[Any], bool]:
    hints = result_hints(hint)
    metrics = bool(hints) and is_metrics(hints[-1])
    return (hints[:-1] if metrics else hints), metrics


def _named_fields(
    hints: Sequence[Any], names: Sequence[str], form: Form, error: ErrorFactory
) -> tuple[Returned, ...]:
    if len(names) != len(hints):
        raise error(
            f"the function returns {len(hints)} field(s), but returns= names {len(names)}. Name them all"
        )
    if len(set(names)) != len(names):
        raise error(f"returns={tuple(names)!r} has the same name twice. Give each field its own name")
    return tuple(_field(hint, name, form, error) for hint, name in zip(hints, names, strict=True))


def _field(hint: Any, name: str, form: Form, error: ErrorFactory) -> Returned:
    field_type = read_hint(hint, form)
    if field_type is None:
        raise error(f"result {name!r} has the type {hint_text(hint)}, but must be {ALLOWED_TYPES[form]}")
    return Returned(name, field_type.unit, field_type.scalar)


def _is_trajectory(hint: Any) -> bool:
    return hint is Trajectory or (_is_list(hint) and get_args(hint)[0] is Trajectory)


def _is_list(hint: Any) -> bool:
    return get_origin(hint) is list
