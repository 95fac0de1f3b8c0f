"""Bounds what interpolations such as `${models.actor.path}` expand to: ten levels of ten are 10 GB."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from hflow.errors import ConfigError, shorten

MAX_CHARACTERS = 4 << 20
"""Characters that the values of one key may expand to."""
_REFERENCE = re.compile(r"\$\{\s*([^${}\s]+)\s*\}")
_BRACKET = re.compile(r"\[([^\[\]]*)\]")


def check_interpolations(values: Mapping[Any, Any]) -> None:
    """Check that no value of a composed configuration expands to more than memory should hold.

    Args:
        values: the configuration, with interpolations as text.

    Raises:
        ConfigError: for the first key that does; names it.
    """
    sizes: dict[str, int] = {}

    def size(key: str, value: Any) -> int:
        """Return the characters of a value; 0 for one that contains itself, which OmegaConf refuses."""
        if key not in sizes:
            sizes[key] = 0
            if isinstance(value, Mapping | list):
                named = value.items() if isinstance(value, Mapping) else enumerate(value)
                sizes[key] = sum(size(f"{key}.{name}" if key else str(name), item) for name, item in named)
            else:
                text = str(value)
                found = (_absolute(reference, key) for reference in _REFERENCE.findall(text))
                sizes[key] = len(text) + sum(size(other, _value(values, other)) for other in found)
            if sizes[key] > MAX_CHARACTERS and key:
                raise ConfigError(
                    f"{shorten(key, 80)} expands to more than {MAX_CHARACTERS:,} characters; remove "
                    "interpolations, which repeat what they name"
                )
        return sizes[key]

    size("", values)


def _absolute(reference: str, key: str) -> str:
    """Return the dotted key of what an interpolation names. Leading dots are relative to its own key."""
    name = reference.lstrip(".")
    num_dots = len(reference) - len(name)
    parents = key.split(".")[:-num_dots] if num_dots else []
    return ".".join([*parents, *_BRACKET.sub(r".\1", name).strip(".").split(".")])


def _value(values: Any, key: str) -> Any:
    for name in key.split("."):
        if isinstance(values, list) and name.isdigit() and int(name) < len(values):
            values = values[int(name)]
        elif isinstance(values, Mapping):
            values = values.get(name)
        else:
            return None
    return values
