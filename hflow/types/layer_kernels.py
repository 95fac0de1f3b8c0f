"""Kernels of a megatron model's layers, and the choice between them, which a plan states without torch."""

from __future__ import annotations

from enum import StrEnum
from functools import cache
from importlib import import_module, metadata
from typing import NamedTuple

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from hflow.errors import BackendError

PACKAGE = "transformer-engine"
"""Name of the distribution of Transformer Engine."""


_FAILURES = (ImportError, OSError, RuntimeError, AssertionError, AttributeError)
"""What an import of the package raises that was built for another torch, or is installed in part."""


class LayerKernels(StrEnum):
    """What computes the norms, linear layers and experts of a layer."""

    TORCH = "torch"
    """Functions of torch."""
    TRANSFORMER_ENGINE = "transformer_engine"
    """Modules of Transformer Engine."""


AUTO = "auto"
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


def choose_kernels(
    setting: str, device: str, dtype: str, installed: TransformerEngine | None
) -> KernelChoice:
    """Return the kernels of a model.

    Args:
        setting: `models.NAME.kernels`.
        device: `cpu` or `cuda`.
        dtype: of the forward pass, `fp32` or `bf16`.
        installed: Transformer Engine; None if it is not installed.
    """
    if setting != AUTO:
        return KernelChoice(LayerKernels(setting), "as set")
    if problem := unsupported(device, dtype) or install_problem(installed):
        return KernelChoice(LayerKernels.TORCH, problem)
    return KernelChoice(LayerKernels.TRANSFORMER_ENGINE, f"installed, {dtype}")


def unsupported(device: str, dtype: str) -> str:
    """Return why Transformer Engine computes no model on a device in a dtype; empty if it does.

    It multiplies fp32 in TF32, which has 10 bits of mantissa, while fp32 means 23 everywhere else.
    """
    if device != "cuda":
        return f"the cluster is {device}"
    return "" if dtype == "bf16" else f"{PACKAGE} multiplies {dtype} in TF32"


def install_problem(installed: TransformerEngine | None) -> str:
    """Return why a machine cannot use Transformer Engine, by the metadata of packages; empty if it can."""
    return f"{PACKAGE} is not installed" if installed is None else installed.mismatch


@cache
def installed_transformer_engine() -> TransformerEngine | None:
    """Return the installed Transformer Engine, from metadata alone; None if there is none."""
    try:
        version = metadata.version(PACKAGE)
    except metadata.PackageNotFoundError:
        return None
    return TransformerEngine(version, _mismatch(version))


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
    except _FAILURES as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise BackendError(
            f"{PACKAGE} {installed.version} cannot be imported with torch {metadata.version('torch')}: "
            f"{reason}. Install a build for this torch, or uninstall {PACKAGE}"
        ) from None


def _mismatch(version: str) -> str:
    """Return why the installed megatron-core is not made for a version; empty if it is, or is missing."""
    try:
        megatron = metadata.distribution("megatron-core")
    except metadata.PackageNotFoundError:
        return ""
    supported = _supported(megatron.requires or ())
    if supported is None or supported.contains(version, prereleases=True):
        return ""
    return f"megatron-core {megatron.version} is made for {PACKAGE} {supported}, but {version} is installed"


def _supported(requirements: list[str] | tuple[str, ...]) -> SpecifierSet | None:
    """Return the versions of Transformer Engine that one of the extras of megatron-core asks for."""
    for text in requirements:
        requirement = Requirement(text)
        if requirement.name == PACKAGE:
            return requirement.specifier
    return None
