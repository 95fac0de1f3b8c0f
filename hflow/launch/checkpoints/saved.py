"""Tells what a directory of a checkpoint holds: a model as Hugging Face writes it, or an adapter of one."""

from __future__ import annotations

from pathlib import Path

from hflow.base.files import read_json_object
from hflow.models.merged import ADAPTER_CONFIG, is_adapter


def is_saved_model(directory: Path) -> bool:
    """Return whether a directory holds a model as Hugging Face writes it, or an adapter of one."""
    return (directory / "config.json").is_file() or is_adapter(directory)


def is_language_model(directory: Path) -> bool:
    """Return whether a saved model, or the model of an adapter, is a language model.

    An adapter of a critic or a reward model has the weights of its head beside it.
    """
    if is_adapter(directory):
        task = read_json_object(directory / ADAPTER_CONFIG).get("task_type")
        return task == "CAUSAL_LM" and not any(directory.glob("*_head.safetensors"))
    names = read_json_object(directory / "config.json").get("architectures") or ["ForCausalLM"]
    return any(str(name).endswith(("ForCausalLM", "LMHeadModel")) for name in names)
