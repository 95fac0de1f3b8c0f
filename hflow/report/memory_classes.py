"""Classes of devices with equal memory, as reports show them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hflow.planner.plan.forecast import PhaseMemory


@dataclass(frozen=True)
class DeviceClass:
    """Devices that hold the same in every phase."""

    devices: tuple[int, ...]
    phases: tuple[PhaseMemory, ...]

    @property
    def peak(self) -> PhaseMemory:
        """The phase that needs most."""
        return max(self.phases, key=lambda phase: phase.total)


def device_classes(rows: Sequence[PhaseMemory]) -> tuple[DeviceClass, ...]:
    """Devices with equal rows together, in the order in which the rows name them first."""
    equal: dict[tuple[Any, ...], int] = {}
    of_device: dict[int, list[int]] = {}
    for i, row in enumerate(rows):
        same = equal.setdefault((row.group, row.phase, row.resident, row.transient), i)
        for device in row.devices:
            of_device.setdefault(device, []).append(same)
    together: dict[tuple[int, ...], list[int]] = {}
    for device, indices in of_device.items():
        together.setdefault(tuple(indices), []).append(device)
    return tuple(
        DeviceClass(tuple(sorted(devices)), tuple(rows[i] for i in indices))
        for indices, devices in together.items()
    )
