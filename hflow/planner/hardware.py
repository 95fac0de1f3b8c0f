"""What devices and links can do, in figures from their data sheets and the share that programs reach."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from hflow.errors import PlanError

GIB = 2**30
DTYPES = ("fp32", "bf16")
"""What models compute in, so that every device has a figure for each."""


@dataclass(frozen=True)
class Efficiency:
    """The share of a data sheet's figure that real programs reach."""

    compute: float = 0.45
    """Of dense FLOP/s, in large matrix products (model FLOPs utilisation)."""
    memory: float = 0.7
    """Of memory bandwidth, in decoding and optimizer steps."""
    network: float = 0.7
    """Of link bandwidth, in large collectives."""

    def __post_init__(self) -> None:
        for name, share in vars(self).items():
            if not 0 < share <= 1:
                raise PlanError(f"efficiency.{name} is {share}; it must be above 0 and at most 1")


@dataclass(frozen=True)
class Device:
    """One kind of device. A `cpu` device is one worker process."""

    name: str
    type: Literal["cpu", "cuda"]
    """What torch calls it."""
    memory_gib: float
    tflops: Mapping[str, float]
    """Dense TFLOP/s by dtype (`fp32`, `bf16`)."""
    memory_gb_per_s: float
    """Memory bandwidth in 1e9 bytes a second."""
    link: str
    """The link between devices of one machine."""
    network: str
    """The link between machines, unless the configuration names another."""
    overhead_gib: float = 0.0
    """Memory that the runtime takes for itself (CUDA context, NCCL buffers, the Python process)."""
    efficiency: Efficiency = field(default_factory=Efficiency)

    def __post_init__(self) -> None:
        for dtype in DTYPES:
            _check_positive(f"tflops.{dtype}", self.tflops.get(dtype))
        _check_positive("memory_gb_per_s", self.memory_gb_per_s)
        _check_positive("memory_gib", self.memory_gib)
        if not 0 <= self.overhead_gib < self.memory_gib:
            raise PlanError(
                f"overhead_gib is {self.overhead_gib}; it must be at least 0 and below memory_gib, "
                f"{self.memory_gib:g}"
            )

    @property
    def memory_bytes(self) -> int:
        """Memory of one device."""
        return int(self.memory_gib * GIB)


@dataclass(frozen=True)
class Link:
    """A way between two devices."""

    name: str
    gb_per_s: float
    """1e9 bytes a second for one device, in one direction."""
    latency_us: float
    """Microseconds that the smallest message takes."""

    def __post_init__(self) -> None:
        _check_positive("gb_per_s", self.gb_per_s)
        if not self.latency_us >= 0:
            raise PlanError(f"latency_us is {self.latency_us}; it must be at least 0")


@dataclass(frozen=True)
class Hardware:
    """Devices and links of a cluster."""

    device: Device
    intra: Link
    """Between devices of one machine."""
    inter: Link
    """Between machines."""


def _check_positive(what: str, figure: float | None) -> None:
    if figure is None or not 0 < figure < math.inf:
        raise PlanError(f"{what} is {'missing' if figure is None else figure}; it must be above 0")
