"""Figures of devices and links, from small YAML files: a user's own come before hflow's.

hflow's lie in `configs/hardware/devices` and `configs/hardware/links`, a user's in `hardware/devices` and
`hardware/links` beside the recipe. A file's name is that of the device or link.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from hflow.config.compose import config_dir
from hflow.config.explain import explain
from hflow.errors import ConfigError

Kind = Literal["devices", "links"]


def read_hardware(kind: Kind, recipe: str | Path) -> dict[str, Mapping[str, Any]]:
    """Every device or link that is known to a recipe, by name, as its file says.

    Args:
        kind: which figures.
        recipe: path of the recipe's Python file.

    Raises:
        ConfigError: for a file that is no YAML mapping.
    """
    own = Path(recipe).parent / "hardware" / kind
    files = {file.stem: file for at in (config_dir() / "hardware" / kind, own) for file in at.glob("*.yaml")}
    return {name: _read(files[name]) for name in sorted(files)}


def _read(file: Path) -> Mapping[str, Any]:
    import yaml

    try:
        with file.open(encoding="utf-8") as text:
            values = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, OSError) as error:
        raise ConfigError(explain(error, str(file))) from error
    if not isinstance(values, dict):
        raise ConfigError(f"{file}: it must be a mapping of figures, as in {config_dir()}/hardware")
    return {str(key): value for key, value in values.items()}
