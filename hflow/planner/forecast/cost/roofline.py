"""The roofline model: work takes as long as the slowest of arithmetic, memory traffic and kernel launches.

Source: Williams, Waterman, Patterson 2009, "Roofline: an insightful visual performance model".
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from hflow.planner.plan.forecast import NodeTime
from hflow.planner.plan.hardware import Hardware

COMPUTE, MEMORY, NETWORK, LATENCY = "compute", "memory bandwidth", "network", "latency"
HOST = "host"
"""What can limit a part: units, memory and links of devices, the latency of links, and hosts."""


@dataclass(frozen=True)
class Rates:
    """Rates that programs attain on one device."""

    flops: float
    """FLOP/s."""
    memory: float
    """Bytes of memory per second in decoding."""
    stream: float
    """Bytes of memory per second in copies and element-wise kernels."""

    @classmethod
    def of(cls, hardware: Hardware, dtype: str) -> Rates:
        """Return the figures of the data sheet times what programs reach of them."""
        device, reached = hardware.device, hardware.calibration
        return cls(
            flops=device.tflops[dtype] * 1e12 * reached.matmul_rate(dtype).share,
            memory=device.memory_gb_per_s * 1e9 * reached.memory.decode,
            stream=device.memory_gb_per_s * 1e9 * reached.memory.stream,
        )


class Part(NamedTuple):
    """Some seconds of a node, and what limits them. A search makes millions."""

    name: str
    seconds: float
    limit: str

    def times(self, factor: float) -> Part:
        """Return the part repeated one after the other."""
        return Part(self.name, self.seconds * factor, self.limit)


def roofline(
    name: str,
    compute: float,
    memory: float,
    host: float = 0.0,
    sharpness: float | None = None,
    is_ahead: bool = True,
) -> Part:
    """Return the seconds of work that computes while it reads and writes memory, and while the host launches.

    Args:
        compute: seconds of its arithmetic.
        memory: seconds of its memory traffic.
        host: seconds that the host needs to launch the kernels.
        sharpness: sharpness of the corner between arithmetic and memory (`MemoryRate.sharpness`).
        is_ahead: whether the host launches ahead of the device. A CPU is both, so that its times add up.
    """
    longest, device = max(compute, memory, host), max(compute, memory)
    limit = COMPUTE if longest == compute else MEMORY if longest == memory else HOST
    if sharpness is not None:
        device = (compute**sharpness + memory**sharpness) ** (1 / sharpness)
    return Part(name, max(device, host) if is_ahead else device + host, limit)


def main_limit(parts: Iterable[Part]) -> str:
    """Return the limit under which parts that follow one another take most of their seconds."""
    seconds: dict[str, float] = {}
    for part in parts:
        seconds[part.limit] = seconds.get(part.limit, 0.0) + part.seconds
    return max(seconds, key=seconds.__getitem__, default=LATENCY)


def node_time(node: str, parts: Iterable[Part]) -> NodeTime:
    """Return the time of parts that follow one another, without those that take no time."""
    parts = [part for part in parts if part.seconds > 0]
    return NodeTime(
        node=node,
        seconds=sum(part.seconds for part in parts),
        parts=tuple((part.name, part.seconds) for part in parts),
        limit=main_limit(parts),
    )
