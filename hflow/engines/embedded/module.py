"""Builds the engine's HF module, which may share a trainer's parameters, and loads new weights into it."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.utils.logging import disable_progress_bar

from hflow.base.devices import is_gpu
from hflow.base.errors import BackendError, nearest
from hflow.engines.embedded.attention import ATTENTION
from hflow.engines.embedded.dense_decoder import join_projections
from hflow.engines.embedded.families import own_forward_objection
from hflow.models.adapter import adapter_weights, add_adapter, share_parameters
from hflow.models.device import local_device
from hflow.models.dtypes import DTYPES
from hflow.models.expert_tensors import stacked_views
from hflow.models.hf_config import attention_names, auto_model, read_config, translate_errors
from hflow.models.packed_attention import check_supported
from hflow.models.settings import ModelSettings


def build_module(
    settings: ModelSettings, shared: nn.Module | None, base: nn.Module | None = None
) -> nn.Module:
    """Build a Hugging Face causal LM in evaluation mode with the engine's attention.

    Args:
        shared: a module of the same architecture whose parameters are used, so that a trainer's updates take
            effect at once; None for parameters of its own.
        base: the module of another engine, whose parameters but adapters are used where `shared` is None.

    Raises:
        BackendError: if the engine does not support the architecture, dtype or module.
    """
    if settings.dtype not in DTYPES:
        raise BackendError(
            f"model {settings.name!r} has dtype {settings.dtype!r}; set one of {sorted(DTYPES)}"
        )
    with translate_errors(settings.name):
        if shared is not None:
            module: Any = _sharing_module(settings, shared)
        else:
            module = _new_module(settings) if base is None else _module_on(settings, base)
    check_supported(module)
    if "logits_to_keep" not in inspect.signature(module.forward).parameters:
        raise BackendError(
            f"model {settings.name!r}: {type(module).__name__} cannot compute logits of chosen "
            "positions only (logits_to_keep), which the embedded engine needs; choose another architecture"
        )
    in_eval_mode: nn.Module = module.eval()
    return in_eval_mode


def _new_module(settings: ModelSettings) -> Any:
    dtype, config = DTYPES[settings.dtype], read_config(settings)
    if settings.path is not None:
        disable_progress_bar()
        module: Any = auto_model(config).from_pretrained(
            settings.path,
            config=config,
            dtype=dtype,
            attn_implementation=attention_names(config, ATTENTION),
            local_files_only=True,
            use_safetensors=True,  # other formats are pickles
        )
    else:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(settings.seed)
            module = _from_config(config, torch.float32)
        for weight in module.parameters():  # drawn as by the trainer: torch draws other numbers in bf16
            weight.data = weight.data.to(dtype)
    _add_adapter(module, settings)
    device = local_device(settings.device)
    if own_forward_objection(config.to_dict(), settings.lora is not None) is None:
        join_projections(module, device)
    return module.to(device)


def _add_adapter(module: Any, settings: ModelSettings) -> None:
    """Add the adapters that the settings have, in the precision in which the trainer uses them."""
    if settings.lora is not None:
        add_adapter(module, settings)
        for weight in adapter_weights(module).values():
            weight.data = weight.data.to(DTYPES[settings.dtype])


def _module_on(settings: ModelSettings, base: nn.Module) -> Any:
    """Build a module with adapters of its own on the other parameters, and the buffers, of `base`."""
    with torch.device("meta"):
        module: Any = _from_config(copy.deepcopy(base.config), DTYPES[settings.dtype])
    _add_adapter(module, settings)
    share_parameters(module, base)
    for path, buffer in base.named_buffers(remove_duplicate=False):
        _set_tensor(module, path, buffer)
    return module.to(local_device(settings.device))


def _from_config(config: Any, dtype: torch.dtype) -> Any:
    return auto_model(config).from_config(
        config, dtype=dtype, attn_implementation=attention_names(config, ATTENTION)
    )


def _sharing_module(settings: ModelSettings, shared: nn.Module) -> Any:
    """Build a module with the parameters and buffers of `shared`.

    It has its own config and mode, as the trainer uses another attention, dropout and recomputation.
    """
    with torch.device("meta"):
        module: Any = _from_config(copy.deepcopy(shared.config), DTYPES[settings.dtype])
    if settings.lora is not None:
        add_adapter(module, settings)
    for path, parameter in shared.named_parameters(remove_duplicate=False):
        if isinstance(parameter, DTensor):
            raise BackendError(
                f"model {settings.name!r} is sharded over ranks, so the engine cannot share its storage"
            )
        _set_tensor(module, path, parameter)
    for path, buffer in shared.named_buffers(remove_duplicate=False):
        _set_tensor(module, path, buffer)
    return module


def _set_tensor(module: nn.Module, path: str, tensor: torch.Tensor) -> None:
    """Set a parameter or buffer by its dotted path."""
    parent, _, name = path.rpartition(".")
    setattr(module.get_submodule(parent), name, tensor)


class FreedParameters:
    """Parameters on an accelerator whose memory is free until `restore`.

    Parameter objects stay the same, so tied ones stay tied. Buffers are small and keep their memory.

    Args:
        keep: whether to keep the values, in pinned host memory.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], keep: bool) -> None:
        self._tensors = [parameter.data for parameter in parameters]
        storages = [tensor.untyped_storage() for tensor in self._tensors]
        sizes = {storage.data_ptr(): (storage, storage.nbytes()) for storage in storages}
        self._storages = list(sizes.values())
        """Each with its bytes; several parameters may be views of one."""
        self._copies = [_pinned_copy(tensor) for tensor in self._tensors] if keep else None
        for storage, _ in self._storages:
            storage.resize_(0)

    def restore(self) -> None:
        """Allocate the memory again, and copy kept values into it; others are undefined."""
        for storage, size in self._storages:
            storage.resize_(size)
        for tensor, copied in zip(self._tensors, self._copies or (), strict=False):
            tensor.copy_(copied, non_blocking=True)


