"""Adapters as peft saves them, merged into the weights that they were trained beside."""

from __future__ import annotations

import hashlib
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hflow.base.cache import cache_directory
from hflow.base.errors import ConfigError
from hflow.base.files import read_json_object, resolved
from hflow.base.model_files import CONFIG, copy_other_files
from hflow.models.settings import MERGED, SHARDS

ADAPTER_CONFIG = "adapter_config.json"


def is_adapter(directory: Path) -> bool:
    """Return whether a directory holds a saved adapter in place of a model."""
    return (directory / ADAPTER_CONFIG).is_file() and not (directory / CONFIG).is_file()


def saved_merged(directory: Path) -> Path | None:
    """Return the merged model that was saved beside an adapter; None if there is none."""
    merged = directory / MERGED
    return merged if (merged / CONFIG).is_file() else None


def base_of(directory: Path) -> tuple[str, str]:
    """Return the path of the model that an adapter was trained beside, and the key that names it.

    Raises:
        ConfigError: if the adapter names none.
    """
    config = read_json_object(directory / ADAPTER_CONFIG)
    base, revision = config.get("base_model_name_or_path"), config.get("revision")
    key = f"base_model_name_or_path in {directory / ADAPTER_CONFIG}"
    if not isinstance(base, str) or not base:
        raise ConfigError(f"{key} is {base!r}; it must be the model that the adapter was trained beside")
    is_here = Path(base).is_dir() or not isinstance(revision, str)
    return (base if is_here else f"{base}@{revision}"), key


def merged_directory(directory: Path, base: Path, *, base_may_change: bool) -> Path:
    """Return the directory of an adapter's merged model in the cache, which may not exist yet.

    `base` has the weights beside it. `base_may_change` says that its name does not say what is in it.
    """
    digest = hashlib.blake2b(f"{resolved(base)}\n".encode(), digest_size=8)
    for place in (directory, base) if base_may_change else (directory,):
        for file in sorted(path for path in place.iterdir() if path.is_file()):
            stat = file.stat()
            digest.update(f"{resolved(file)} {stat.st_size} {stat.st_mtime_ns}\n".encode())
    return cache_directory() / f"merged-{directory.name}-{digest.hexdigest()}"


def write_description(directory: Path, base: Path, out: Path) -> None:
    """Write what an adapter's merged model has beside its weights, a critic's head included."""
    shutil.copyfile(base / CONFIG, out / CONFIG)
    for source in (base, directory):  # the tokenizer may be another than that of the base
        copy_other_files(source, out, (SHARDS, MERGED))
    for head in directory.glob("*_head.safetensors"):
        shutil.copyfile(head, out / head.name)


def write_merged(directory: Path, base: Path, out: Path) -> None:
    """Write the model of a saved adapter as Hugging Face files, in the dtype of its base, with the tokenizer.

    The adapter is a checkpoint's of a model, or any that peft saved, beside the weights of `base`.

    Raises:
        ConfigError: if peft is missing.
    """
    if find_spec("peft") is None:
        raise ConfigError(
            f"{directory} holds an adapter; install peft to read it: pip install 'hflow-rl[lora]'"
        )
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
    from transformers.utils.logging import disable_progress_bar

    from hflow.models.adapter import round_base

    disable_progress_bar()
    options: dict[str, Any] = {"dtype": "auto", "local_files_only": True, "use_safetensors": True}
    models: Any = AutoModelForCausalLM
    if read_json_object(directory / ADAPTER_CONFIG).get("task_type") == "SEQ_CLS":  # a reward model
        models, options["num_labels"] = AutoModelForSequenceClassification, 1
    model = models.from_pretrained(base, **options)
    round_base(model, directory)
    merged: Any = PeftModel.from_pretrained(model, str(directory)).merge_and_unload()
    out.mkdir(parents=True, exist_ok=True)
    write_description(directory, base, out)
    merged.save_pretrained(out)
