"""The device of this process."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from hflow.base.errors import BackendError

# torch 2.13 has new names for some collectives. hflow, FSDP2 and megatron also run with older versions.
warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+_tensor` is deprecated", FutureWarning)


def local_device(name: str) -> torch.device:
    """Return this process's device: the CPU, or the current one of an accelerator that torch knows.

    Raises:
        BackendError: if there is no such device.
    """
    if name == "cpu":
        return torch.device("cpu")
    try:
        accelerator = torch.get_device_module(name)
    except RuntimeError:
        raise BackendError(f"device {name!r} is not one of cpu, cuda") from None
    if not accelerator.is_available():
        raise BackendError(f"device is {name}, but torch finds no such device here; set device to cpu")
    return torch.device(name, accelerator.current_device())


def initialized_accelerator() -> Any | None:
    """Return torch's module of the accelerator that this process uses, such as `torch.cuda`.

    None: it uses none.
    """
    accelerator = torch.accelerator.current_accelerator()
    module = None if accelerator is None else torch.get_device_module(accelerator.type)
    return module if module is not None and module.is_initialized() else None
