"""The plan as JSON, and its digest."""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hflow.errors import PlanError
from hflow.graph.model import Model
from hflow.planner.ir import Plan
from hflow.planner.layout import Layout

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_AS_THEY_ARE = frozenset({type(None), bool, int, float, str})
_UNDECIDING = ("digest", "warnings", "hardware", "forecast")


def to_json(plan: Plan) -> dict[str, Any]:
    """The plan as plain values for `json.dumps`; keys are in the order of the declarations.

    Raises:
        PlanError: for a setting, knob or option that JSON has no form for.
    """
    row = plain(plan)
    assert isinstance(row, dict)
    return row


def plain(value: Any) -> Any:
    """A frozen row as plain JSON values: tuples become lists, layouts and enums their names."""
    kind = type(value)
    if kind in _AS_THEY_ARE:  # most values of a large plan
        return value
    if kind is tuple or kind is list:
        return [plain(item) for item in value]
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
        return {str(key): plain(value[key]) for key in sorted(value, key=str)}
    if isinstance(value, set | frozenset):
        return sorted(plain(item) for item in value)
    raise PlanError(
        f"{value!r} cannot be part of a plan; use numbers, texts, lists or mappings in settings and knobs"
    )


def _field_values(value: DataclassInstance) -> dict[str, Any]:
    return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}


def plan_digest(plan: Plan) -> str:
    """sha256 of what decides a run, the same on every machine: see `digested`."""
    return rows_digest(to_json(plan))


def rows_digest(rows: Mapping[str, Any]) -> str:
    """`plan_digest` of a plan's JSON rows, whatever digest they name themselves."""
    text = json.dumps(digested(rows), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def digested(rows: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a plan's JSON rows that decides a run.

    Left out are the digest itself, warnings and notes, estimates, and everything that says where files lie:
    places in the recipe's source (its bodies enter by their own digests) and directories of absolute paths.
    """
    kept = {key: value for key, value in rows.items() if key not in _UNDECIDING}
    kept["graph"] = _without_places(
        {k: v for k, v in rows["graph"].items() if k not in ("warnings", "notes")}
    )
    kept["settings"] = [[name, portable(value)] for name, value in rows["settings"]]
    return kept


def _without_places(row: Any) -> Any:
    """Plain values without the places in the user's source."""
    if isinstance(row, dict):
        return {key: _without_places(value) for key, value in row.items() if key != "where"}
    return [_without_places(item) for item in row] if isinstance(row, list) else row


def portable(value: Any) -> Any:
    """A setting without the directory of an absolute path."""
    if isinstance(value, str) and os.path.isabs(value):
        return Path(value).name
    if isinstance(value, list):
        return [portable(item) for item in value]
    if isinstance(value, dict):
        return {key: portable(item) for key, item in value.items()}
    return value
