"""Prepares this process for megatron on a device, before anything imports megatron."""

from __future__ import annotations

import importlib
import warnings
from importlib import metadata

import torch

from hflow.base.devices import has_cuda_api
from hflow.base.errors import BackendError
from hflow.models.device import local_device
from hflow.types.kernels import TE_PACKAGE, import_transformer_engine, installed_transformer_engine


def prepare(name: str) -> torch.device:
    """Import megatron for a device, which is then the process's only one; safe to call again.

    Args:
        name: `cpu`, `cuda`, or another accelerator that torch knows.

    Raises:
        BackendError: if there is no such device, if megatron was imported without this function, or if
            Transformer Engine, which megatron imports where it is installed, cannot be imported.
    """
    device = local_device(name)
    if not has_cuda_api(device.type):
        from hflow.training.megatron import cpu_shim

        cpu_shim.install(device.type)
    with warnings.catch_warnings():
        # Megatron warns about every accelerator library that is not installed.
        warnings.simplefilter("ignore")
        import_transformer_engine()
        _import_megatron()
    return device


def _import_megatron() -> None:
    """Import megatron; raise in one line if it misses names in the installed Transformer Engine."""
    try:
        importlib.import_module("megatron.core.models.gpt.gpt_layer_specs")
    except (ImportError, AttributeError) as error:
        installed = installed_transformer_engine()
        if installed is None:
            raise
        raise BackendError(
            f"megatron-core {metadata.version('megatron-core')} cannot be imported with {TE_PACKAGE} "
            f"{installed.version}: {str(error).splitlines()[0]}. Install the versions that fit together, or "
            f"uninstall {TE_PACKAGE}"
        ) from None
