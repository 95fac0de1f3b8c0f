"""Prepares this process for megatron on a device, before anything imports megatron."""

from __future__ import annotations

import importlib
import warnings

import torch

from hflow.backends.device import local_device


def prepare(name: str) -> torch.device:
    """Import megatron for a device, which is then the process's only one; safe to call again.

    Args:
        name: `cpu`, `cuda`, or another accelerator that torch knows.

    Raises:
        BackendError: if there is no such device, or megatron was imported without this function.
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
        importlib.import_module("megatron.core.models.gpt.gpt_layer_specs")
    return device
