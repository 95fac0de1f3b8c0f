"""`hflow export`: a saved model as a plain Hugging Face directory."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from safetensors import safe_open
from safetensors.torch import save_file

from hflow.base.errors import ConfigError
from hflow.base.files import read_json_object
from hflow.data.text.tokenizer import TextTokenizer, TokenizerSettings, has_tokenizer
from hflow.launch.checkpoints.merged import model_directory
from hflow.launch.checkpoints.saved import is_language_model
from hflow.launch.targets import resolve
from hflow.models.dtypes import SAVED_DTYPES
from hflow.models.hub import make_private_model, push_model
from hflow.models.settings import SHARDS
from hflow.models.weight_files import INDEX, weight_file_names
from hflow.runtime.saving.checkpoint import MANIFEST, verify_checkpoint

Dtype = Literal["fp32", "bf16", "fp16"]
CONFIG = "config.json"


@dataclass(frozen=True)
class ExportedModel:
    """What was exported."""

    model: str
    source: Path
    directory: Path
    num_bytes: int
    """The bytes of all files."""
    dtype: str
    """The dtype of the weights, as config.json calls it."""
    has_chat_template: bool
    page: str | None = None
    """The model's page on the Hub, if it was uploaded."""


def export(
    target: str,
    directory: Path,
    model: str | None = None,
    dtype: Dtype | None = None,
    push: str | None = None,
) -> ExportedModel:
    """Write a saved model without its optimizer state, for any program that reads Hugging Face files.

    Adapters are merged into the weights that they were trained on. If `generation_config.json` lacks a token
    that ends turns in hflow, it gets it.

    Args:
        target: a run's directory, NAME for the latest run in `runs/NAME`, or a checkpoint's directory.
        directory: where to write; it must not exist.
        model: the model of a checkpoint; None: the only one.
        dtype: precision of the weights; None: that of the checkpoint.
        push: the model of the Hub to upload it as, `OWNER/NAME`, which is made private if there is none.

    Raises:
        ConfigError: if there is no such model, the directory exists, or the Hub does not take it.
        RunError: if a file of the model is missing or damaged; names it.
        DataError: for a tokenizer that cannot be loaded.
        BackendError: for weights that cannot be read.
    """
    if directory.exists() or directory.is_symlink():
        raise ConfigError(f"{directory} exists; name a new directory, or remove it")
    saved = resolve(target, fetches_models=True)
    source = saved.choose_model(model)
    name = saved.name_of(source)
    if saved.checkpoint is not None and (saved.checkpoint / MANIFEST).is_file():
        verify_checkpoint(saved.checkpoint, lambda file: _is_exported(file, name))
    if push is not None:
        make_private_model(push)
    unfinished = directory.with_name(f".{directory.name}-unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.parent.mkdir(parents=True, exist_ok=True)
    try:
        shutil.copytree(model_directory(source), unfinished, ignore=shutil.ignore_patterns(SHARDS))
        if dtype is not None:
            _cast(unfinished, dtype)
        if is_language_model(source) and has_tokenizer(unfinished):
            TextTokenizer(TokenizerSettings(str(unfinished))).save_stop_ids(unfinished)
        for file in unfinished.rglob("*"):
            file.chmod(0o755 if file.is_dir() else 0o644)
        unfinished.rename(directory)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    config = read_json_object(directory / CONFIG)
    return ExportedModel(
        model=name,
        source=source,
        directory=directory,
        num_bytes=sum(file.stat().st_size for file in directory.rglob("*") if file.is_file()),
        dtype=str(config.get("dtype", config.get("torch_dtype", "unknown"))),
        has_chat_template=_has_chat_template(directory),
        page=None if push is None else push_model(directory, push),
    )


def _is_exported(file: str, model: str) -> bool:
    """Return whether a file of a checkpoint belongs to a model and is no optimizer state."""
    return file.startswith(f"{model}/") and not file.startswith(f"{model}/{SHARDS}/")


def _cast(directory: Path, dtype: Dtype) -> None:
    """Write the weights again in another precision, one file after the other."""
    num_bytes = 0
    for name in weight_file_names(directory):
        path = directory / name
        with safe_open(path, framework="pt") as file:
            tensors = {key: file.get_tensor(key).to(SAVED_DTYPES[dtype]) for key in file.keys()}  # noqa: SIM118
        save_file(tensors, path, metadata={"format": "pt"})
        num_bytes += sum(tensor.nbytes for tensor in tensors.values())
    _change_json(
        directory / CONFIG, {"dtype": str(SAVED_DTYPES[dtype]).removeprefix("torch.")}, drop="torch_dtype"
    )
    if (directory / INDEX).is_file():
        metadata = read_json_object(directory / INDEX).get("metadata") or {}
        _change_json(directory / INDEX, {"metadata": {**metadata, "total_size": num_bytes}})


def _change_json(file: Path, changes: Mapping[str, Any], drop: str | None = None) -> None:
    values = {key: value for key, value in read_json_object(file).items() if key != drop}
    file.write_text(json.dumps({**values, **changes}, indent=2) + "\n", encoding="utf-8")


def _has_chat_template(directory: Path) -> bool:
    file = directory / "tokenizer_config.json"
    in_config = file.is_file() and "chat_template" in read_json_object(file)
    return in_config or (directory / "chat_template.jinja").is_file()
