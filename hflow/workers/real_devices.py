"""What the processes of a run find on their machines, compared with what the plan assumes."""

from __future__ import annotations

import hashlib
import os
import shutil
import socket
import time
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from hflow.base.devices import has_cuda_api
from hflow.base.errors import BackendError, RunError
from hflow.base.machine_gpus import read_gpus
from hflow.base.machine_memory import machine_memory
from hflow.base.text import format_ranges
from hflow.planner.models.descriptors import descriptor
from hflow.planner.plan.channels import channel_traits, near_channel
from hflow.planner.plan.cluster import ClusterSpec
from hflow.planner.plan.hardware import GIB
from hflow.planner.plan.rows import LayerChoice, Plan, WeightRoute
from hflow.planner.plan.traits import BACKENDS, ENGINES
from hflow.types.kernels import (
    TE_PACKAGE,
    AttentionKernel,
    LayerKernels,
    distribution_version,
    flash_module,
    flash_versions,
    installed_transformer_engine,
    packed_kernel,
)

MIN_MEMORY_SHARE = 0.95
"""Share of the plan's memory that a device must have. Drivers keep some of what data sheets say."""
BF16_CAPABILITY = (8, 0)
"""Compute capability from which kernels, also those of attention, compute in bf16."""
IDLE_BYTES = GIB
"""Memory of a GPU that may be in use before a run has any there. Drivers keep some for themselves."""
FREEING_SECONDS = 30.0
"""Longest wait for processes that are ending to free a GPU's memory."""
MIN_SHARED_BYTES = GIB
"""Least shared memory of processes that use NCCL together, which is what its guide gives to containers.
Docker's default is 64 MiB."""
SHARED_MEMORY_FIX = "docker run --shm-size, or an emptyDir of medium Memory"
_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Environment variables with settings of torch's allocator on a GPU."""


@dataclass(frozen=True)
class ProcessDevices:
    """What one process finds."""

    host: str
    """Name of its machine."""
    names: tuple[str, ...]
    """The CUDA devices, as other processes there name them in CUDA_VISIBLE_DEVICES; empty on CPUs."""
    kind: str
    """What the driver calls the first of them, which the process uses; empty on CPUs."""
    memory_bytes: int
    """Memory of that device."""
    problem: str
    """Why torch cannot use CUDA, or that device, in one line; empty if it can."""
    versions: tuple[tuple[str, str], ...]
    """Name and version of each installed distribution that must be the same in all processes."""
    capability: tuple[int, int] = (0, 0)
    """CUDA's compute capability of that device; (0, 0) on CPUs."""
    flash_attn: Mapping[AttentionKernel, str] = field(default_factory=dict)
    """Packages with attention kernels -> version."""
    flash_problems: Mapping[AttentionKernel, str] = field(default_factory=dict)
    """Packages in `flash_attn` that cannot be imported -> reason; empty on CPUs."""
    transformer_engine: str | None = None
    """Version of the package transformer-engine; None if there is none."""
    expandable_segments: str = ""
    """The environment variable that sets torch's expandable segments; empty if none does, or on CPUs."""
    host_memory_bytes: int = 0
    """Memory of its machine, or of the container that it runs in; 0: unknown."""
    used_bytes: int = 0
    """Memory of that device that other processes use; 0 if that is not known, or on CPUs."""
    shared_bytes: int | None = None
    """Size of /dev/shm; None: there is none."""
    network_problem: str = ""
    """Why collectives find no network interface, in one line; empty if they do."""


