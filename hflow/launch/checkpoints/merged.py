"""Adds a saved adapter to the weights that it was trained on, so that it can be used like any checkpoint."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

from hflow.base.errors import ConfigError
from hflow.base.files import resolved
from hflow.launch.checkpoints.fingerprints import WEIGHT_SUFFIXES, describe_change, fingerprint, read_inputs
from hflow.models.hub import adapter_base, fetch_model, is_fetched
from hflow.models.merged import ADAPTER_CONFIG, base_of, is_adapter, saved_merged, write_merged
from hflow.runtime.saving.run_directory import RunDirectory


def model_directory(directory: Path) -> Path:
    """Return the directory of a model as Hugging Face writes it.

    Of an adapter it is what was saved beside it, or a merged copy, which exists until the process ends.

    Raises:
        ConfigError: for the reasons of `merge_adapter`.
    """
    if not is_adapter(directory):
        return directory
    if saved := saved_merged(directory):
        return saved
    private = Path(tempfile.mkdtemp(prefix="hflow-merged-"))
    atexit.register(shutil.rmtree, private, ignore_errors=True)
    merged = private / directory.name  # what is exported has the modes of this one
    merged.mkdir()
    merge_adapter(directory, merged)
    return merged


def merge_adapter(directory: Path, out: Path) -> None:
    """Write the model of an adapter, a checkpoint's or any that peft saved, as Hugging Face files.

    It has the dtype of its base, and its tokenizer.

    Raises:
        ConfigError: if peft is missing, or the base is not where it was, or not what it was.
    """
    check_base(directory)
    write_merged(directory, fetch_model(*base_of(directory)), out)


def weight_directories(path: str) -> list[Path]:
    """Return the directories with the weights of a model: of an adapter, its own and those of its base."""
    directory = Path(path)
    if not is_adapter(directory):
        return [] if is_fetched(path) else [directory]  # a commit says what its files are
    if saved := saved_merged(directory):
        return [saved]
    return [directory, *weight_directories(base_of(directory)[0])]


def check_base(directory: Path) -> None:
    """Refuse to add an adapter of a run's checkpoint to other weights than those that it was trained on.

    Raises:
        ConfigError: if the base is not where it was, or not what it was.
    """
    base = adapter_base(directory)
    run = resolved(directory).parents[2:3]
    known = read_inputs(RunDirectory(run[0]).inputs) if run else None
    before = None if known is None else known.inputs.get(f"models.{directory.name}")
    if before is None:
        return
    weights = tuple(file for file in before.files if file.path.endswith(WEIGHT_SUFFIXES))
    places = weight_directories(base_of(directory)[0])
    paths = [place / Path(file.path).name for file in weights for place in places]
    now = fingerprint((path for path in paths if path.is_file()), before.num_blocks)
    if change := describe_change(replace(before, files=weights), now):
        raise ConfigError(
            f"{directory} holds an adapter of other weights than {base} has now: {change}. Put them back, or "
            f"change base_model_name_or_path in {ADAPTER_CONFIG} to where they are."
        )
