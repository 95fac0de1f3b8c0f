"""Adds a saved adapter to the weights that it was trained on, so that it can be used like any checkpoint."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hflow.base.errors import ConfigError
from hflow.base.files import read_json_object, resolved
from hflow.base.model_files import copy_other_files
from hflow.launch.checkpoints.fingerprints import WEIGHT_SUFFIXES, describe_change, fingerprint, read_inputs
from hflow.launch.checkpoints.saved import ADAPTER_CONFIG, is_adapter
from hflow.models.hub import fetch_model, hub_model
from hflow.models.settings import MERGED, SHARDS
from hflow.runtime.saving.run_directory import RunDirectory


def model_directory(directory: Path) -> Path:
    """Return the directory of a model as Hugging Face writes it.

    Of an adapter it is what was saved beside it, or a merged copy, which exists until the process ends.

    Raises:
        ConfigError: for the reasons of `merge_adapter`.
    """
    if not is_adapter(directory):
        return directory
    if (directory / MERGED / "config.json").is_file():
        return directory / MERGED
    private = Path(tempfile.mkdtemp(prefix="hflow-merged-"))
    atexit.register(shutil.rmtree, private, ignore_errors=True)
    merged = private / directory.name  # what is exported has the modes of this one
    merged.mkdir()
    merge_adapter(directory, merged)
    return merged


def merge_adapter(directory: Path, out: Path) -> None:
    """Write the model of a saved adapter as Hugging Face files, in the dtype of its base, with the tokenizer.

    Args:
        directory: what a checkpoint has of a model with adapters, or any adapter that peft saved.
        out: made if necessary.

    Raises:
        ConfigError: if peft is missing, or the base is not where it was, or not what it was.
    """
    if find_spec("peft") is None:
        raise ConfigError(
            f"{directory} holds an adapter; install peft to read it: pip install 'hflow-rl[lora]'"
        )
    config = read_json_object(directory / ADAPTER_CONFIG)
    base, revision = config.get("base_model_name_or_path"), config.get("revision")
    if isinstance(base, str) and hub_model(base) is not None:
        base = f"{base}@{revision}" if isinstance(revision, str) else base
        base = str(fetch_model(base, f"base_model_name_or_path in {directory / ADAPTER_CONFIG}"))
    if not isinstance(base, str) or not (Path(base) / "config.json").is_file():
        raise ConfigError(
            f"{directory} holds an adapter of the model in {base}, which has no checkpoint; put it there, or "
            f"change base_model_name_or_path in {ADAPTER_CONFIG}"
        )
    _check_base(directory, Path(base))
    from peft import PeftModel
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    from hflow.models.adapter import round_base

    disable_progress_bar()
    models: Any = AutoModelForCausalLM
    model = models.from_pretrained(base, dtype="auto", local_files_only=True, use_safetensors=True)
    round_base(model, directory)
    merged: Any = PeftModel.from_pretrained(model, str(directory)).merge_and_unload()
    merged.save_pretrained(out)
    for source in (
        Path(base),
        directory,
    ):  # such as the tokenizer, which may be another than that of the base
        copy_other_files(source, out, (SHARDS, MERGED))


def _check_base(directory: Path, base: Path) -> None:
    """Refuse to add an adapter of a run's checkpoint to other weights than those that it was trained on."""
    run = resolved(directory).parents[2:3]
    known = read_inputs(RunDirectory(run[0]).inputs) if run else None
    before = None if known is None else known.inputs.get(f"models.{directory.name}")
    if before is None:
        return
    weights = tuple(file for file in before.files if file.path.endswith(WEIGHT_SUFFIXES))
    paths = [base / Path(file.path).name for file in weights]
    now = fingerprint((path for path in paths if path.is_file()), before.num_blocks)
    if change := describe_change(replace(before, files=weights), now):
        raise ConfigError(
            f"{directory} holds an adapter of other weights than {base} has now: {change}. Put them back, or "
            f"change base_model_name_or_path in {ADAPTER_CONFIG} to where they are."
        )
