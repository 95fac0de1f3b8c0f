"""Rewards for completions that are data."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from hflow.base.json_schema import schema_validator
from hflow.dsl import checked_by, compute
from hflow.rewards.fences import find_block

LANGUAGES = ("json",)


def _check_schema(knobs: Mapping[str, Any], reads: Collection[str]) -> str | None:
    text = knobs["shared_schema"]
    if (text is None) != ("schema" in reads):
        return (
            "it needs one schema. Declare a column schema=Json (or set reads={'schema': FIELD}), or set "
            "shared_schema= to the JSON text of a schema for all rows"
        )
    if text is None:
        return None
    try:
        schema_validator(json.loads(text))
    except ValueError as error:
        return f"knob shared_schema is no JSON schema: {error}. Correct it"
    return None


@compute(per="sample", timeout=10.0)
@checked_by(_check_schema)
def json_schema(
    completion: str, schema: dict[str, Any] | None = None, *, shared_schema: str | None = None
) -> float:
    """Return 1 if the completion is JSON that a schema accepts, otherwise 0.

    Args:
        completion: what the model wrote. Its last block of JSON between fences counts (`find_block`), or all
            of it if it has no block.
        schema: the row's JSON schema.
        shared_schema: JSON text of a schema for all rows, in place of the column.
    """
    validator = schema_validator(json.loads(shared_schema) if shared_schema is not None else schema)
    try:
        value = json.loads(find_block(completion, LANGUAGES), parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return 0.0
    return float(validator.is_valid(value))


def _refuse_constant(name: str) -> None:
    """Refuse what Python reads as a number, but JSON does not have."""
    raise ValueError(f"{name} is not JSON")