def find_devices() -> ProcessDevices:
    """Return the devices that this process finds."""
    import torch

    is_first = not torch.cuda.is_initialized()  # later, this process itself may use memory
    problem = cuda_problem()
    found = [] if problem else [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",")[: len(found)] if visible else map(str, range(len(found)))
    return ProcessDevices(
        host=socket.gethostname(),
        names=tuple(names),
        kind=found[0].name if found else "",
        memory_bytes=found[0].total_memory if found else 0,
        problem=problem or (build_problem(found[0].name, capability_of(found[0])) if found else ""),
        versions=(*package_versions(), *(library_versions() if found else ())),
        capability=capability_of(found[0]) if found else (0, 0),
        flash_attn=flash_versions(),
        flash_problems=flash_problems() if found else {},
        transformer_engine=None if (te := installed_transformer_engine()) is None else te.version,
        expandable_segments=expandable_segments(os.environ) if found else "",
        host_memory_bytes=machine_memory(),
        used_bytes=used_memory(str(found[0].uuid)) if found and is_first else 0,
        shared_bytes=shared_memory(),
        network_problem=network_problem(os.environ, [name for _, name in socket.if_nameindex()], bool(found)),
    )


def used_memory(uuid: str) -> int:
    """Return the bytes of a GPU in use, once processes that are ending have freed theirs; 0: unknown."""
    deadline = time.monotonic() + FREEING_SECONDS
    while (gpus := read_gpus(f"--id=GPU-{uuid}")) and gpus[0].used_bytes > IDLE_BYTES:
        if time.monotonic() > deadline:
            break
        time.sleep(1.0)
    return gpus[0].used_bytes if gpus else 0


def shared_memory() -> int | None:
    """Return the size of /dev/shm, which containers limit; None: there is none."""
    return shutil.disk_usage("/dev/shm").total if os.path.isdir("/dev/shm") else None


def network_problem(environment: Mapping[str, str], interfaces: Sequence[str], uses_nccl: bool) -> str:
    """Return the reason why collectives find no network interface, in one line; empty if they do.

    NCCL's variable lists beginnings of names, after `=` whole names, and after `^` those that it does not
    use. Each may be followed by a port. Gloo's lists whole names, and it uses all of them. `interfaces` are
    this machine's. Collectives are Gloo's, and NCCL's if `uses_nccl`.
    """
    for variable in ("GLOO_SOCKET_IFNAME", *(("NCCL_SOCKET_IFNAME",) if uses_nccl else ())):
        value = environment.get(variable, "")
        names = tuple(name.partition(":")[0] for name in value.lstrip("^=").split(",") if name)
        if variable.startswith("GLOO"):
            is_found = set(names) <= set(interfaces)
        else:
            is_exact, is_excluded = value.startswith(("=", "^=")), value.startswith("^")
            listed = [n in names if is_exact else n.startswith(names) for n in interfaces]
            is_found = any(is_listed != is_excluded for is_listed in listed)
        if value and not is_found:
            return f"{variable}={value}, but its network interfaces are {', '.join(interfaces)}"
    return ""


def capability_of(device: Any) -> tuple[int, int]:
    """Return the compute capability in `torch.cuda.get_device_properties`."""
    return device.major, device.minor


def build_problem(name: str, capability: tuple[int, int]) -> str:
    """Return the reason why this build of torch has no kernels for a GPU of this name; empty if it has."""
    import torch

    built = torch.cuda.get_arch_list()
    if not built or can_execute(built, capability):
        return ""
    return (
        f"torch {torch.__version__} is built for {', '.join(built)}, but {name} has compute capability "
        f"{capability[0]}.{capability[1]}. Install a build of torch for it"
    )


def can_execute(built: Iterable[str], capability: tuple[int, int]) -> bool:
    """Return whether a GPU can execute code of CUDA that is compiled for some architectures.

    `sm_86` runs on 8.6 and later versions of 8, and `sm_90a` on 9.0 alone; `compute_90` is compiled on the
    machine, for 9.0 and anything later.
    """
    for architecture in built:
        kind, _, text = architecture.partition("_")
        digits = text.rstrip("abcdefghijklmnopqrstuvwxyz")
        version = int(digits[:-1]), int(digits[-1])
        is_later = (
            version <= capability
            if kind == "compute"
            else version[0] == capability[0] and (version[1] <= capability[1])
        )
        if version == capability or (is_later and not text.endswith("a")):
            return True
    return False


