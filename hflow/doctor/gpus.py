"""Checks of GPUs, their driver and the host's memory, which start nothing."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from importlib.util import find_spec
from itertools import product
from operator import le
from typing import TYPE_CHECKING, Any, TypeVar

from hflow.base.errors import BackendError, HflowError
from hflow.base.machine_gpus import Gpu
from hflow.base.machine_memory import machine_memory
from hflow.base.text import format_gib, format_ranges
from hflow.doctor.collectives import MIN_RATE_SHARE
from hflow.doctor.finding import Finding
from hflow.planner.models.descriptors import training_backend
from hflow.planner.plan.hardware import GIB
from hflow.planner.plan.traits import BACKENDS
from hflow.processes.cores import socket_cores
from hflow.types.kernels import (
    FLASH_ATTN_3_INSTALL,
    HOPPER,
    TE_PACKAGE,
    AttentionKernel,
    Fp8Recipe,
    flash_versions,
    installed_transformer_engine,
)
from hflow.workers.real_devices import (
    BF16_CAPABILITY,
    SHARED_MEMORY_FIX,
    build_problem,
    capability_of,
    cuda_problem,
    expandable_segments,
    flash_problems,
    shared_memory,
)

if TYPE_CHECKING:
    from hflow.profiling.calibrate import LayerTime


MAX_USED_SHARE = 0.05
"""Share of a GPU's memory that may be in use before a run starts."""
MAX_ATTENTION_ERROR = {"fp32": 1e-4, "bf16": 0.03}
"""Largest difference from float64, relative to the largest value. bf16 rounds by up to 0.004."""
MAX_LOGPROB_ERROR = {"fp32": 1e-4, "bf16": 0.02}
"""The same for log-probs and entropy."""
MAX_LAYER_ERROR = (0.04, 0.1)
"""Largest difference of logits, and of gradients, between layers of Transformer Engine and of torch in bf16,
relative to the largest value of each tensor. torch's on a CPU are up to 0.011 and 0.04 from fp32."""
MAX_FP8_ERROR = (0.12, 0.35)
"""The same with products in FP8. Computed by torch, recipes are up to 0.1 and 0.28 from bf16, and with a norm
that is 5 % wrong at least 0.13 and 0.39."""
MIN_SHARED_GIB = 8
"""Shared memory that Ray's object store and NCCL need at least."""

Result = TypeVar("Result")

_ATTENTION_FIX = "install the builds of torch and flash-attn that the README names, or uninstall the latter"
_LOGPROB_FIX = "install the build of Triton that torch names as its dependency"
_LAYER_FIX = "set models.NAME.kernels=torch, and report it with the versions of torch, CUDA and the package"
_DECODE_FIX = "set models.NAME.gen.engine=vllm, and report it with the versions of torch and triton"
_FROM_FLOAT64 = "output and gradient differ from float64 by {:.1g} and {:.1g}"
_FAILURES = (BackendError, RuntimeError, AssertionError, AttributeError, ImportError, TypeError, ValueError)
"""What a package may raise that was built for others, or that has other interfaces."""


_LIMITED_MODES = ("Exclusive_Process", "Exclusive_Thread", "Prohibited")
"""Compute modes in which two processes cannot use a GPU at once."""


def check_cuda() -> Iterator[Finding]:
    """Check which CUDA devices torch can use, for a machine that need not have any."""
    import torch

    if problem := cuda_problem():
        yield Finding("device", "cuda", False, problem, "plans for GPUs still work here", required=False)
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        yield Finding("device", f"cuda:{index}", True, f"{device.name}, {device.total_memory / GIB:.0f} GiB")


def check_gpus(gpus: Sequence[Gpu], wanted: int) -> Iterator[Finding]:
    """Check driver, torch, GPUs and the host for a run on some of a machine's GPUs."""
    yield _check_torch(gpus)
    yield from _check_kernels(wanted)
    yield from check_listed_gpus(gpus, wanted)
    yield from check_allocator(os.environ)
    yield check_shared_memory(shared_memory() or 0)
    yield check_host_memory(machine_memory(), gpus[:wanted])


