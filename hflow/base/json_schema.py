"""Validators of JSON schemas."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any


def schema_validator(schema: Any) -> Any:
    """Return the `jsonschema` validator of a schema, of the draft that its `$schema` names.

    Raises:
        ValueError: if it is no schema.
    """
    return _validator(json.dumps(schema))


@lru_cache(256)
def _validator(text: str) -> Any:
    from jsonschema.exceptions import SchemaError
    from jsonschema.validators import Draft202012Validator, validator_for

    schema = json.loads(text)
    kind: Any = validator_for(schema, default=Draft202012Validator)
    try:
        kind.check_schema(schema)
    except SchemaError as error:
        raise ValueError(error.message) from error
    return kind(schema)
