"""What kinds of devices can do, by the names that torch gives them. Importing this does not import torch."""

from __future__ import annotations


def is_gpu(kind: str) -> bool:
    """Return whether a kind of device has memory of its own, streams, and copies in the background.

    The names are those of `torch.device.type`. All but the CPU's are accelerators; `meta` is no device.
    """
    return kind not in ("cpu", "meta")


def collective_backend(kind: str) -> str:
    """Return torch's backend of collectives between devices of a kind. Other accelerators name their own."""
    return {"cpu": "gloo", "cuda": "nccl"}.get(kind, kind)


def has_cuda_api(kind: str) -> bool:
    """Return whether a kind of device is used through `torch.cuda`.

    Only there are CUDA graphs, IPC handles, Triton, and a megatron-core that runs as it is written.
    """
    return kind == "cuda"
