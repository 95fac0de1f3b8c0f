"""Checks of collectives over the process groups that plans use."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from hflow.base.errors import RunError
from hflow.base.text import format_ranges
from hflow.doctor.finding import Finding
from hflow.planner.plan.hardware import GIB

if TYPE_CHECKING:
    from hflow.doctor.rank_groups import GroupTimes, OperationTime, RuntimeMemory

MIN_RATE_SHARE = 0.5
"""Share of the bandwidth that plans count with, below which a link is too slow."""
_SLOW = "nvidia-smi topo -m and nvlink -s show the links; hflow profile measures them for plans"
_TOO_LARGE = "env.NCCL_BUFFSIZE=1048576 makes communicators smaller; or set overhead_gib of the device to it"
_WRONG = "update NVIDIA's driver and NCCL; env.NCCL_P2P_DISABLE=1 avoids a broken link"


def check_collectives(num_gpus: int) -> Iterator[Finding]:
    """Check results and bandwidth of each kind of group that plans of GPUs use; 0 for two CPU processes."""
    from hflow.doctor.rank_groups import measure_groups

    if num_gpus == 1:
        yield Finding("collective", "all", False, "not checked, one GPU has no others", required=False)
        return
    try:
        measured = measure_groups(*(("cuda", num_gpus) if num_gpus else ("cpu", 2)))
        yield from map(group_finding, measured.times)
        if measured.memory is not None:
            yield memory_finding(measured.memory)
        if measured.network:
            yield Finding("collective", "network", True, measured.network, required=False)
    except RunError as error:
        yield Finding("collective", "all", False, str(error), "NCCL_DEBUG=INFO shows what NCCL does")


def group_finding(times: GroupTimes) -> Finding:
    """Return whether the operations of some groups are right, and as fast as plans count with."""
    size, kinds = len(times.ranks[0]), ", ".join(dict.fromkeys(times.kinds))
    groups = " ".join(format_ranges(ranks) for ranks in times.ranks)
    name = f"{size} ranks"
    wrong = [operation.name for operation in times.operations if not operation.is_right]
    if wrong:
        detail = f"{kinds} ({groups}): {', '.join(wrong)} gives wrong results"
        return Finding("collective", name, False, detail, _WRONG)
    rates = ", ".join(map(_rate, times.operations))
    detail = f"{kinds} ({groups}): right; GB/s of a link and planned: {rates}"
    slow = [operation.name for operation in times.operations if is_slow(operation)]
    if not slow:
        return Finding("collective", name, True, detail)
    detail += f"; less than {MIN_RATE_SHARE:.0%} of the planned: {', '.join(slow)}"
    return Finding("collective", name, False, detail, _SLOW, required=False)


def memory_finding(memory: RuntimeMemory) -> Finding:
    """Return whether communicators and the runtime take no more of a GPU's memory than plans count with."""
    taken = f"CUDA and {memory.num_groups} communicators take {memory.num_bytes / GIB:.2f} GiB of a GPU"
    if memory.planned_bytes is None:
        return Finding("collective", "memory", True, taken)
    detail = f"{taken}, planned {memory.planned_bytes / GIB:.2f}"
    is_enough = memory.num_bytes <= memory.planned_bytes
    return Finding("collective", "memory", is_enough, detail, _TOO_LARGE, required=False)


def is_slow(operation: OperationTime) -> bool:
    """Return whether a link is much slower than plans count with."""
    expected = operation.expected_gb_per_s
    return expected is not None and operation.gb_per_s < MIN_RATE_SHARE * expected


def _rate(operation: OperationTime) -> str:
    expected = operation.expected_gb_per_s
    planned = "unknown" if expected is None else f"{expected:.3g}"
    return f"{operation.name} {operation.gb_per_s:.3g} of {planned}"
