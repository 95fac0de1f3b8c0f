"""The roofline: work takes as long as its arithmetic, its memory traffic or the host's calls, the slowest.

Source: Williams, Waterman, Patterson 2009, "Roofline: an insightful visual performance model".
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hflow.planner.forecast import NodeTime
from hflow.planner.hardware import Hardware

COMPUTE, MEMORY, NETWORK, LATENCY = "compute", "memory bandwidth", "network", "latency"
"""What can bound a part."""


@dataclass(frozen=True)
class Rates:
    """What programs reach on one device."""

    flops: float
    """FLOP/s."""
    memory: float
    """Bytes of memory a second."""

    @classmethod
    def of(cls, hardware: Hardware, dtype: str) -> Rates:
        """The data sheet's figures times the efficiencies."""
        device = hardware.device
        return cls(
            flops=device.tflops[dtype] * 1e12 * device.efficiency.compute,
            memory=device.memory_gb_per_s * 1e9 * device.efficiency.memory,
        )


@dataclass(frozen=True)
class Part:
    """Some seconds of a firing, and what bounds them."""

    name: str
    seconds: float
    limit: str

    def times(self, factor: float) -> Part:
        """So many of it, one after the other."""
        return Part(self.name, self.seconds * factor, self.limit)


def bound(name: str, flops: float, num_bytes: float, rates: Rates, issuing: float = 0.0) -> Part:
    """Work of so many FLOPs that reads and writes so many bytes of memory.

    Args:
        name: of the part.
        flops: arithmetic.
        num_bytes: memory traffic.
        rates: what the device reaches.
        issuing: seconds in which the host issues the operations; it runs ahead of the device.
    """
    seconds = {COMPUTE: flops / rates.flops, MEMORY: num_bytes / rates.memory, LATENCY: issuing}
    limit = max(seconds, key=seconds.__getitem__)
    return Part(name, seconds[limit], limit)


def node_time(node: str, parts: Iterable[Part]) -> NodeTime:
    """Parts that follow one another; those that take no time are left out."""
    parts = [part for part in parts if part.seconds > 0]
    largest = max(parts, key=lambda part: part.seconds, default=Part("", 0.0, LATENCY))
    return NodeTime(
        node=node,
        seconds=sum(part.seconds for part in parts),
        parts=tuple((part.name, part.seconds) for part in parts),
        limit=largest.limit,
    )
