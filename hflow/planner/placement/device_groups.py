"""Device groups: sets of devices whose replicas take turns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import combinations, groupby

from hflow.errors import PlanError, nearest
from hflow.planner.ir import ClusterSpec, DeviceGroup
from hflow.planner.routing import grouping

Devices = tuple[int, ...]

Wanted = Mapping[str, int | None]
"""Group -> devices of the largest layout asked for in it; None where no layout is given."""


def device_groups(
    cluster: ClusterSpec, explicit: Mapping[str, Devices], wanted: Wanted
) -> dict[str, DeviceGroup]:
    """The groups that replicas name, with their devices.

    Args:
        cluster: devices to share out.
        explicit: devices of each group; when empty, devices are shared out in the order of `wanted`.
        wanted: the groups that replicas name.

    Raises:
        PlanError: for an unknown group, groups that overlap, or more devices than there are.
    """
    devices = {name: _listed(name, explicit, cluster) for name in wanted} if explicit else {}
    devices = devices or _shared_out(cluster, wanted)
    _check_disjoint(devices)
    return {name: DeviceGroup(name, held) for name, held in devices.items()}


def device_ranges(devices: Iterable[int]) -> str:
    """Devices in order, in few letters: `0-3,6`."""
    runs = groupby(enumerate(devices), key=lambda pair: pair[1] - pair[0])
    ends = [[device for _, device in run] for _, run in runs]
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in ends)


def _listed(name: str, explicit: Mapping[str, Devices], cluster: ClusterSpec) -> Devices:
    if name not in explicit:
        raise PlanError(
            f"unknown device group {name!r}{nearest(name, explicit)} (known: {', '.join(explicit)})"
        )
    devices = tuple(explicit[name])
    if not devices or len(set(devices)) < len(devices):
        raise PlanError(f"device group {name!r} is {list(devices)}; list each of its devices once")
    outside = [device for device in devices if device not in range(cluster.num_devices)]
    if outside:
        raise PlanError(
            f"device group {name!r} names device {outside[0]}, but cluster {cluster.name} "
            f"has devices 0 to {cluster.num_devices - 1}"
        )
    return devices


def _shared_out(cluster: ClusterSpec, wanted: Wanted) -> dict[str, Devices]:
    """Neighbouring devices for each group; a single group has the whole cluster."""
    if len(wanted) == 1:
        return {name: tuple(range(cluster.num_devices)) for name in wanted}
    sizes = {name: size for name, size in wanted.items() if size is not None}
    open_ended = [name for name in wanted if name not in sizes]
    left = cluster.num_devices - sum(sizes.values())
    if left < len(open_ended):
        asked = ", ".join(f"{name} {wanted[name] or 'at least 1'}" for name in wanted)
        raise PlanError(
            f"device groups need more than the {cluster.num_devices} devices of cluster {cluster.name} "
            f"({asked}); take smaller layouts, a larger cluster, or one group for all"
        )
    if open_ended:
        shares = grouping(left, len(open_ended))
        sizes |= {name: len(shares[i]) for i, name in enumerate(open_ended)}
    devices, start = {}, 0
    for name in wanted:
        devices[name] = tuple(range(start, start + sizes[name]))
        start += sizes[name]
    return devices


def _check_disjoint(devices: Mapping[str, Devices]) -> None:
    """A device takes its turns in one cyclic order, so it belongs to one group."""
    for one, other in combinations(devices, 2):
        common = sorted(set(devices[one]) & set(devices[other]))
        if common:
            raise PlanError(
                f"device groups {one!r} and {other!r} both hold device {common[0]}; "
                "give them disjoint devices, or put their models into one group"
            )
