"""The engine's own module: built from settings, or a twin that shares a trainer's parameters."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from hflow.backends.architecture import read_config, refusals
from hflow.backends.attention import check_supported
from hflow.backends.base import ModelSettings
from hflow.backends.embedded_engine.attention import ATTENTION
from hflow.errors import BackendError

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def build_module(settings: ModelSettings, shared: nn.Module | None) -> nn.Module:
    """A Hugging Face causal LM in evaluation mode whose attention is the engine's.

    Args:
        settings: what to build.
        shared: a module of the same architecture whose parameters are used as they are, so that
            a trainer's updates are seen at once; None to have parameters of one's own.

    Raises:
        BackendError: when the architecture, dtype or module cannot be served.
    """
    if settings.dtype not in _DTYPES:
        raise BackendError(
            f"model {settings.name!r} has dtype {settings.dtype!r}, set one of {sorted(_DTYPES)}"
        )
    with refusals(settings.name):
        module: Any = _owned(settings) if shared is None else _twin(settings, shared)
    check_supported(module)
    if "logits_to_keep" not in inspect.signature(module.forward).parameters:
        raise BackendError(
            f"model {settings.name!r}: {type(module).__name__} cannot keep chosen logits only, "
            "which the embedded engine needs; choose another architecture"
        )
    evaluated: nn.Module = module.eval()
    return evaluated


def _owned(settings: ModelSettings) -> Any:
    dtype, config = _DTYPES[settings.dtype], read_config(settings)
    if settings.path is not None:
        module: Any = AutoModelForCausalLM.from_pretrained(
            settings.path, config=config, dtype=dtype, attn_implementation=ATTENTION, local_files_only=True
        )
    else:
        with torch.random.fork_rng():
            torch.manual_seed(settings.seed)
            module = _from_config(config, dtype)
    return module.to(settings.device)


def _from_config(config: Any, dtype: torch.dtype) -> Any:
    auto: Any = AutoModelForCausalLM
    return auto.from_config(config, dtype=dtype, attn_implementation=ATTENTION)


def _twin(settings: ModelSettings, shared: nn.Module) -> Any:
    """A module with the parameters and buffers of `shared`.

    Its configuration and mode are its own, as the trainer has another attention function,
    dropout and recomputation.
    """
    with torch.device("meta"):
        twin: Any = _from_config(copy.deepcopy(shared.config), _DTYPES[settings.dtype])
    for path, parameter in shared.named_parameters(remove_duplicate=False):
        if isinstance(parameter, DTensor):
            raise BackendError(
                f"model {settings.name!r} is sharded over ranks; the engine shares storage with one rank only"
            )
        _place(twin, path, parameter)
    for path, buffer in shared.named_buffers(remove_duplicate=False):
        _place(twin, path, buffer)
    return twin


def _place(module: nn.Module, path: str, tensor: torch.Tensor) -> None:
    """Set a parameter or buffer by its dotted path."""
    parent, _, name = path.rpartition(".")
    setattr(module.get_submodule(parent), name, tensor)
