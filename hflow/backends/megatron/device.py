"""Prepares this process for megatron on a device, before anything imports megatron."""

from __future__ import annotations

import importlib
import warnings

import torch

from hflow.backends.device import local_device
from hflow.types.layer_kernels import import_transformer_engine


def prepare(name: str) -> torch.device:
    """Import megatron for a device, which is then the process's only one; safe to call again.

    Args:
        name: `cpu`, `cuda`, or another accelerator that torch knows.

    Raises:
        BackendError: if there is no such device, if megatron was imported without this function, or if
            Transformer Engine, which megatron imports where it is installed, cannot be imported.
    """
    device = local_device(name)
    if device.type != "cuda":
        from hflow.backends.megatron import cpu_shim

        cpu_shim.install(device.type)
    # Megatron uses the old names of some collectives.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+_tensor` is deprecated", FutureWarning)
    with warnings.catch_warnings():
        # Megatron warns about every accelerator library that is not installed.
        warnings.simplefilter("ignore")
        import_transformer_engine()
        importlib.import_module("megatron.core.models.gpt.gpt_layer_specs")
    return device