def check_listed_gpus(gpus: Sequence[Gpu], wanted: int) -> Iterator[Finding]:
    """Check that there are enough GPUs, of one kind, with free memory."""
    if len(gpus) < wanted:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        found = f"{len(gpus)} of {wanted} GPUs"
        fix = f"hflow doctor --gpus {len(gpus)}" if gpus else "install NVIDIA's driver, or use a GPU machine"
        if visible is not None:
            found, fix = f"{found} with CUDA_VISIBLE_DEVICES={visible}", f"{fix}, or unset this variable"
        yield Finding("gpu", "count", False, found, fix)
    else:
        yield Finding("gpu", "count", True, f"{len(gpus)} GPUs")
    used = gpus[:wanted]
    kinds = list(dict.fromkeys((gpu.name, gpu.memory_bytes) for gpu in used))
    if len(kinds) > 1:
        detail = "; ".join(
            f"{name} with {format_gib(size)}: "
            + ", ".join(str(gpu.index) for gpu in used if (gpu.name, gpu.memory_bytes) == (name, size))
            for name, size in kinds
        )
        fix = "set CUDA_VISIBLE_DEVICES to GPUs of one kind; a plan has one kind of device"
        yield Finding("gpu", "kinds", False, detail, fix)
    for gpu in used:
        sizes = f"{gpu.used_bytes / GIB:.1f} of {gpu.memory_gib:.1f} GiB in use"
        is_free = gpu.used_bytes <= MAX_USED_SHARE * gpu.memory_bytes
        fix = "end the processes that nvidia-smi lists, or leave this GPU out with CUDA_VISIBLE_DEVICES"
        yield Finding("gpu", str(gpu.index), is_free, f"{gpu.name}, driver {gpu.driver}, {sizes}", fix)
        if gpu.compute_mode in _LIMITED_MODES:
            detail = f"compute mode {gpu.compute_mode}: a trainer and vLLM cannot use the GPU together"
            fix = f"nvidia-smi -i {gpu.index} -c DEFAULT, as root"
            yield Finding("gpu", f"mode {gpu.index}", False, detail, fix)


