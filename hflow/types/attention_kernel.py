"""Attention kernels, and the choice between them, which needs no torch: a plan states it."""

from __future__ import annotations

from enum import StrEnum
from functools import cache
from importlib import import_module, metadata
from types import ModuleType

from hflow.errors import BackendError

MAX_HEAD_SIZE = 256
"""Largest head size of the variable-length kernels."""
HEAD_SIZE_MULTIPLE = 8
"""Head sizes of the variable-length kernels are a multiple of it."""


class AttentionKernel(StrEnum):
    """A kernel of causal attention over sequences of different lengths."""

    FLASH_ATTN = "flash-attn"
    """`flash_attn_varlen_func` of the package flash-attn."""
    VARLEN = "torch varlen"
    """`varlen_attn` of torch, a variable-length flash kernel."""
    SDPA = "torch sdpa"
    """`scaled_dot_product_attention` of torch over sequences that are padded in buckets."""
    PRODUCTS = "torch matmul"
    """Products of matrices, for one query per sequence in fp32."""


def packed_kernel(device: str, dtype: str, *, has_flash_attn: bool) -> AttentionKernel:
    """Return the kernel for packed sequences: of training, log-probs and prompts.

    Variable-length kernels compute in half precision on CUDA only.

    Args:
        device: `cpu`, `cuda`.
        dtype: of q, k and v: `fp32`, `bf16`.
        has_flash_attn: whether the package flash-attn is installed.
    """
    if device != "cuda" or dtype == "fp32":
        return AttentionKernel.SDPA
    return AttentionKernel.FLASH_ATTN if has_flash_attn else AttentionKernel.VARLEN


def head_size_problem(kernel: AttentionKernel, head_size: int) -> str | None:
    """Return why a kernel cannot compute heads of a size; None if it can."""
    if kernel not in (AttentionKernel.FLASH_ATTN, AttentionKernel.VARLEN):
        return None
    if head_size <= MAX_HEAD_SIZE and head_size % HEAD_SIZE_MULTIPLE == 0:
        return None
    return (
        f"has heads of size {head_size}, but {kernel} needs a multiple of {HEAD_SIZE_MULTIPLE} up to "
        f"{MAX_HEAD_SIZE}"
    )


def decode_kernel(dtype: str) -> AttentionKernel:
    """Return the embedded engine's kernel for one query per sequence.

    In fp32 products are twice as fast as SDPA's CPU kernel, which is made for many queries per sequence, and
    on CUDA SDPA has no fused kernel for grouped queries in fp32.
    """
    return AttentionKernel.PRODUCTS if dtype == "fp32" else AttentionKernel.SDPA


@cache
def flash_attn_version() -> str | None:
    """Return the version of the installed package flash-attn; None if there is none."""
    try:
        return metadata.version("flash-attn")
    except metadata.PackageNotFoundError:
        return None


def flash_attn_package() -> ModuleType:
    """Import the package flash-attn.

    Raises:
        BackendError: if it was built for another torch, or another CUDA.
    """
    try:
        return import_module("flash_attn")
    except (ImportError, OSError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise BackendError(
            f"flash-attn {flash_attn_version()} cannot be imported with torch {metadata.version('torch')}: "
            f"{reason}. Install a build for this torch, or uninstall flash-attn"
        ) from None
