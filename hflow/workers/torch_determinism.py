"""torch's deterministic algorithms in this process."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path

import torch

from hflow.base.errors import RunError

MKL_MODE, MKL_DYNAMIC = "MKL_CBWR", "MKL_DYNAMIC"
"""The environment variables from which MKL reads, before its first product, whether products of the same
numbers are the same (otherwise they depend on the threads' timing and on where the numbers are in memory),
and whether it may change the number of threads. Strict modes exist for AVX2 and AVX-512, and not for AUTO,
so AVX2 is named; processors that are not Intel's read it as AUTO.
Source: Intel oneMKL Developer Guide, "Obtaining Numerically Reproducible Results"."""
_ALL, _COMPATIBLE, _STRICT = -1, 3, 0x10000
"""Values of MKL's interface `mkl_cbwr_get`."""


def use_deterministic_algorithms() -> Callable[[], None]:
    """Let torch add in a fixed order, and raise a RuntimeError for operations that it cannot repeat.

    On CUDA, cuBLAS also needs `CUBLAS_WORKSPACE_CONFIG` before a process uses CUDA; torch raises an error for
    a product of matrices without it. Compiled code is repeatable too: torch then chooses no kernel by timing.

    On CPUs, MKL also multiplies matrices in the same way every time.

    Returns:
        A function that restores what was set before, for a process that serves another run.

    Raises:
        RunError: if MKL has multiplied matrices in this process before, and so cannot be set any more.
    """
    _fix_products_of_mkl()
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    warned_only = torch.is_deterministic_algorithms_warn_only_enabled()
    cudnn = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark

    def restore() -> None:
        torch.use_deterministic_algorithms(was_deterministic, warn_only=warned_only)
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = cudnn

    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    return restore


def _fix_products_of_mkl() -> None:
    """Set MKL's mode in this process and those that it starts, unless the environment sets one."""
    if not torch.backends.mkl.is_available():
        return
    has_strict = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
    os.environ.setdefault(MKL_MODE, "AVX2,STRICT" if has_strict else "COMPATIBLE")
    os.environ.setdefault(MKL_DYNAMIC, "FALSE")
    torch.ones(8, 8) @ torch.ones(8, 8)  # MKL reads it now
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    get_mode = getattr(
        library, "mkl_serv_cbwr_get", None
    )  # of the MKL inside of torch's library, if it is there
    if get_mode is None or (mode := get_mode(_ALL)) & _STRICT or mode & 0xFFFF == _COMPATIBLE:
        return
    raise RunError(
        f"deterministic=true needs {MKL_MODE}={os.environ[MKL_MODE]} before a process multiplies matrices. "
        "This one has, or its processor has no such mode. Start the run in a process of its own, as "
        f"`hflow run` does, or set {MKL_MODE}=COMPATIBLE before Python starts"
    )
