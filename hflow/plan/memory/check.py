"""A plan that does not fit is refused, with the phase, the bytes and the nearest change that works."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from hflow.errors import PlanError
from hflow.plan.forecast import PhaseMemory
from hflow.plan.hardware import GIB
from hflow.plan.ir import Plan
from hflow.plan.memory.phases import memory_phases
from hflow.plan.memory.remedies import Remedy, more_devices, remedies
from hflow.plan.request import PlanRequest


def check_memory(plan: Plan, request: PlanRequest, phases: Sequence[PhaseMemory]) -> None:
    """Refuse a plan whose devices would need more memory than they have.

    Args:
        plan: what was compiled.
        request: what it was compiled from; the advice is a change of it.
        phases: what `memory_phases` made of the two.

    Raises:
        PlanError: naming the phase that needs most, its largest item, and a change after which all fits.
    """
    worst = max(phases, key=lambda phase: phase.total, default=None)
    capacity = plan.cluster.memory_bytes
    if worst is None or worst.total <= capacity:
        return
    name, size = max((*worst.resident, *worst.transient), key=lambda item: item[1])
    raise PlanError(
        f"{worst.phase} needs {_gib(worst.total)} on {_devices(worst.devices)}, which has {_gib(capacity)}; "
        f"most of it is for {name} ({_gib(size)}); {_advice(plan, request, phases)}"
    )


def _advice(plan: Plan, request: PlanRequest, phases: Sequence[PhaseMemory]) -> str:
    """The mildest change after which every phase fits, found by trying; else what stands in the way."""
    capacity = plan.cluster.memory_bytes
    over = [phase for phase in phases if phase.total > capacity]
    tried: list[tuple[Remedy, PhaseMemory]] = []
    for remedy in chain(remedies(plan, request, over), more_devices(plan, request, over)):
        peak = max(memory_phases(remedy.plan, remedy.request), key=lambda phase: phase.total)
        if peak.total <= capacity:
            return f"{remedy.text} fits ({_gib(peak.total)})"
        tried.append((remedy, peak))
    if not tried:
        return "take larger devices or a smaller model"
    best, peak = min(tried, key=lambda pair: pair[1].total)
    return (
        f"no single change fits: even with {best.text} {peak.phase} needs {_gib(peak.total)}; take larger "
        f"devices or a smaller model"
    )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB"


def _devices(devices: tuple[int, ...]) -> str:
    """`device 3`, `each of devices 0-7`, or `each of 4 devices from 1 to 7`."""
    first, last = devices[0], devices[-1]
    if len(devices) == 1:
        return f"device {first}"
    if last - first == len(devices) - 1:
        return f"each of devices {first}-{last}"
    return f"each of {len(devices)} devices from {first} to {last}"
