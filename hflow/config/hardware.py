"""Reads figures of devices and links from small YAML files.

hflow's own files are in `configs/hardware/devices` and `configs/hardware/links`, and a user's files in
`hardware/devices` and `hardware/links` beside the recipe, where they replace files of the same name. A
file has the name of the device or link.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from hflow.config.compose import config_dir, error_text
from hflow.errors import ConfigError

HardwareKind = Literal["devices", "links"]


def read_hardware(kind: HardwareKind, recipe: str | Path) -> dict[str, Mapping[str, Any]]:
    """Return the figures of every device or link that a recipe can use, by name.

    Args:
        kind: devices or links.
        recipe: path of the recipe's Python file.

    Raises:
        ConfigError: for a file that is not a YAML mapping.
    """
    directories = (config_dir() / "hardware" / kind, Path(recipe).parent / "hardware" / kind)
    files = {file.stem: file for directory in directories for file in directory.glob("*.yaml")}
    return {name: _read(files[name]) for name in sorted(files)}


def _read(file: Path) -> Mapping[str, Any]:
    import yaml

    try:
        with file.open(encoding="utf-8") as text:
            values = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, OSError) as error:
        raise ConfigError(error_text(error, str(file))) from error
    if not isinstance(values, dict):
        raise ConfigError(f"{file} must be a mapping of figures, as the files in {config_dir()}/hardware are")
    return {str(key): value for key, value in values.items()}
