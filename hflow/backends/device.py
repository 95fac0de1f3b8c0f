"""The device that a process computes on."""

from __future__ import annotations

import torch

from hflow.errors import BackendError


def local_device(name: str) -> torch.device:
    """The device of that kind which this process uses.

    Raises:
        BackendError: when there is none.
    """
    if name == "cpu":
        return torch.device("cpu")
    if name != "cuda":
        raise BackendError(f"device {name!r} is not one of cpu, cuda")
    if not torch.cuda.is_available():
        raise BackendError("device is cuda, but torch finds no CUDA device here; set device to cpu")
    return torch.device("cuda", torch.cuda.current_device())
