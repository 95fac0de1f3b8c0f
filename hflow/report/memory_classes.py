"""Memory as reports show it: devices that hold the same belong together, and bytes have kinds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hflow.planner.forecast import Parts, PhaseMemory

KINDS = (
    ("weights", ("weight", "cast", "param")),
    ("gradients", ("grad",)),
    ("optimizer", ("optim",)),
    ("activations", ("activ",)),
    ("logits", ("logit",)),
    ("KV cache", ("kv", "cache")),
    ("buffers", ("buffer", "bucket", "gather", "batch", "sync")),
    ("runtime", ("runtime", "overhead", "context")),
)
"""What bytes are for, and the words in an item's name that tell it; anything else is `other`."""


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
    equal: dict[tuple[str, str, Parts, Parts], int] = {}
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


def kind_of(name: str) -> int:
    """What an item's bytes are for: the index in `KINDS` from 1, or the one behind them all."""
    words = name.lower().split(" ", 1)[-1] if "@" in name else name.lower()
    return next(
        (i for i, (_, signs) in enumerate(KINDS, 1) if any(sign in words for sign in signs)), len(KINDS) + 1
    )
