"""Imports megatron when a test needs it: it takes seconds, and every process of tests collects all files."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType


def megatron(name: str) -> ModuleType:
    """Return a module of `hflow.training.megatron`, imported for the CPU."""
    from hflow.training.megatron.device import prepare

    prepare("cpu")
    return import_module(f"hflow.training.megatron.{name}")
