"""`check_memory` refuses plans that do not fit into memory, `margin_warnings` names those that barely do."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hflow.base.errors import PlanError
from hflow.base.text import format_gib, format_ranges
from hflow.planner.plan.cluster import ClusterSpec
from hflow.planner.plan.forecast import PhaseMemory

MEMORY_MARGIN = 0.05
"""Share of a device's memory that a plan should leave free: allocators fragment, and estimates err."""


def check_memory(phases: Sequence[PhaseMemory], cluster: ClusterSpec, advice: Callable[[], str]) -> None:
    """Refuse a plan that does not fit; `advice` returns what to change, as sentences.

    Raises:
        PlanError: naming the phase that needs most, its largest item, and the advice.
    """
    largest, capacity = fullest_phase(phases, cluster)
    if largest is None or largest.total <= capacity:
        return
    name, size, _ = max((*largest.resident, *largest.transient), key=lambda item: item.num_bytes)
    part = largest_part(size, largest.total)
    raise PlanError(
        f"{largest.phase} needs {format_gib(largest.total)} per device but only {format_gib(capacity)} is "
        f"available on {_device_range(largest.devices)}. {part} {name} ({format_gib(size)}). {advice()}"
    )


def margin_warnings(
    phases: Sequence[PhaseMemory], cluster: ClusterSpec, advice: Callable[[], str]
) -> tuple[str, ...]:
    """Return a warning if a plan fits, but leaves less than the margin free; the arguments are the same."""
    largest, capacity = fullest_phase(phases, cluster)
    if largest is None or largest.total <= (1 - MEMORY_MARGIN) * capacity:
        return ()
    return (
        f"{largest.phase} needs {format_gib(largest.total)} of the {format_gib(capacity)} on "
        f"{_device_range(largest.devices)}, which leaves {format_gib(capacity - largest.total)} for what "
        f"estimates miss. {advice()}",
    )


def fullest_phase(phases: Sequence[PhaseMemory], cluster: ClusterSpec) -> tuple[PhaseMemory | None, int]:
    """Return the phase that takes the largest share of a device's memory, and this memory."""
    sizes = {row: cluster.memory_of(row.devices[0]) for row in phases}
    fullest = max(phases, key=lambda row: row.total / sizes[row], default=None)
    return fullest, 0 if fullest is None else sizes[fullest]


def largest_part(num_bytes: int, total: int) -> str:
    """Return the beginning of a sentence about the largest item of some memory."""
    return "Most of it is for" if 2 * num_bytes > total else "The largest part is for"


def _device_range(devices: tuple[int, ...]) -> str:
    """Return `device 3`, `devices 0-7`, or `4 devices from 1 to 7`."""
    first, last = devices[0], devices[-1]
    if len(devices) == 1 or last - first == len(devices) - 1:
        return f"device{'s' if len(devices) > 1 else ''} {format_ranges(devices)}"
    return f"{len(devices)} devices from {first} to {last}"
