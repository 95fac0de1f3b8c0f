"""Finds the checkpoint that `hflow serve` names, and how its model was configured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hflow.base.errors import ConfigError, nearest, shorten
from hflow.base.files import read_json_object
from hflow.base.model_files import max_positions
from hflow.base.validation import from_mapping
from hflow.config import ModelConfig
from hflow.config.files import read_chat_template
from hflow.config.yaml_files import parse_yaml, read_yaml
from hflow.data.text.tokenizer import TokenizerSettings
from hflow.launch.checkpoints.merged import model_directory
from hflow.launch.targets import resolve
from hflow.runtime.saving.run_directory import RunDirectory

KEYS = (
    "alphabet",
    "chat_template",
    "template_kwargs",
    "dtype",
    "gen.cache_dtype",
    "gen.cuda_graphs",
    "gen.layout",
    "gen.max_model_len",
    "gen.max_running",
    "gen.quantization",
)
"""Keys of `models.NAME` that matter for serving."""


@dataclass(frozen=True)
class ServedCheckpoint:
    """A checkpoint to serve."""

    directory: Path
    """With config, weights and tokenizer, as Hugging Face writes them."""
    name: str
    """Name of the model for clients."""
    config: ModelConfig
    """The configuration of the run that saved it, with the user's changes."""

    @property
    def dtype(self) -> Literal["fp32", "bf16"]:
        """The precision: as configured, else that of the checkpoint."""
        if self.config.dtype is not None:
            return self.config.dtype
        saved = read_json_object(self.directory / "config.json")
        return "bf16" if saved.get("dtype", saved.get("torch_dtype")) == "bfloat16" else "fp32"

    @property
    def tokenizer(self) -> TokenizerSettings:
        """The settings of the tokenizer."""
        saved = read_json_object(self.directory / "config.json")
        return TokenizerSettings(
            str(self.directory),
            self.config.alphabet,
            self.config.chat_template,
            self.config.template_kwargs,
            max_tokens=max_positions(saved),
            vision=saved,
            min_pixels=self.config.images.min_pixels,
            max_pixels=self.config.images.max_pixels,
        )


def find_checkpoint(target: str, overrides: Sequence[str], model: str | None) -> ServedCheckpoint:
    """Return the checkpoint that a user names, with overrides of `models.NAME`; arguments as for `serve`.

    Raises:
        ConfigError: if there is no checkpoint, there are several, or an override is wrong.
    """
    found = resolve(target, fetches_models=True)
    directory = found.choose_model(model, generates=True)
    config = _config(directory, overrides)
    return ServedCheckpoint(model_directory(directory), found.name_of(directory), config)


def _config(directory: Path, overrides: Sequence[str]) -> ModelConfig:
    """Return the configuration of the run that saved a checkpoint, if there was one, with changes."""
    values: dict[str, Any] = {}
    file = RunDirectory(directory.parent.parent.parent).config  # checkpoints/STEP/MODEL
    if file.is_file():
        of_model = _look_up(_look_up(read_yaml(file), "models"), directory.name)
        values = {key: _look_up(of_model, key) for key in KEYS}
    for override in overrides:
        key, is_given, text = override.partition("=")
        if not is_given:
            raise ConfigError(f"override {override!r} cannot be parsed: write key=value")
        if key not in KEYS:
            raise ConfigError(f"unknown key {key!r}{nearest(key, KEYS)}; serve takes {', '.join(KEYS)}")
        try:
            is_text = key in ("alphabet", "chat_template") and text != "null"
            values[key] = text if is_text else parse_yaml(text)
        except ValueError as error:
            raise ConfigError(f"override {shorten(override, 80)!r} cannot be parsed: {error}") from error
        if key == "chat_template" and values[key] is not None:
            values[key] = read_chat_template(text, Path(), key)
    nested: dict[str, Any] = {"gen": {}}
    for key, value in values.items():
        if value is None and key not in ("alphabet", "chat_template", "dtype", "gen.layout"):
            continue
        group, _, name = key.rpartition(".")
        (nested[group] if group else nested)[name] = value
    return from_mapping(ModelConfig, nested)


def _look_up(values: Any, key: str) -> Any:
    for name in key.split("."):
        values = values.get(name) if isinstance(values, Mapping) else None
    return values