def flash_problems() -> dict[AttentionKernel, str]:
    """Return the installed packages with attention kernels that cannot be imported, with the reasons."""
    problems = {}
    for kernel in flash_versions():
        try:
            flash_module(kernel)
        except BackendError as error:
            problems[kernel] = str(error)
    return problems


def expandable_segments(environment: Mapping[str, str]) -> str:
    """Return the environment variable that sets torch's expandable segments; empty if none does."""
    for variable in _ALLOCATOR_VARIABLES:
        settings = environment.get(variable, "").replace(" ", "").split(",")
        if "expandable_segments:True" in settings:
            return variable
    return ""


def package_versions() -> tuple[tuple[str, str], ...]:
    """Return name and version of each installed distribution that must be the same in all processes.

    hflow has its sources beside its version, as a checkout need not be installed.
    """
    described = map(descriptor, (*BACKENDS, *ENGINES))
    packages = ("torch", "transformers", *(name for one in described for name in one.distributions))
    installed = ((package, distribution_version(package)) for package in packages)
    version = " ".join(filter(None, (distribution_version("hflow-rl"), f"with sources {sources_digest()}")))
    return (
        ("hflow", version),
        *((package, version) for package, version in installed if version is not None),
    )


@cache
def sources_digest() -> str:
    """Return a hash of hflow's source files, 8 hexadecimal digits."""
    root, found = Path(__file__).parents[1], hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        found.update(f"{file.relative_to(root)}\0".encode() + file.read_bytes())
    return found.hexdigest()[:8]


def library_versions() -> tuple[tuple[str, str], ...]:
    """Return name and version of NVIDIA's libraries, those that torch loads, as package_versions()."""
    import torch
    from torch.cuda import nccl

    found = []
    if torch.distributed.is_nccl_available():
        found.append(("NCCL", ".".join(map(str, nccl.version()))))
    with suppress(RuntimeError):  # torch refuses a cuDNN of another version when something computes with it
        found.append(("cuDNN", str(torch.backends.cudnn.version())))
    return tuple(found)


def cuda_problem() -> str:
    """Return the reason why torch cannot use CUDA here, in one line; empty if it can."""
    import torch

    if torch.version.cuda is None:
        return f"torch {torch.__version__} is a build without CUDA"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if torch.cuda.is_available():
            return ""
    return str(caught[-1].message).splitlines()[0] if caught else "torch finds no CUDA device"


def check_devices(plan: Plan, found: Sequence[ProcessDevices], versions: Sequence[tuple[str, str]]) -> None:
    """Check that a run's processes are what its plan assumes, with the controller's versions of packages.

    Raises:
        RunError: naming the worker, its machine, and what to change.
    """
    for worker, process in enumerate(found):
        where = f"worker {worker} on {process.host}"
        _check_versions(where, process, "this process", versions)
        _check_versions(where, process, f"worker 0 on {found[0].host}", found[0].versions)
        if process.network_problem:
            raise RunError(f"{where} has {process.network_problem}. Set it to one of these, or unset it")
        if has_cuda_api(plan.cluster.device):
            _check_gpu(where, process, plan.cluster, worker)
            _check_free_memory(where, process, plan, worker)
            _check_shared_memory(where, process, plan.cluster)
            hosted = [replica for replica in plan.replicas if worker in replica.workers]
            names = {replica.name for replica in hosted}
            _check_kernels(where, process, plan, names)
            _check_layers(where, process, [c for c in plan.layers if c.replica in names])
            _check_precision(where, process, {r.model for r in hosted if r.dtype == "bf16"})
            _check_allocator(where, process, [route for route in plan.weights if route.src in names])
    if not has_cuda_api(plan.cluster.device):
        return
    _check_host_memory(plan, found)
    kinds_of: dict[int, dict[str, list[int]]] = {}
    workers_of: dict[tuple[str, str], list[int]] = {}
    for worker, process in enumerate(found):
        kinds_of.setdefault(plan.cluster.part_index(worker), {}).setdefault(process.kind, []).append(worker)
        workers_of.setdefault((process.host, process.names[0]), []).append(worker)
    for kinds in kinds_of.values():
        if len(kinds) > 1:
            listed = "; ".join(f"{kind}: worker {format_ranges(workers)}" for kind, workers in kinds.items())
            raise RunError(
                f"the workers have different GPUs ({listed}), but the plan has one kind. Name each, as in "
                "cluster=h100-1x8+a100-80g-1x8, or leave out the others with CUDA_VISIBLE_DEVICES"
            )
    for (host, name), workers in workers_of.items():
        if len(workers) > 1:
            raise RunError(
                f"workers {format_ranges(workers)} would all use GPU {name} of {host}, as Ray does not give "
                "each its own. Unset RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES where Ray is started"
            )


