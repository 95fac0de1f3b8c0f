"""Writes a configuration as YAML, as a mapping, and as flat rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from hflow.base.validation import join
from hflow.config.schema import RunConfig


def to_yaml(config: RunConfig) -> str:
    """Return the whole configuration, defaults included. The YAML composes to the same configuration."""
    import yaml

    text: str = yaml.safe_dump(_plain(config), sort_keys=False)
    return text


def to_mapping(config: RunConfig) -> dict[str, Any]:
    """Return the whole configuration as mappings, lists and scalars, defaults included."""
    plain = _plain(config)
    assert isinstance(plain, dict)
    return plain


def flatten(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted key and value of every leaf of a configuration, or of a part of it, in key order."""
    plain = _plain(value)
    if isinstance(plain, dict):
        for name in sorted(plain):
            yield from flatten(plain[name], join(key, name))
    else:
        yield key, plain


def _plain(value: Any) -> Any:
    """Return the value as dicts, lists and scalars."""
    if dataclasses.is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value
