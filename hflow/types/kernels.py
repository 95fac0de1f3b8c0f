"""Kernels of attention and of layers, and the choice between them, which a plan states without torch."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from functools import cache
from importlib import import_module, metadata
from types import ModuleType
from typing import NamedTuple

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from hflow.base.devices import has_cuda_api, is_gpu
from hflow.base.errors import BackendError

MAX_HEAD_SIZE = 256
"""Largest head size of the variable-length kernels."""
HEAD_SIZE_MULTIPLE = 8
"""Head sizes of the variable-length kernels are a multiple of it."""


def kernel_install(extra: str) -> str:
    """Return the command that installs kernels which are compiled against the installed torch."""
    return f"pip install --no-build-isolation 'hflow-rl[{extra}]'"


class AttentionKernel(StrEnum):
    """A kernel of causal attention over sequences of different lengths."""

    FLASH_ATTN_3 = "flash-attn-3"
    """`flash_attn_varlen_func` of the package flash-attn-3, FlashAttention 3 for Hopper GPUs."""
    FLASH_ATTN = "flash-attn"
    """`flash_attn_varlen_func` of the package flash-attn."""
    VARLEN = "torch varlen"
    """`varlen_attn` of torch, a variable-length flash kernel."""
    SDPA = "torch sdpa"
    """`scaled_dot_product_attention` of torch over sequences that are padded in buckets."""
    PRODUCTS = "torch matmul"
    """Products of matrices, for one query per sequence in fp32."""
    TRITON = "triton"
    """hflow's own kernel, for one query per sequence on CUDA."""


FLASH_MODULES = {
    AttentionKernel.FLASH_ATTN_3: "flash_attn_interface",
    AttentionKernel.FLASH_ATTN: "flash_attn",
}
"""Kernels that are packages of the same name -> the module with `flash_attn_varlen_func`."""
FLASH_ATTN_3_INSTALL = (
    "pip install --no-build-isolation "
    "'git+https://github.com/Dao-AILab/flash-attention@e2743ab5#subdirectory=hopper'"
)
"""The command that compiles flash-attn-3 3.0.0 against the installed torch."""
HOPPER = (9, 0)
"""Compute capability of the GPUs that flash-attn-3 has kernels for."""
_LEAST_FLASH_ATTN_3 = Version("3.0.0")
"""Betas return other values."""


class PackedKernel(NamedTuple):
    """The kernel for packed sequences, with the reason for it."""

    kernel: AttentionKernel
    version: str | None
    """Version of its package; None for torch's."""
    why: str

    def __str__(self) -> str:
        return " ".join(filter(None, (self.kernel, self.version)))


def has_varlen_kernel(device: str, dtype: str) -> bool:
    """Return whether a kernel takes packed sequences as they are: in half precision, on GPUs."""
    return is_gpu(device) and dtype != "fp32"


def packed_kernel(
    device: str,
    dtype: str,
    capability: tuple[int, int] | None,
    installed: Mapping[AttentionKernel, str],
    *,
    deterministic: bool,
    has_sinks: bool = False,
) -> PackedKernel:
    """Return the kernel for packed sequences: of training, log-probs and prompts.

    Args:
        device: `cpu`, `cuda`.
        dtype: the dtype of q, k and v: `fp32`, `bf16`.
        capability: compute capability of the device; None if it has none, or it is not known.
        installed: versions of the packages in `FLASH_MODULES` that are installed.
        deterministic: whether gradients must be equal bit for bit.
        has_sinks: whether each head has a score for attending to nothing. The functions of the packages in
            `FLASH_MODULES` have none, and their gradients ignore the sums of the softmax, from which results
            with sinks could be made.
    """
    if not has_varlen_kernel(device, dtype):
        why = "the cluster is cpu" if device == "cpu" else f"{dtype} has no variable-length kernel"
        return PackedKernel(AttentionKernel.SDPA, None, why)
    if has_sinks:
        return PackedKernel(AttentionKernel.VARLEN, None, f"{dtype}, computes attention sinks")
    note = ""
    if (version := installed.get(AttentionKernel.FLASH_ATTN_3)) is not None:
        problem = _flash_attn_3_problem(version, capability, deterministic)
        if not problem:
            return PackedKernel(AttentionKernel.FLASH_ATTN_3, version, f"installed, {dtype}")
        note = f"; {AttentionKernel.FLASH_ATTN_3} {problem}"
    if (version := installed.get(AttentionKernel.FLASH_ATTN)) is not None:
        return PackedKernel(AttentionKernel.FLASH_ATTN, version, f"installed, {dtype}{note}")
    return PackedKernel(AttentionKernel.VARLEN, None, f"{dtype}, flash-attn is not installed{note}")


