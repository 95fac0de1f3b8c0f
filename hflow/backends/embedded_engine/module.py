"""The engine's own module: built from settings, or a twin that shares a trainer's parameters."""

from __future__ import annotations

import copy
import inspect

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from hflow.backends.base import ModelSettings
from hflow.backends.embedded_engine.attention import ATTENTION
from hflow.errors import BackendError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def build_module(settings: ModelSettings, shared: nn.Module | None) -> nn.Module:
    """A Hugging Face causal LM in evaluation mode whose attention is the engine's.

    Args:
        settings: what to build.
        shared: a module of the same architecture whose parameters are used as they are, so that
            a trainer's updates are seen at once; None to have parameters of one's own.

    Raises:
        BackendError: when the architecture, dtype or module cannot be served.
    """
    if settings.dtype not in DTYPES:
        raise BackendError(f"model {settings.name!r} has dtype {settings.dtype!r}, set one of {sorted(DTYPES)}")
    if shared is not None:
        return _twin(settings, shared)
    return _owned(settings).to(torch.device(settings.device)).eval()


def check_config(name: str, config: PreTrainedConfig) -> None:
    """Refuse what the packed cache cannot represent.

    Raises:
        BackendError: naming the property of the architecture.
    """
    layer_types = set(getattr(config, "layer_types", None) or ["full_attention"])
    if layer_types != {"full_attention"}:
        raise BackendError(
            f"model {name!r} ({config.model_type}) has layers of type {sorted(layer_types)}; "
            "the embedded engine serves full attention only"
        )
    if getattr(config, "is_encoder_decoder", False):
        raise BackendError(f"model {name!r} ({config.model_type}) is an encoder-decoder, choose a decoder")


def _owned(settings: ModelSettings) -> nn.Module:
    dtype = DTYPES[settings.dtype]
    config = _config(settings)
    check_config(settings.name, config)
    with _as_backend_error(settings.name, config.model_type):
        if settings.path is not None:
            return AutoModelForCausalLM.from_pretrained(  # type: ignore[no-any-return]
                settings.path, dtype=dtype, attn_implementation=ATTENTION, local_files_only=True
            )
        with torch.random.fork_rng():
            torch.manual_seed(settings.seed)
            return _from_config(config, dtype)


def _config(settings: ModelSettings) -> PreTrainedConfig:
    if settings.path is not None:
        return AutoConfig.from_pretrained(settings.path, local_files_only=True)
    if settings.architecture is None:
        raise BackendError(f"model {settings.name!r} has neither a path nor an architecture, set one")
    architecture = dict(settings.architecture)
    return AutoConfig.for_model(architecture.pop("model_type"), **architecture)


def _from_config(config: PreTrainedConfig, dtype: torch.dtype) -> nn.Module:
    module: nn.Module = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=ATTENTION)
    if "logits_to_keep" not in inspect.signature(module.forward).parameters:
        raise BackendError(f"{type(module).__name__} cannot keep chosen logits, choose another architecture")
    return module


def _twin(settings: ModelSettings, shared: nn.Module) -> nn.Module:
    """A module with its own configuration and mode, and the parameters and buffers of `shared`.

    Its own configuration, as the trainer's attention differs from the engine's.
    """
    config = copy.deepcopy(shared.config)
    assert isinstance(config, PreTrainedConfig)
    check_config(settings.name, config)
    with _as_backend_error(settings.name, config.model_type), torch.device("meta"):
        twin = _from_config(config, DTYPES[settings.dtype])
    for path, parameter in shared.named_parameters(remove_duplicate=False):
        if isinstance(parameter, DTensor):
            raise BackendError(f"model {settings.name!r} is sharded over ranks; sharing storage needs one rank")
        _place(twin, path, parameter)
    for path, buffer in shared.named_buffers(remove_duplicate=False):
        _place(twin, path, buffer)
    return twin.eval()
