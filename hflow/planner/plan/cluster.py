"""Clusters by name: `h100-8x8` is eight machines with eight H100 each.

`h100-4x8+a100-80g-2x8` has two more machines of another kind.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import accumulate

from hflow.base.errors import PlanError, nearest, shorten
from hflow.planner.plan.hardware import Device, Hardware, Link

_PATTERN = re.compile(r"([\w.-]+)-([1-9]\d*)x([1-9]\d*)")
PART_SEPARATOR = "+"
MAX_DEVICES = 65_536
"""Devices of the largest cluster. A plan has rows for every device, and takes seconds for ten thousand."""

MAX_DEVICES_PER_NODE = 1024
"""Devices of the largest machine: more than any has, so that a larger number is a typing error."""


@dataclass(frozen=True)
class ClusterSpec:
    """Devices to plan for: `num_nodes` machines with `devices_per_node` each."""

    name: str
    device: str
    """`cpu` or `cuda`: what torch calls the device."""
    num_nodes: int
    devices_per_node: int
    memory_bytes: int
    """Memory of one device; of several kinds, that of the smallest (see `memory_of`)."""
    cores: tuple[int, ...] = ()
    """Number of processor cores that the worker of each device of a machine is bound to; empty: workers are
    not bound."""
    parts: tuple[ClusterSpec, ...] = field(default=(), metadata={"left_out_by_default": True})
    """The equal machines of each kind, in the order of their devices; empty if all are equal."""

    @property
    def kinds(self) -> tuple[ClusterSpec, ...]:
        """The equal machines of each kind, in the order of `Hardware.kinds`; itself, if all are equal."""
        return self.parts or (self,)

    @cached_property
    def first_devices(self) -> tuple[int, ...]:
        """The first device of each kind."""
        return tuple(accumulate((kind.num_devices for kind in self.kinds[:-1]), initial=0))

    def part_index(self, device: int) -> int:
        """Return the index in `kinds` of the machines that a device belongs to."""
        return bisect_right(self.first_devices, device) - 1

    def part_of(self, device: int) -> ClusterSpec:
        """Return the equal machines that a device belongs to."""
        return self.kinds[self.part_index(device)]

    def memory_of(self, device: int) -> int:
        """Return the bytes of a device's memory."""
        return self.part_of(device).memory_bytes

    def first_of_kind(self, device: int) -> int:
        """Return the first device of the kind of a device."""
        return self.first_devices[self.part_index(device)]

    def cores_of(self, device: int) -> range:
        """Return the cores of a device's worker, numbered on its machine; empty if it is not bound."""
        local = device % self.devices_per_node
        return range(sum(self.cores[:local]), sum(self.cores[: local + 1]))

    @property
    def num_devices(self) -> int:
        """Number of devices in the whole cluster."""
        return self.num_nodes * self.devices_per_node

    def node_of(self, device: int) -> int:
        """Return the machine that a device belongs to."""
        return device // self.devices_per_node

    def machines(self, devices: tuple[int, ...]) -> Mapping[int, int]:
        """Return the number of some devices on each machine that has any, in the order of the devices."""
        return _machines(devices, self.devices_per_node)


@lru_cache(maxsize=256)
def _machines(devices: tuple[int, ...], devices_per_node: int) -> Mapping[int, int]:
    return Counter(device // devices_per_node for device in devices)


def parse_cluster(name: str, devices: Mapping[str, Device]) -> ClusterSpec:
    """Parse `DEVICE-NODESxDEVICES`, as in `cpu-1x2` or `a100-80g-2x8`, or several with `+` between them.

    Raises:
        PlanError: for a name of another form, with an unknown device, or with machines that differ in more
            than the kind of their devices.
    """
    parts = tuple(_parse_part(part, devices) for part in name.split(PART_SEPARATOR))
    if len(parts) == 1:
        return parts[0]
    kinds = [device_of(part.name) for part in parts]
    if twice := [kind for kind, num in Counter(kinds).items() if num > 1]:
        raise PlanError(
            f"cluster {shorten(name, 80)!r} names {twice[0]} twice; give all machines of a kind at once"
        )
    if len({part.devices_per_node for part in parts}) > 1:
        raise PlanError(
            f"cluster {shorten(name, 80)!r} has machines with different numbers of devices; all machines "
            "of a cluster need the same number"
        )
    if len({part.device for part in parts}) > 1:
        raise PlanError(f"cluster {shorten(name, 80)!r} has CPUs and GPUs; use devices of one of them")
    num_nodes = sum(part.num_nodes for part in parts)
    first, smallest = parts[0], min(part.memory_bytes for part in parts)
    _check_size(name, num_nodes, first.devices_per_node)
    return ClusterSpec(name, first.device, num_nodes, first.devices_per_node, smallest, parts=parts)


def _parse_part(name: str, devices: Mapping[str, Device]) -> ClusterSpec:
    kind, num_nodes, devices_per_node = _split(name)
    if kind not in devices:
        near = nearest(kind, [device for device in devices if device.startswith(kind)] or devices)
        raise PlanError(
            f"cluster {shorten(name, 80)!r}: unknown device {shorten(kind, 40)!r}{near} "
            f"(known: {', '.join(devices)})"
        )
    device = devices[kind]
    return ClusterSpec(name, device.type, num_nodes, devices_per_node, device.memory_bytes)


def device_of(name: str) -> str:
    """Return the first device in a cluster's name, `a100-80g` in `a100-80g-2x8`."""
    return _split(name.partition(PART_SEPARATOR)[0])[0]


def used_links(cluster: ClusterSpec, hardware: Hardware) -> list[tuple[Link, str]]:
    """Return the links that connect devices of a cluster of equal machines, each with its level."""
    racks = {hardware.rack_of(device) for device in (0, cluster.num_devices - 1)}
    levels = [
        (hardware.intra, "within a machine", cluster.devices_per_node > 1),
        (hardware.rack, "within a rack", cluster.num_nodes > 1),
        (hardware.inter, "between racks" if hardware.rack else "between machines", cluster.num_nodes > 1),
    ]
    if hardware.rack and len(racks) == 1:
        del levels[-1]
    return [(link, where) for link, where, is_used in levels if link is not None and is_used]


def _split(name: str) -> tuple[str, int, int]:
    match = _PATTERN.fullmatch(name)
    if match is None:
        raise PlanError(
            f"cluster {shorten(name, 80)!r} is not understood; write DEVICE-NODESxDEVICES, as in cpu-1x2"
        )
    kind, *counts = match.groups()
    if max(map(len, counts)) > len(str(MAX_DEVICES)):
        _check_size(name, MAX_DEVICES, MAX_DEVICES)
    nodes, devices = map(int, counts)
    _check_size(name, nodes, devices)
    if devices > MAX_DEVICES_PER_NODE:
        raise PlanError(
            f"cluster {shorten(name, 80)!r} has {devices:,} devices per machine, and a machine has at most "
            f"{MAX_DEVICES_PER_NODE:,}; write DEVICE-NODESxDEVICES, as in {kind}-{nodes}x8"
        )
    return kind, nodes, devices


def _check_size(name: str, num_nodes: int, devices_per_node: int) -> None:
    """Refuse a cluster that is too large to be planned."""
    if num_nodes * devices_per_node > MAX_DEVICES:
        raise PlanError(
            f"cluster {shorten(name, 80)!r} has more than {MAX_DEVICES:,} devices, the most that can be "
            "planned; use fewer"
        )