def _flash_attn_3_problem(version: str, capability: tuple[int, int] | None, deterministic: bool) -> str:
    """Return the reason why flash-attn-3 does not compute attention; empty if it does.

    With `deterministic=True` it refuses heads of more than 192, and gradients have been reported to differ
    nevertheless (flash-attention#2244).
    """
    if Version(version) < _LEAST_FLASH_ATTN_3:
        return f"{version} is older than {_LEAST_FLASH_ATTN_3}"
    if capability != HOPPER:
        found = "an unknown one" if capability is None else ".".join(map(str, capability))
        return f"needs compute capability 9.0, not {found}"
    return "does not keep deterministic=true" if deterministic else ""


@cache
def varlen_groups_queries() -> bool:
    """Return whether `AttentionKernel.VARLEN` takes fewer key heads than query heads, as from torch 2.12 on.

    Before, keys and values are repeated. The version is from metadata alone; without torch it is a later one.
    """
    version = distribution_version("torch")
    return version is None or Version(version).release >= (2, 12)


def head_size_problem(kernel: str, head_size: int) -> str | None:
    """Return the reason why a kernel cannot compute heads; None if it can.

    Args:
        kernel: a kernel for packed sequences, with or without its version.
        head_size: the size of a query.
    """
    if kernel == AttentionKernel.SDPA or (head_size <= MAX_HEAD_SIZE and head_size % HEAD_SIZE_MULTIPLE == 0):
        return None
    return (
        f"has heads of size {head_size}, but {kernel} needs a multiple of {HEAD_SIZE_MULTIPLE} up to "
        f"{MAX_HEAD_SIZE}"
    )


def decode_kernel(device: str, dtype: str) -> AttentionKernel:
    """Return the embedded engine's kernel for one query per sequence.

    Builds of torch for CUDA install Triton. In fp32 products are twice as fast as SDPA's CPU kernel, which is
    made for many queries per sequence.
    """
    if has_cuda_api(device):
        return AttentionKernel.TRITON
    return AttentionKernel.PRODUCTS if dtype == "fp32" else AttentionKernel.SDPA


@cache
def flash_versions() -> Mapping[AttentionKernel, str]:
    """Return the versions of the packages in `FLASH_MODULES` that are installed, from metadata alone."""
    versions = {kernel: distribution_version(kernel) for kernel in FLASH_MODULES}
    return {kernel: version for kernel, version in versions.items() if version is not None}


