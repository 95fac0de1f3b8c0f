"""torch's deterministic algorithms in this process."""

from __future__ import annotations

from collections.abc import Callable

import torch


def use_deterministic_algorithms() -> Callable[[], None]:
    """Let torch add in a fixed order, and raise a RuntimeError for operations that it cannot repeat.

    On CUDA, cuBLAS also needs `CUBLAS_WORKSPACE_CONFIG` before a process uses CUDA; torch raises an error for
    a product of matrices without it. Compiled code is repeatable too: torch then chooses no kernel by timing.

    Returns:
        A function that restores what was set before, for a process that serves another run.
    """
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    warned_only = torch.is_deterministic_algorithms_warn_only_enabled()
    cudnn = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark

    def restore() -> None:
        torch.use_deterministic_algorithms(was_deterministic, warn_only=warned_only)
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = cudnn

    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    return restore
