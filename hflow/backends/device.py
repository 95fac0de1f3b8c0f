"""The device of this process."""

from __future__ import annotations

import torch

from hflow.errors import BackendError


def local_device(name: str) -> torch.device:
    """Return this process's device: the CPU, or the current CUDA device.

    Raises:
        BackendError: if there is no such device.
    """
    if name == "cpu":
        return torch.device("cpu")
    if name != "cuda":
        raise BackendError(f"device {name!r} is not one of cpu, cuda")
    if not torch.cuda.is_available():
        raise BackendError("device is cuda, but torch finds no CUDA device here; set device to cpu")
    return torch.device("cuda", torch.cuda.current_device())