def check_allocator(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Check that engines may open weights in GPU memory, which torch's settings can prevent."""
    if variable := expandable_segments(environment):
        detail = f"{variable} sets expandable_segments:True, with which vLLM may not open a trainer's weights"
        yield Finding("gpu", "allocator", False, detail, f"unset {variable}", required=False)


def check_sockets(device: str) -> Iterator[Finding]:
    """Report the cores that the worker of each GPU is bound to."""
    import torch

    cuda = torch.get_device_module(device)
    for index in range(cuda.device_count()):
        cores = socket_cores(cuda.get_device_properties(index))
        detail = (
            f"cores {format_ranges(cores)} are beside it" if cores else "the system names no cores beside it"
        )
        fix = "workers are not bound; set cores to bind them yourself"
        yield Finding("gpu", f"socket {index}", bool(cores), detail, fix, required=False)


def in_child(check: Callable[[str], Iterable[Finding]], device: str) -> list[Finding]:
    """Return the findings of a check that a process of its own makes."""
    try:
        return _result_of_child(_findings, check, device)
    except BrokenProcessPool as error:
        return [Finding("kernel", check.__name__, False, str(error), _ATTENTION_FIX)]


def _result_of_child(function: Callable[..., Result], *arguments: Any) -> Result:
    """Call a function in a process of its own.

    What CUDA and torch keep on a GPU is free again when a process ends. In this one, it would count as memory
    that later checks and runs lack.

    Raises:
        BrokenProcessPool: if the process is killed.
    """
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(function, *arguments).result()


def _findings(check: Callable[[str], Iterable[Finding]], device: str) -> list[Finding]:
    return list(check(device))


def _compared(
    name: str, fix: str, compare: Callable[..., tuple[bool, str]], *arguments: Any, of: str = ""
) -> Finding:
    """Return the finding of a comparison, which returns whether results are right, and their differences."""
    try:
        is_right, detail = compare(*arguments)
    except _FAILURES as problem:
        is_right, detail = False, (str(problem) or type(problem).__name__).splitlines()[0]
    return Finding("kernel", name, is_right, of + detail, fix)


def check_attention(device: str) -> Iterator[Finding]:
    """Compare what the attention kernels of a device compute, forward and backward, with float64."""
    from hflow.doctor.attention_check import CASES, attention_error
    from hflow.models.dtypes import SAVED_DTYPES

    def compare(dtype: str, case: str) -> tuple[bool, str]:
        error = attention_error(device, SAVED_DTYPES[dtype], CASES[case])
        detail = f"{error.kernel}: {_FROM_FLOAT64.format(error.output, error.gradient)}"
        return max(error.output, error.gradient) <= MAX_ATTENTION_ERROR[dtype], detail

    for dtype, case in product(MAX_ATTENTION_ERROR, CASES):
        yield _compared(f"attention {dtype}{case}", _ATTENTION_FIX, compare, dtype, case)


def check_logprobs(device: str) -> Iterator[Finding]:
    """Compare what computes log-probs and entropy on a device, forward and backward, with float64."""
    from hflow.doctor.logprob_check import logprob_error
    from hflow.models.dtypes import SAVED_DTYPES

    def compare(dtype: str) -> tuple[bool, str]:
        error = logprob_error(device, SAVED_DTYPES[dtype])
        return max(error) <= MAX_LOGPROB_ERROR[dtype], _FROM_FLOAT64.format(*error)

    for dtype in MAX_LOGPROB_ERROR:
        yield _compared(f"log-probs {dtype}", _LOGPROB_FIX, compare, dtype)


def check_decoding(device: str) -> Iterator[Finding]:
    """Compare the Triton kernels of the embedded engine with torch on the CPU."""
    from hflow.models.dtypes import SAVED_DTYPES

    def compare(dtype: str) -> tuple[bool, str]:
        from hflow.doctor.decode_check import decode_errors  # needs Triton

        errors, limit = list(decode_errors(device, SAVED_DTYPES[dtype])), MAX_ATTENTION_ERROR[dtype]
        detail = f"triton: {', '.join(f'{kernel} {error:.1g}' for kernel, error in errors)} from torch"
        return all(error <= limit for _, error in errors), f"{detail}, at most {limit:g}"

    for dtype in MAX_ATTENTION_ERROR:
        yield _compared(f"decode {dtype}", _DECODE_FIX, compare, dtype)


def check_layers(device: str) -> Iterator[Finding]:
    """Compare layers of Transformer Engine, where it is installed, forward and backward, with torch's.

    In FP8 too, with the recipes that the device computes.
    """
    installed = installed_transformer_engine()
    if installed is None or installed.mismatch or find_spec("megatron") is None:
        return
    from hflow.doctor.layer_check import fp8_recipes

    plain = list(_layer_findings(device, installed.version, None))
    yield from plain
    if all(finding.ok for finding in plain):
        for recipe in fp8_recipes(device):
            yield from _layer_findings(device, installed.version, recipe)


def _layer_findings(device: str, version: str, recipe: Fp8Recipe | None) -> Iterator[Finding]:
    from hflow.doctor.layer_check import DENSE, EXPERTS, layer_error

    kind, limit, fix = "", MAX_LAYER_ERROR, _LAYER_FIX
    if recipe is not None:
        kind, limit, fix = f" fp8={recipe}", MAX_FP8_ERROR, _LAYER_FIX.replace("kernels=torch", "fp8=null")

    def compare(architecture: Mapping[str, Any]) -> tuple[bool, str]:
        error = layer_error(device, "bf16", architecture, recipe)
        detail = (
            f"logits and gradients differ from torch's layers by {error.output:.1g} and "
            f"{error.gradient:.1g}, at most {limit[0]:g} and {limit[1]:g} are expected"
        )
        return all(map(le, error, limit)), detail

    for name, architecture in ((f"layers{kind}", DENSE), (f"experts{kind}", EXPERTS)):
        yield _compared(name, fix, compare, architecture, of=f"{TE_PACKAGE} {version}: ")


def check_shared_memory(num_bytes: int) -> Finding:
    """Check the size of /dev/shm, which containers limit."""
    enough = num_bytes >= MIN_SHARED_GIB * GIB
    fix = f"make it {MIN_SHARED_GIB} GiB or more: {SHARED_MEMORY_FIX}"
    return Finding("host", "/dev/shm", enough, f"{format_gib(num_bytes)}", fix)


def check_host_memory(num_bytes: int, gpus: Sequence[Gpu]) -> Finding:
    """Check that the host holds as much as the GPUs, for what a run offloads, publishes and saves.

    How much that is depends on the plan, which a run compares with what its workers find.
    """
    needed = sum(gpu.memory_bytes for gpu in gpus)
    fix = "`hflow plan` says what a run keeps there; a container may need a higher limit"
    detail = f"{num_bytes / GIB:.0f} GiB, and {needed / GIB:.0f} GiB on the GPUs"
    return Finding("host", "memory", num_bytes >= needed, detail, fix, required=False)


def _check_torch(gpus: Sequence[Gpu]) -> Finding:
    """Check that torch is built for CUDA and that the driver is new enough for it."""
    import torch

    problem = cuda_problem()
    if torch.version.cuda is None:
        fix = "install torch's build for CUDA, which is the default of pip on Linux"
        return Finding("gpu", "torch", False, problem, fix)
    driver = gpus[0].driver if gpus else "none"
    detail = f"torch {torch.__version__} for CUDA {torch.version.cuda}, driver {driver}"
    if not problem:
        return Finding("gpu", "torch", True, detail)
    fix = f"update NVIDIA's driver to one for CUDA {torch.version.cuda}, or install an older build of torch"
    return Finding("gpu", "torch", False, f"{detail}: {problem}", fix)


def _check_kernels(wanted: int) -> Iterator[Finding]:
    """Check that torch and packages with attention kernels can compute on the first GPUs."""
    import torch

    if cuda_problem():
        return  # `_check_torch` reports it
    for index in range(min(wanted, torch.cuda.device_count())):
        device = torch.cuda.get_device_properties(index)
        yield check_capability(index, device.name, capability_of(device))
    yield from check_flash_packages(torch.cuda.get_device_capability(0))


def check_flash_packages(capability: tuple[int, int]) -> Iterator[Finding]:
    """Check that packages with attention kernels can be imported, and name the one that Hopper GPUs lack."""
    problems = flash_problems()
    for kernel, version in flash_versions().items():
        detail = problems.get(kernel, f"{kernel} {version} can be imported")
        fix = f"install a build of {kernel} for this torch, or uninstall it"
        yield Finding("gpu", kernel, kernel not in problems, detail, fix)
    if capability == HOPPER and AttentionKernel.FLASH_ATTN_3 not in flash_versions():
        detail = "not installed; attention uses kernels that were made for older GPUs"
        yield Finding(
            "gpu", AttentionKernel.FLASH_ATTN_3, False, detail, FLASH_ATTN_3_INSTALL, required=False
        )


def check_capability(index: int, name: str, capability: tuple[int, int]) -> Finding:
    """Check that torch has kernels for a GPU, and that it computes in bf16."""
    if problem := build_problem(name, capability):
        fix = "install a build of torch for this GPU: https://pytorch.org/get-started/locally"
        return Finding("gpu", f"kernels {index}", False, problem, fix)
    detail = f"compute capability {capability[0]}.{capability[1]}"
    fix = "train in fp32, models.NAME.dtype=fp32, or use a newer GPU"
    return Finding("gpu", f"kernels {index}", capability >= BF16_CAPABILITY, detail, fix, required=False)


_SLOW_FIX = "nvidia-smi -q -d PERFORMANCE shows what slows a GPU down; hflow profile measures it for plans"
_FAILED_FIX = "hflow profile shows all of the error"


def check_layer_times(device: str) -> Iterator[Finding]:
    """Check the speed of each training backend that can run on a device, `cuda` or `cpu`."""
    for backend in BACKENDS:
        if training_backend(backend).find_problem(device) is None:
            yield _check(backend, device)


def _check(backend: str, device: str) -> Finding:
    try:
        return layers_finding(backend, _result_of_child(_measure, backend, device))
    except (HflowError, RuntimeError, BrokenProcessPool) as error:
        detail = (str(error).splitlines() or [type(error).__name__])[0]
        return Finding("speed", backend, False, detail, _FAILED_FIX, required=False)


def _measure(backend: str, device: str) -> list[LayerTime]:
    import torch

    from hflow.profiling.calibrate import layer_times

    if device == "cpu":
        torch.set_num_threads(1)  # a device is one core
    return layer_times(backend, device)


def layers_finding(backend: str, times: Sequence[LayerTime]) -> Finding:
    """Return whether passes through layers are about as fast as plans count with."""
    model = times[0].model
    detail = "; ".join(
        f"{'training' if time.trains else 'inference'} {1000 * time.seconds:,.1f} ms, "
        f"planned {1000 * time.expected_seconds:,.1f} ms"
        for time in times
    )
    detail += (
        f" ({model.num_layers} layers of {model.hidden:,} x {model.intermediate:,}, "
        f"{times[0].num_tokens:,} tokens, {times[0].dtype})"
    )
    if all(time.seconds * MIN_RATE_SHARE <= time.expected_seconds for time in times):
        return Finding("speed", backend, True, detail)
    detail += f"; less than {MIN_RATE_SHARE:.0%} of the planned speed"
    return Finding("speed", backend, False, detail, _SLOW_FIX, required=False)
