"""How groups of replicas divide devices: the sizes to try, and the devices of each group."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from hflow.planner.ir import ClusterSpec
from hflow.planner.placement.replicas import Devices

EVERY_SIZE = 16
"""Up to this many devices, groups of every size are tried."""
NUM_UNITS = 16
"""Larger clusters are divided in about this many equal parts; the search then moves parts of them."""


def group_sizes(num_devices: int, cluster: ClusterSpec) -> tuple[int, ...]:
    """Return the sizes of groups to try first on a number of free devices, ascending.

    On large clusters these are powers of two within a machine, and multiples of a number of machines.
    """
    if num_devices <= EVERY_SIZE:
        return tuple(range(1, num_devices + 1))
    per_machine = cluster.devices_per_node
    unit = per_machine
    while num_devices > NUM_UNITS * unit:
        unit *= 2
    small = {1 << i for i in range(unit.bit_length()) if 1 << i < unit and unit % (1 << i) == 0}
    if num_devices > 8 * EVERY_SIZE:  # a part of a machine is of no use beside so many
        small = {size for size in small if size % per_machine == 0}
    return tuple(sorted({*small, *range(unit, num_devices + 1, unit), num_devices}))


@lru_cache(maxsize=1024)
def compositions(total: int, num_groups: int, sizes: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Return every way to write a number as an ordered sum of sizes."""
    if num_groups == 0:
        return ((),) if total == 0 else ()
    if num_groups == 1:
        return ((total,),) if total in sizes else ()
    found = []
    for size in sizes:
        if size >= total:
            break
        found += [(size, *rest) for rest in compositions(total - size, num_groups - 1, sizes)]
    return tuple(found)


def assign_devices(
    sizes: Sequence[int], devices: Sequence[int], cluster: ClusterSpec
) -> tuple[Devices, ...] | None:
    """Give each group its devices.

    A group up to the size of a machine is within one machine, and a larger one begins with a whole one. The
    largest groups come first; the others then fill the smallest gap that is large enough.

    Args:
        sizes: of the groups.
        devices: that are free, ascending.
        cluster: says which devices share a machine.

    Returns:
        The devices of each group, or None if the groups cannot be placed like this.
    """
    gaps = [list(run) for run in _by_machine(tuple(devices), cluster)]
    given: dict[int, Devices] = {}
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        taken = _take(sizes[index], gaps, cluster.devices_per_node)
        if taken is None:
            return None
        given[index] = taken
    return tuple(given[i] for i in range(len(sizes)))


def _take(size: int, gaps: list[list[int]], per_machine: int) -> Devices | None:
    """Remove devices from the free ones of each machine."""
    if size <= per_machine:
        gap = min((gap for gap in gaps if len(gap) >= size), key=len, default=None)
        if gap is None:
            return None
        taken, gap[:] = gap[:size], gap[size:]
        return tuple(taken)
    for first in range(len(gaps)):
        if len(gaps[first]) < per_machine:
            continue
        found: list[int] = []
        for last in range(first, len(gaps)):
            gap = gaps[last]
            if len(gap) < per_machine and len(found) + len(gap) < size:
                break
            found += gap
            if len(found) >= size:
                for used in gaps[first:last]:
                    used.clear()
                gap[:] = found[size:]
                return tuple(found[:size])
    return None


@lru_cache(maxsize=8)
def _by_machine(devices: Devices, cluster: ClusterSpec) -> tuple[Devices, ...]:
    machines: dict[int, list[int]] = {}
    for device in devices:
        machines.setdefault(cluster.node_of(device), []).append(device)
    return tuple(tuple(run) for run in machines.values())
