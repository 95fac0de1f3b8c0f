"""Clusters by name: `h100-8x8` is eight machines with eight H100 each."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from hflow.errors import PlanError, nearest
from hflow.plan.ir import ClusterSpec

GIB = 2**30


@dataclass(frozen=True)
class DeviceModel:
    """A kind of device: torch's name for its type, and the memory of one."""

    type: str
    memory_bytes: int


DEVICES: Mapping[str, DeviceModel] = {
    "cpu": DeviceModel("cpu", 8 * GIB),
    "l40s": DeviceModel("cuda", 48 * GIB),
    "a100": DeviceModel("cuda", 80 * GIB),
    "h100": DeviceModel("cuda", 80 * GIB),
    "h200": DeviceModel("cuda", 141 * GIB),
    "b200": DeviceModel("cuda", 180 * GIB),
}
"""Devices that a cluster's name may use. A `cpu` device is one worker process."""

_PATTERN = re.compile(r"([a-z0-9]+)-([1-9]\d*)x([1-9]\d*)")


def parse_cluster(name: str) -> ClusterSpec:
    """Read `DEVICE-NODESxDEVICES`, as in `cpu-1x2`.

    Other machines are described by an explicit `ClusterSpec`.

    Raises:
        PlanError: when the name has another form or an unknown device.
    """
    match = _PATTERN.fullmatch(name)
    if match is None:
        raise PlanError(f"cluster {name!r} is not understood; write DEVICE-NODESxDEVICES, as in cpu-1x2")
    device, num_nodes, devices_per_node = match.group(1), int(match.group(2)), int(match.group(3))
    if device not in DEVICES:
        raise PlanError(
            f"cluster {name!r}: unknown device {device!r}{nearest(device, DEVICES)} "
            f"(known: {', '.join(DEVICES)})"
        )
    model = DEVICES[device]
    return ClusterSpec(name, model.type, num_nodes, devices_per_node, model.memory_bytes)
