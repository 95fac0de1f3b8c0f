"""Plans as JSON, and their digest."""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hflow.base.errors import PlanError
from hflow.graph.model import Model
from hflow.planner.plan.rows import Plan
from hflow.shapes.layout import Layout

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_SCALARS = frozenset({type(None), bool, int, float, str})
_NOT_DIGESTED = (
    "digest",
    "warnings",
    "engines",
    "attention",
    "layers",
    "unrunnable",
    "hardware",
    "forecast",
)


def to_json(plan: Plan) -> dict[str, Any]:
    """Return a plan as plain values for `json.dumps`; keys are in the order in which fields are declared.

    Raises:
        PlanError: for a setting, knob or option that cannot be written as JSON.
    """
    row = to_plain(plan)
    assert isinstance(row, dict)
    return row


def to_plain(value: Any) -> Any:
    """Return a row as plain JSON values: tuples become lists, layouts and enums become text."""
    if type(value) in _SCALARS:  # a fast path for most values of a large plan
        return value
    if isinstance(value, tuple | list):
        return [to_plain(item) for item in value]
    if isinstance(value, Layout | enum.Enum):
        return str(value)
    if isinstance(value, int | float | str):
        return value
    if isinstance(value, Model):  # `init_from` is another model of the graph, named here
        origin = value.init_from.name if value.init_from else None
        return {**_field_values(value), "init_from": origin}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _field_values(value)
    if isinstance(value, Mapping):
        return {str(key): to_plain(value[key]) for key in sorted(value, key=str)}
    if isinstance(value, set | frozenset):
        return sorted(to_plain(item) for item in value)
    raise PlanError(
        f"{value!r} cannot be part of a plan; use numbers, strings, lists or mappings in settings and knobs"
    )


def _field_values(value: DataclassInstance) -> dict[str, Any]:
    return {
        field.name: to_plain(getattr(value, field.name))
        for field in dataclasses.fields(value)
        if not (is_left_out(field) and getattr(value, field.name) == field.default)
    }


def is_left_out(field: dataclasses.Field[Any]) -> bool:
    """Return whether a row does not have a field that has its default."""
    return bool(field.metadata.get("left_out_by_default"))


def plan_digest(plan: Plan) -> str:
    """Return the sha256 of all that decides a run, equal on every machine; see `decisive_rows`."""
    return rows_digest(to_json(plan))


def rows_digest(rows: Mapping[str, Any]) -> str:
    """Return the digest of a plan's JSON rows, ignoring the digest that the rows contain."""
    text = json.dumps(decisive_rows(rows), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def decisive_rows(rows: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a plan's JSON rows that decides a run.

    It excludes the digest itself, warnings, notes and reasons, estimates, and the location of files: lines in
    the recipe's source (its bodies have their own digests) and directories of absolute paths.
    """
    decisive = {key: value for key, value in rows.items() if key not in _NOT_DIGESTED}
    decisive["graph"] = _without_locations(
        {k: v for k, v in rows["graph"].items() if k not in ("warnings", "notes")}
    )
    decisive["settings"] = [[name, without_directories(value)] for name, value in rows["settings"]]
    return decisive


def _without_locations(row: Any) -> Any:
    """Return plain values without locations in the user's source."""
    if isinstance(row, dict):
        return {key: _without_locations(value) for key, value in row.items() if key != "where"}
    return [_without_locations(item) for item in row] if isinstance(row, list) else row


def without_directories(value: Any) -> Any:
    """Return a setting with only the file name of absolute paths."""
    if isinstance(value, str) and os.path.isabs(value):
        return Path(value).name
    if isinstance(value, list):
        return [without_directories(item) for item in value]
    if isinstance(value, dict):
        return {key: without_directories(item) for key, item in value.items()}
    return value
