"""From a recipe's YAML and the command line's overrides to a `RunConfig`, by Hydra.

The primary config is the YAML beside the recipe with the recipe's name, if there is one. Its
defaults list takes groups from `configs/` (`model`, `optim`, `data`) and from the recipe's own
directory. Overrides are Hydra's: `steps=10`, `models.actor.optim.lr=3e-4`, `+model@models.ref=NAME`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import OverrideType
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from hflow.config.explain import explain
from hflow.config.schema import RunConfig
from hflow.errors import ConfigError
from hflow.validation import from_mapping, unknown_key

_BARE_PLACEMENT = re.compile(r"(\+{0,2}placement)=(?!null$)([^'\"].*)", re.DOTALL)

NOTATION = "write key=value, and a value with special characters as key='value'"


def load_config(recipe: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Compose the configuration of a recipe.

    Args:
        recipe: path of the recipe's Python file.
        overrides: `key=value` as on the command line; a value replaces what files say.

    Raises:
        ConfigError: for an unknown key, group or override, or a value that does not fit.
    """
    recipe = Path(recipe).absolute()
    values = _compose(recipe.with_suffix(".yaml"), overrides)
    return from_mapping(RunConfig, {"name": recipe.stem, **values})


def config_dir() -> Path:
    """The directory of hflow's own groups: inside the installed package, or beside its source."""
    package = Path(__file__).parents[1]
    inside = package / "configs"
    return inside if inside.is_dir() else package.parent / "configs"


def _compose(primary: Path, overrides: Sequence[str]) -> dict[str, Any]:
    directory = primary.parent if primary.is_file() else config_dir()
    name = primary.stem if primary.is_file() else None
    changes = [_searchpath(config_dir()), *map(_as_hydra, overrides)]
    try:
        with initialize_config_dir(config_dir=str(directory), version_base="1.3"):
            composed = hydra_compose(name, overrides=changes)
        values = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    except (HydraException, OmegaConfBaseException, YAMLError, ValueError, OSError) as error:
        raise ConfigError(explain(error, primary.name)) from error
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def _searchpath(directory: Path) -> str:
    quoted = str(directory).replace("\\", "\\\\").replace("'", "\\'")
    return f"hydra.searchpath=['file://{quoted}']"


def _as_hydra(override: str) -> str:
    """Let `key=value` set a key that no file mentions; `build` refuses those that do not exist."""
    override = _with_quotes(override)
    try:
        parsed = OverridesParser.create().parse_override(override)
    except HydraException as error:
        raise ConfigError(f"override {override!r} is not understood: {NOTATION}") from error
    if parsed.key_or_group.partition(".")[0] == "hydra":
        raise ConfigError(unknown_key(parsed.key_or_group, "hydra", [f.name for f in fields(RunConfig)]))
    is_value = parsed.type is OverrideType.CHANGE and parsed.package is None
    return f"++{override}" if is_value else override


def _with_quotes(override: str) -> str:
    """A placement consists of characters that Hydra reserves; its user need not quote it."""
    match = _BARE_PLACEMENT.fullmatch(override)
    if match is None:
        return override
    key, value = match.groups()
    escaped = value.replace("'", "\\'")
    return f"{key}='{escaped}'"