def _check_versions(
    where: str, process: ProcessDevices, other: str, versions: Iterable[tuple[str, str]]
) -> None:
    """Refuse a process whose packages have other versions than another's."""
    for package, ours in versions:
        theirs = dict(process.versions).get(package)
        if theirs != ours:
            raise RunError(
                f"{where} has {f'{package} {theirs}' if theirs else f'no {package}'}, but {other} "
                f"has {package} {ours}. Install the same on all machines"
            )


def _check_host_memory(plan: Plan, found: Sequence[ProcessDevices]) -> None:
    """Refuse machines with less memory than a plan keeps there.

    Their processes would be killed in the middle of the run, when it is first full.
    """
    needed = {machine: row.total for row in plan.forecast.host for machine in row.machines}
    for worker, process in enumerate(found):
        need = needed.get(plan.cluster.node_of(worker), 0)
        if 0 < process.host_memory_bytes < need:
            raise RunError(
                f"worker {worker} on {process.host} may use {process.host_memory_bytes / GIB:.1f} GiB of "
                f"host memory, but the plan keeps {need / GIB:.1f} GiB there, besides processes and data. "
                "Set a higher limit for the container, use machines with more memory, or change what "
                "`hflow plan` lists under host memory"
            )


def _check_gpu(where: str, process: ProcessDevices, cluster: ClusterSpec, worker: int) -> None:
    """Refuse a GPU that cannot be used, or has less memory than planned."""
    if process.problem:
        raise RunError(
            f"{where} cannot use a GPU: {process.problem}. There, "
            f"`hflow doctor --gpus {cluster.devices_per_node}` says how to fix it"
        )
    planned = cluster.memory_of(worker)
    if process.memory_bytes < MIN_MEMORY_SHARE * planned:
        raise RunError(
            f"{where} has {process.kind} with {process.memory_bytes / GIB:.1f} GiB, but "
            f"cluster={cluster.name} assumes {planned / GIB:.1f} GiB. Set a cluster of the "
            "devices that there are"
        )


def _check_free_memory(where: str, process: ProcessDevices, plan: Plan, worker: int) -> None:
    """Refuse a GPU of which other processes use what the plan needs."""
    need = max((row.total for row in plan.forecast.memory if worker in row.devices), default=0)
    if IDLE_BYTES < process.used_bytes > process.memory_bytes - need:
        raise RunError(
            f"{where} has a GPU of which other processes use {process.used_bytes / GIB:.1f} of "
            f"{process.memory_bytes / GIB:.1f} GiB, but the plan needs {need / GIB:.1f} GiB. End the "
            "processes that nvidia-smi lists there, or leave this GPU out with CUDA_VISIBLE_DEVICES"
        )


