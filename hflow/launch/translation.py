"""`hflow translate`: a configuration of another library as a recipe with its YAML."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hflow.base.errors import ConfigError, reason_of
from hflow.base.shipped import shipped_directory
from hflow.base.validation import is_name
from hflow.config.compose import check_interpolations
from hflow.config.yaml_files import read_yaml_value
from hflow.translate import Entry, Peer, peers

_TUNED = re.compile(r"-(instruct|chat|it|base|hf|v\d+(\.\d+)?)$")
"""Endings of a model's name that do not change its sizes."""


@dataclass(frozen=True)
class Translation:
    """A translated configuration."""

    peer: Peer
    entries: tuple[Entry, ...]
    """What became of each key of the file."""
    recipe: Path
    """The Python file that was written."""
    settings: Path
    """The YAML file that was written."""

    def to_json(self) -> dict[str, Any]:
        """Return the translation as a mapping."""
        return {
            "library": self.peer.name,
            "version": self.peer.version,
            "recipe": str(self.recipe),
            "settings": str(self.settings),
            "keys": [entry.to_json() for entry in self.entries],
        }


def translate(file: Path, directory: Path, cluster: str | None = None) -> Translation:
    """Write a configuration of another library as a recipe and its YAML to a directory, old or new.

    The file is verl's (the whole configuration, or Hydra's list of overrides) or TRL's. `cluster` names the
    devices, such as `h100-1x8`; None: what the file says of them.

    Raises:
        ConfigError: if the file cannot be read, if it is of none of these libraries, or if a file to be
            written exists. Nothing is written then.
    """
    values = _leaves(file)
    peer = _peer_of(values, file)
    given = peer.given(values)
    draft = peer.translate(given, cluster)
    name = _recipe_name(file)
    recipe, settings = directory / f"{name}.py", directory / f"{name}.yaml"
    for written in (recipe, settings):
        if written.exists():
            raise ConfigError(f"{written} exists already and is not overwritten; name another directory")
    origin = f"{file.name} of {peer.name} {peer.version}"
    directory.mkdir(parents=True, exist_ok=True)
    recipe.write_text(draft.recipe_text(name, origin), encoding="utf-8")
    entries = tuple(given.entries())
    settings.write_text(_settings_text(draft.settings, origin, entries), encoding="utf-8")
    return Translation(peer, entries, recipe, settings)


def _leaves(file: Path) -> dict[str, Any]:
    """Return the values of a file by dotted key, with interpolations resolved."""
    values = read_yaml_value(file)
    if isinstance(values, list):
        values = dict(_override(text, file) for text in values)
    if not isinstance(values, dict):
        raise ConfigError(
            f"{file} is neither a mapping of keys to values nor a list of key=value; name a YAML file of "
            f"{_names()}. `python -m verl.trainer.main_ppo ... --cfg job --resolve` prints that of verl"
        )
    tree = OmegaConf.create()
    try:
        for key, value in values.items():
            OmegaConf.update(tree, str(key), value, force_add=True)
        check_interpolations(values)
        return dict(_resolved(tree))
    except (OmegaConfBaseException, RecursionError, AttributeError, ValueError) as error:
        raise ConfigError(f"{file}: {reason_of(error)}; correct it") from error


def _resolved(tree: DictConfig) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of a tree. Interpolations of the environment, and others that fail, stay as they are.

    A mapping that is the value of one key of a library is a leaf.
    """
    known = frozenset(key for peer in peers() for key in peer.defaults)

    def leaves(part: Any, key: str) -> Iterator[tuple[str, Any]]:
        if isinstance(part, dict) and part and key not in known:
            for name, item in part.items():
                yield from leaves(item, f"{key}.{name}" if key else str(name))
        elif isinstance(part, str) and "${" in part:
            yield key, _resolve(tree, key, part)
        else:
            yield key, None if part == "???" else part

    yield from leaves(OmegaConf.to_container(tree), "")


def _resolve(tree: DictConfig, key: str, text: str) -> Any:
    if "oc.env" in text:
        return text
    try:
        value = OmegaConf.select(tree, key)
    except OmegaConfBaseException:
        return text
    return OmegaConf.to_container(value) if OmegaConf.is_config(value) else value


def _override(text: Any, file: Path) -> tuple[str, Any]:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        parsed = OverridesParser.create().parse_override(text if isinstance(text, str) else "")
        if parsed.is_delete() or parsed.is_sweep_override():
            raise ValueError
        return parsed.key_or_group, parsed.value()
    except (HydraException, ValueError, RecursionError) as error:
        raise ConfigError(f"{file}: {text!r:.80} is not key=value, as Hydra writes it; remove it") from error


def _names() -> str:
    return " or ".join(peer.name for peer in peers())


def _peer_of(values: Mapping[str, Any], file: Path) -> Peer:
    """Return the library whose keys a file has: it knows most of them, and at least half."""
    peer = max(peers(), key=lambda peer: peer.num_known([*values]))
    if not values or 2 * peer.num_known([*values]) < len(values):
        strange = next((key for key in values if key not in peer.defaults), None)
        problem = f"{strange!r} and most other keys are not theirs" if strange else "it has no keys"
        raise ConfigError(f"{file} is not a configuration of {_names()}: {problem}; name another file")
    return peer


def _recipe_name(file: Path) -> str:
    """Return the file's name as that of a module."""
    name = re.sub(r"\W+", "_", file.stem, flags=re.ASCII).strip("_").lower()
    return name if is_name(name) else f"recipe_{name}".rstrip("_")


def _settings_text(settings: Mapping[str, Any], origin: str, entries: Sequence[Entry]) -> str:
    """Return the YAML of the recipe: what to look at, and the settings.

    The sizes of a model that hflow knows are for the plan, until the checkpoint is there.
    """
    import yaml

    tree: dict[str, Any] = {}
    for key, value in settings.items():
        *parts, last = key.split(".")
        place = tree
        for part in parts:
            place = place.setdefault(part, {})
        place[last] = value
    notes = [f"# {entry.key}: {entry.note}\n" for entry in entries if entry.needs_attention]
    header = "".join([f"# Translated from {origin}.\n", *(["# Left to you:\n", *notes] if notes else [])])
    preset = _preset(str(settings.get("models.actor.path", "")))
    if preset is not None:
        header += (
            "defaults:\n"
            f"  - model@models.actor: {preset}  # sizes for the plan, until the checkpoint is there\n"
            "  - _self_\n\n"
        )
    text: str = yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)
    return header + text


def _preset(path: str) -> str | None:
    """Return the file of `configs/model` with the sizes of a model of the Hub, or None."""
    name = path.partition("@")[0].rpartition("/")[2].lower()
    known = {file.stem for file in (shipped_directory("configs") / "model").glob("*.yaml")}
    return next((stem for stem in (name, _TUNED.sub("", name)) if stem in known), None)
