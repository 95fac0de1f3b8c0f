"""Figures of devices and links, as their data sheets say, with the calibration of what programs reach."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import field, replace
from functools import cached_property
from typing import Annotated, Literal

from pydantic import Field, StrictInt
from pydantic.dataclasses import dataclass

from hflow.base.validation import CHECKED, FrozenMapping
from hflow.planner.plan.calibration import DTYPES, Calibration, LinkRate, NonNegative, Positive

GIB = 2**30
GROUPED_PRODUCT = (9, 0)
"""Compute capability from which `torch.nn.functional.grouped_mm` has a kernel; before, it computes one expert
after the other (`aten/src/ATen/native/GroupedMMUtils.h` of torch)."""
LOW_DTYPES = ("fp8", "fp4")
"""Precisions that only some devices compute in."""

Count = Annotated[StrictInt, Field(ge=1)]
NumChannels = Annotated[StrictInt, Field(ge=0, le=64)]


@dataclass(frozen=True, config=CHECKED)
class Rack:
    """Neighbouring machines whose devices have a faster link, or fewer switches between them, than others.

    Examples are the NVLink domain of a GB200 NVL72, and machines on the same leaf switches.
    """

    devices: Count
    """Number of devices of all its machines together."""
    link: str
    """The link between its machines."""


@dataclass(frozen=True, config=CHECKED)
class Device:
    """One kind of device. A `cpu` device is one worker process."""

    name: str
    type: Literal["cpu", "cuda"]
    """The device's name in torch."""
    memory_gib: Positive
    tflops: FrozenMapping[str, Positive]
    """Dense TFLOP/s by dtype: `fp32`, `bf16`, and where the device has them `fp8` and `fp4`."""
    memory_gb_per_s: Positive
    """Memory bandwidth in 1e9 bytes per second."""
    link: str
    """The link between devices of one machine."""
    network: str
    """The link between machines, unless the configuration names another one."""
    capability: tuple[int, int] | None = None
    """CUDA's compute capability; None if it has none, or it is not known."""
    overhead_gib: NonNegative = 0.0
    """Memory that the runtime of a process takes: the CUDA context with the code of kernels; on a `cpu`, that
    of Python and its libraries. Communicators come on top (`forecast/memory/nccl.py`)."""
    host_link: str = "pcie-4"
    """The link between a device and the memory of its machine, as one device has it."""
    host_memory_gib: Positive | None = None
    """Memory of the machine for each of its devices; None: unknown. For a `cpu` it is the same memory as
    `memory_gib`."""
    rack: Rack | None = None
    """The level between machine and cluster; None: all machines are equally far from each other."""
    dollars_per_hour: NonNegative | None = None
    """Rent of one device with its share of the machine; None: unknown."""

    def __post_init__(self) -> None:
        for dtype in self.tflops:
            if dtype not in (*DTYPES, *LOW_DTYPES):
                known = ", ".join((*DTYPES, *LOW_DTYPES))
                raise ValueError(f"tflops.{dtype} is not a known precision (known: {known})")
        for dtype in DTYPES:
            if dtype not in self.tflops:
                raise ValueError(f"tflops.{dtype} is missing; it has no default")
        if self.overhead_gib >= self.memory_gib:
            raise ValueError(
                f"overhead_gib is {self.overhead_gib}; it must be less than memory_gib, {self.memory_gib:g}"
            )

    @property
    def memory_bytes(self) -> int:
        """Memory of one device."""
        return int(self.memory_gib * GIB)

    @property
    def host_memory_bytes(self) -> int | None:
        """Memory of the machine for each of its devices; None if it is not known."""
        return None if self.host_memory_gib is None else round(self.host_memory_gib * GIB)


@dataclass(frozen=True, config=CHECKED)
class Link:
    """A connection between two devices."""

    name: str
    gb_per_s: Positive
    """Bandwidth of one device in one direction, in 1e9 bytes per second."""
    latency_us: NonNegative
    """Microseconds that the smallest message takes."""
    channels: NumChannels = 0
    """Channels of an NCCL communicator over it, which have buffers on the devices: within a machine those of
    the communicator, between machines those of each of its devices on one. 0: hosts have the buffers."""
    switch_channels: NumChannels = 0
    """Channels of a communicator through switches that add and copy (NVLink SHARP); 0: they do not."""


@dataclass(frozen=True)
class Hardware:
    """Devices and links of a cluster."""

    device: Device
    intra: Link
    """Between devices of one machine."""
    inter: Link
    """Between machines; between racks, where the device has a `rack`."""
    host: Link
    """Between a device and the memory of its machine."""
    calibration: Calibration
    """The rates that programs reach on device and links."""
    rack: Link | None = None
    """Between machines of one rack; None if the device has no `rack`."""
    others: tuple[tuple[int, Hardware], ...] = field(default=(), metadata={"left_out_by_default": True})
    """Hardware of further kinds of devices in the same cluster, each after its first device."""

    @cached_property
    def kinds(self) -> tuple[Hardware, ...]:
        """The hardware of each kind of devices; itself, if all are equal."""
        return (replace(self, others=()), *(other for _, other in self.others)) if self.others else (self,)

    def at(self, device: int) -> Hardware:
        """Return the hardware of a device, and of all others of its kind."""
        if not self.others:
            return self
        return self.kinds[bisect_right([first for first, _ in self.others], device)]

    def with_cores(self, num: int) -> Hardware:
        """Return the hardware of CPU workers with some cores each, 1 at least (`Calibration.parallel`)."""
        part, device = self.calibration.parallel, self.device
        if num < 2 or device.type != "cpu":
            return self
        gain = 1 / (1 - part + part / num)
        tflops = {dtype: gain * rate for dtype, rate in device.tflops.items()}
        return replace(self, device=replace(device, tflops=tflops))

    def network(self, workers: Sequence[int]) -> Link:
        """Return the link over which devices on different machines exchange: of several kinds the slower."""
        ends = min(workers), max(workers)
        near, far = map(self.at, ends)
        if near != far:
            return min((one.inter for one in self.kinds), key=lambda link: link.gb_per_s)
        return near.within_rack if near.rack_of(ends[0]) == near.rack_of(ends[1]) else near.inter

    @cached_property
    def of_updates(self) -> Hardware:
        """The hardware with the rate between machines that weights of an update reach."""
        updates = self.calibration.updates
        if updates is None:
            return self
        return replace(self, calibration=replace(self.calibration, inter=updates))

    def link_rate(self, link: Link) -> LinkRate:
        """Return the rate that programs reach on one of the cluster's links."""
        if link == self.intra:
            return self.calibration.intra
        return self.calibration.host_copy if link == self.host else self.calibration.inter

    def exchange_rate(self, link: Link) -> LinkRate:
        """Return the rate that kernels for sending tokens to experts reach on a link."""
        return (
            self.calibration.exchange or self.link_rate(link) if link == self.inter else self.link_rate(link)
        )

    @property
    def within_rack(self) -> Link:
        """The link between neighbouring machines."""
        return self.rack or self.inter

    def rack_of(self, device: int) -> int:
        """Return the rack that a device belongs to; 0 if there are no racks."""
        return device // self.device.rack.devices if self.device.rack else 0
