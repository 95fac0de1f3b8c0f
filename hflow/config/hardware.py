"""Reads figures of devices and links, and calibrations, from small YAML files.

hflow's own files are in `configs/hardware/devices`, `links` and `calibrations`, and a user's files in
`hardware/devices` and so on beside the recipe, where they replace files of the same name. A file has the
name of the device, link or calibration.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from hflow.config.yaml_files import read_yaml
from hflow.shipped import shipped_directory

HardwareKind = Literal["devices", "links", "calibrations"]


def read_hardware(kind: HardwareKind, recipe: str | Path) -> dict[str, Mapping[str, Any]]:
    """Return the figures of every device, link or calibration that a recipe can use, by name.

    Args:
        kind: devices, links or calibrations.
        recipe: path of the recipe's Python file.

    Raises:
        ConfigError: for a file that is not a YAML mapping.
    """
    directories = (shipped_directory("configs") / "hardware" / kind, Path(recipe).parent / "hardware" / kind)
    files = {file.stem: file for directory in directories for file in directory.glob("*.yaml")}
    return {name: read_yaml(files[name]) for name in sorted(files)}