class CommonParameters:
    """The parameters that several engines use, whose memory is free while all of these sleep."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self._num_users = 0
        self._freed: FreedParameters | None = None

    def use(self) -> None:
        """Have one more engine use them."""
        self._num_users += 1
        if self._freed is not None:
            self._freed.restore()
            self._freed = None

    def release(self, keep: bool) -> None:
        """Have one engine less use them, and free the memory after the last one; `keep` keeps the values."""
        self._num_users -= 1
        if not self._num_users:
            self._freed = FreedParameters(self._parameters, keep)


def _pinned_copy(tensor: Tensor) -> Tensor:
    copied = torch.empty_like(tensor, device="cpu", pin_memory=is_gpu(tensor.device.type))
    return copied.copy_(tensor)


def changing_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a module that training changes, by HF name: adapters, if there are any.

    Those of experts are views under hflow's names (`models.expert_tensors`).
    """
    changing: Mapping[str, Tensor] = adapter_weights(module) or module.state_dict(keep_vars=True)
    config: Any = module.config
    return dict(stacked_views(config.model_type, changing.items()))


def load_in_place(module: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Copy `(HF name, full tensor)` pairs into the tensors of a module that training changes.

    Tied tensors share storage, so any of their names sets all of them.

    Raises:
        BackendError: if a name is unknown, a shape differs, or a tensor is missing.
    """
    targets = changing_tensors(module)
    missing = {tensor.data_ptr(): name for name, tensor in reversed(targets.items())}
    with torch.no_grad():
        for name, tensor in weights:
            if name not in targets:
                raise BackendError(
                    f"new weights hold {name!r}, which the engine's model lacks{nearest(name, targets)}"
                )
            target = targets[name]
            if target.shape != tensor.shape:
                raise BackendError(
                    f"new weights have {name!r} of shape {tuple(tensor.shape)}, but the engine's "
                    f"model has {tuple(target.shape)}; give both the same architecture"
                )
            if tensor.data_ptr() != target.data_ptr():  # else it has been assembled there
                target.copy_(tensor)
            missing.pop(target.data_ptr(), None)
    if missing:
        names = sorted(missing.values())
        raise BackendError(
            f"new weights lack {len(names)} tensors of the engine's model, the first is {names[0]!r}; "
            "give both the same architecture"
        )