def flash_module(kernel: AttentionKernel) -> ModuleType:
    """Import the module of a kernel in `FLASH_MODULES`.

    Raises:
        BackendError: if its package was built for another torch, or another CUDA.
    """
    try:
        return import_module(FLASH_MODULES[kernel])
    except (ImportError, OSError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise BackendError(
            f"{kernel} {flash_versions().get(kernel)} cannot be imported with torch "
            f"{metadata.version('torch')}: {reason}. Install a build for this torch, or uninstall {kernel}"
        ) from None


TE_PACKAGE = "transformer-engine"
"""Name of the distribution of Transformer Engine."""
TE_CORES = ("transformer-engine-cu12", "transformer-engine-cu13")
"""Distributions with its library, for one CUDA each."""


_IMPORT_FAILURES = (ImportError, OSError, RuntimeError, AssertionError, AttributeError)
"""What an import of the package raises that was built for another torch, or is installed in part."""


class LayerKernels(StrEnum):
    """What computes the norms, linear layers and experts of a layer."""

    TORCH = "torch"
    """Functions of torch."""
    TRANSFORMER_ENGINE = "transformer_engine"
    """Modules of Transformer Engine."""


AUTO_KERNELS = "auto"
"""The setting that leaves the choice to the plan."""


class TransformerEngine(NamedTuple):
    """The installed Transformer Engine."""

    version: str
    mismatch: str
    """Why the installed megatron-core is not made for it; empty if it is."""


class KernelChoice(NamedTuple):
    """The kernels of a model, with the reason for them."""

    kernels: LayerKernels
    why: str


class Fp8Recipe(StrEnum):
    """How products in FP8 find the scales of what they multiply, always from the values themselves.

    The names are megatron's. Its delayed scaling, whose scales are those of earlier passes, is left out.
    """

    TENSORWISE = "tensorwise"
    """A scale for each tensor, whose gradients have 2 bits of mantissa (E5M2), everything else 3 (E4M3)."""
    BLOCKWISE = "blockwise"
    """A scale for 128 values of a row, and for 128 x 128 values of a weight; E4M3."""
    MXFP8 = "mxfp8"
    """A scale, a power of 2, for 32 values; E4M3."""


class Fp8Needs(NamedTuple):
    """What a recipe needs of sizes and devices.

    Sources: `assert_dim_for_fp8_exec`, `Quantizer.is_quantizable` (of rows that tensor ranks gather) and
    `check_recipe_support` of Transformer Engine 2.9 to 2.11.
    """

    row_multiple: int
    """The rows of a rank, and the hidden size, are a multiple of it."""
    multiple: int
    """The other sizes of the matrices of a rank, and the rows of an expert, are a multiple of it."""
    capability: tuple[int, int]
    """The least compute capability of CUDA."""
    below: tuple[float, int] = (float("inf"), 0)
    """The least compute capability that is too high."""

    def fits(self, capability: tuple[int, int]) -> bool:
        """Return whether a device with a compute capability computes the recipe."""
        return self.capability <= capability < self.below


FP8_NEEDS = {
    Fp8Recipe.TENSORWISE: Fp8Needs(16, 16, (8, 9)),
    Fp8Recipe.BLOCKWISE: Fp8Needs(128, 16, (9, 0)),
    Fp8Recipe.MXFP8: Fp8Needs(32, 32, (10, 0), below=(12, 0)),
}


def choose_kernels(
    setting: str, device: str, dtype: str, installed: TransformerEngine | None, fp8: str | None = None
) -> KernelChoice:
    """Return the kernels of a model, by `models.NAME.kernels` and the dtype of the forward pass.

    Only Transformer Engine computes `models.NAME.fp8`; `installed` is None where it is not.
    """
    if fp8 is not None:
        return KernelChoice(LayerKernels.TRANSFORMER_ENGINE, f"products in FP8, {fp8}")
    if setting != AUTO_KERNELS:
        return KernelChoice(LayerKernels(setting), "as set")
    if problem := unsupported(device, dtype) or install_problem(installed):
        return KernelChoice(LayerKernels.TORCH, problem)
    return KernelChoice(LayerKernels.TRANSFORMER_ENGINE, f"installed, {dtype}")


def unsupported(device: str, dtype: str) -> str:
    """Return the reason why Transformer Engine computes no model on a device in a dtype; empty if it does.

    It multiplies fp32 in TF32, which has 10 bits of mantissa, while fp32 means 23 everywhere else.
    """
    if not has_cuda_api(device):
        return f"the cluster is {device}"
    return "" if dtype == "bf16" else f"{TE_PACKAGE} multiplies {dtype} in TF32"


def install_problem(installed: TransformerEngine | None) -> str:
    """Return the reason why packages rule out Transformer Engine on this machine; empty if they do not."""
    return f"{TE_PACKAGE} is not installed" if installed is None else installed.mismatch


@cache
def installed_transformer_engine() -> TransformerEngine | None:
    """Return the installed Transformer Engine, from metadata alone; None if there is none."""
    version = distribution_version(TE_PACKAGE)
    return None if version is None else TransformerEngine(version, _mismatch(version))


def import_transformer_engine() -> None:
    """Import Transformer Engine if it is installed, as megatron does.

    Raises:
        BackendError: if it was built for another torch, or another CUDA, or is installed in part.
    """
    installed = installed_transformer_engine()
    if installed is None:
        return
    try:
        import_module("transformer_engine.pytorch")
    except _IMPORT_FAILURES as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise BackendError(
            f"{TE_PACKAGE} {installed.version} cannot be imported with torch {metadata.version('torch')}: "
            f"{reason}. Install a build for this torch, or uninstall {TE_PACKAGE}"
        ) from None


def _mismatch(version: str) -> str:
    """Return the reason why this machine's packages do not fit a version; empty if they do.

    The libraries of its two builds have one path, and it loads that for CUDA 12 first.
    """
    cores = [name for name in TE_CORES if distribution_version(name) is not None]
    if len(cores) > 1:
        return f"{' and '.join(cores)} are both installed: uninstall the one that torch was not built for"
    try:
        megatron = metadata.distribution("megatron-core")
    except metadata.PackageNotFoundError:
        return ""
    supported = _supported(megatron.requires or ())
    if supported is None or supported.contains(version, prereleases=True):
        return ""
    return (
        f"megatron-core {megatron.version} is made for {TE_PACKAGE} {supported}, but {version} is installed"
    )


def distribution_version(distribution: str) -> str | None:
    """Return the version of a package on this machine, from metadata alone; None if it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _supported(requirements: list[str] | tuple[str, ...]) -> SpecifierSet | None:
    """Return the versions of Transformer Engine that one of the extras of megatron-core asks for."""
    for text in requirements:
        requirement = Requirement(text)
        if requirement.name == TE_PACKAGE:
            return requirement.specifier
    return None
