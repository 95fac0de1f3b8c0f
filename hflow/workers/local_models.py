"""Gives a worker's models and tokenizers their directories on its machine."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from hflow.models.hub import fetch_description, fetch_model, hub_model
from hflow.workers.interface import WorkerSetup


def with_local_models(setup: WorkerSetup, hosted: Collection[str]) -> WorkerSetup:
    """Return a setup in which paths of models are directories here; those of hosted models are fetched.

    Raises:
        ConfigError: if a model cannot be fetched.
    """
    models, tokenizers = dict(setup.models), dict(setup.tokenizers)
    for name, settings in setup.models.items():
        if settings.path is not None:
            fetch = fetch_model if name in hosted else fetch_description
            path = str(fetch(settings.path, f"models.{name}.path"))
            is_adapter = path != settings.path and Path(settings.path).is_dir()
            base = settings.path if is_adapter or hub_model(settings.path) else None
            models[name] = replace(settings, path=path, base=base)
    for name, tokenizer in setup.tokenizers.items():
        if tokenizer.path is not None:
            path = str(fetch_description(tokenizer.path, f"models.{name}.path"))
            tokenizers[name] = replace(tokenizer, path=path)
    return replace(setup, models=models, tokenizers=tokenizers)