def _check_shared_memory(where: str, process: ProcessDevices, cluster: ClusterSpec) -> None:
    """Refuse a container in whose shared memory the ranks of a machine cannot connect."""
    shared = process.shared_bytes
    if shared is not None and shared < MIN_SHARED_BYTES and cluster.devices_per_node > 1:
        raise RunError(
            f"{where} has {shared >> 20} MiB of shared memory (/dev/shm), but NCCL may need "
            f"{MIN_SHARED_BYTES / GIB:.0f} GiB. Make it larger: {SHARED_MEMORY_FIX}"
        )


def _check_kernels(where: str, process: ProcessDevices, plan: Plan, replicas: Collection[str]) -> None:
    """Refuse a process whose kernels for packed sequences are not the planned ones, or cannot be loaded."""
    device, deterministic = plan.cluster.device, plan.deterministic
    shapes = dict(plan.shapes)
    for choice in plan.attention:
        is_varlen = choice.kernel.startswith((AttentionKernel.FLASH_ATTN, AttentionKernel.VARLEN))
        if choice.replica not in replicas or not is_varlen:
            continue
        shape = shapes.get(plan.replica(choice.replica).model)
        own = packed_kernel(
            *(device, "bf16", process.capability, process.flash_attn),
            deterministic=deterministic,
            has_sinks=shape is not None and shape.has_sinks,
        )
        if choice.kernel != str(own):
            depends_on_gpu = AttentionKernel.FLASH_ATTN_3 in process.flash_attn
            raise RunError(
                f"{where} computes attention with {own} ({own.why}), but the plan that of {choice.replica} "
                f"with {choice.kernel} ({choice.why}). Install the same on all machines"
                + (", and set a cluster of the devices that there are" if depends_on_gpu else "")
            )
        if own.kernel in process.flash_problems:
            raise RunError(f"{where}: {process.flash_problems[own.kernel]}")


def _check_layers(where: str, process: ProcessDevices, planned: Iterable[LayerChoice]) -> None:
    """Refuse a process without the Transformer Engine that the layers of its replicas are planned with.

    One that cannot be imported is refused when a model is built.
    """
    for choice in planned:
        is_of_te = choice.kernels is LayerKernels.TRANSFORMER_ENGINE
        if is_of_te and choice.version != process.transformer_engine:
            theirs = (
                f"{TE_PACKAGE} {process.transformer_engine}"
                if process.transformer_engine
                else f"no {TE_PACKAGE}"
            )
            raise RunError(
                f"{where} has {theirs}, but the plan computes the layers of {choice.replica} with "
                f"{TE_PACKAGE} {choice.version}, as installed on this machine. Install the same on all "
                "machines"
            )


def _check_precision(where: str, process: ProcessDevices, models: Collection[str]) -> None:
    """Refuse a GPU that does not compute in bf16, if there are models that do."""
    if models and process.capability < BF16_CAPABILITY:
        raise RunError(
            f"{where} has {process.kind} of compute capability {'.'.join(map(str, process.capability))}, but "
            f"bf16 needs {'.'.join(map(str, BF16_CAPABILITY))}. Set models.{min(models)}.dtype=fp32, or use "
            "newer GPUs"
        )


def _check_allocator(where: str, process: ProcessDevices, routes: Iterable[WeightRoute]) -> None:
    """Refuse expandable segments where an engine's process opens weights in GPU memory.

    Such memory is shared as file descriptors, which containers do not let a process take from another one.
    """
    for route in routes:
        names = (route.transport, route.near)
        opened = next((name for name in names if channel_traits(name).needs_one_device), None)
        if process.expandable_segments and opened:
            raise RunError(
                f"{where} has {process.expandable_segments}=expandable_segments:True, with which {route.dst} "
                f"may be unable to open the weights of {route.src} on its GPU ({opened}). Unset it"
                # A device that holds weights of the engine sends these so with every transport.
                + (
                    ""
                    if route.held_bytes
                    else f", or set models.{route.model}.gen.transport={near_channel('cpu')}"
                )
            )
