"""`Calibration`: what programs reach beyond data sheets, and what host, disks and copies take.

Every empirical number of the cost model is here, in one file format. hflow ships figures by generation of
devices (`configs/hardware/calibrations`), fitted to published measurements (`benchmarks/planner/cost_model`).
Figures that were measured on the hardware at hand replace them: `calibration=FILE`, or `calibrate=RUN`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated

from pydantic import Field, StrictBool, StrictFloat, StrictInt
from pydantic.dataclasses import dataclass

from hflow.base.errors import PlanError
from hflow.base.validation import CHECKED, FrozenMapping
from hflow.planner.plan.traits import BACKENDS, ENGINES, is_engine

DTYPES = ("fp32", "bf16")
"""Precisions that models compute in. Every device and every calibration has a figure for each."""

MEASURED_WITH = {
    "torch": "matmul, attention and memory",
    "transformers": "the times of the host",
}
"""Packages that decide figures of `hflow profile` -> these figures."""

Positive = Annotated[StrictFloat, Field(gt=0, le=1e15)]
NonNegative = Annotated[StrictFloat, Field(ge=0, le=1e15)]


@dataclass(frozen=True, config=CHECKED)
class MatmulRate:
    """The speed of products of matrices, by their shape.

    A product of `[m, k]` and `[k, n]` takes `2 m k n / (peak * share * r(m) * s(k) * s(n)) + kernel_us`.
    `s(x) = x / (x + half_size)`: short sides of the weights leave units of a device unused.
    `r(m) = min(1, m / tile_rows)`: the units work on tiles. Every kernel takes a moment besides.
    """

    share: Positive
    """Fraction of the data sheet's dense FLOP/s in large products. More than 1 where the sheet is a guess, as
    for CPUs."""
    half_size: NonNegative = 0.0
    """A side of the weights of this length halves the rate."""
    kernel_us: NonNegative = 0.0
    """Microseconds that each product takes besides."""
    tile_rows: Positive = 1.0
    """Rows of the smallest tile of the matrix units: 64 on Hopper (`wgmma.m64n8k16` of NVIDIA's PTX ISA)."""

    def rate(self, rows: float, inner: float, columns: float) -> float:
        """Return the fraction of the data sheet's FLOP/s that a product of this shape reaches."""
        sides = inner / (inner + self.half_size) * columns / (columns + self.half_size)
        return self.share * min(1.0, rows / self.tile_rows) * sides

    def seconds(self, rows: float, inner: float, columns: float, peak: float) -> float:
        """Return the seconds of one product of `[rows, inner]` and `[inner, columns]`.

        `peak` is the FLOP/s of the data sheet.
        """
        flops = 2 * rows * inner * columns
        return flops / (peak * self.rate(rows, inner, columns)) + self.kernel_us * 1e-6


@dataclass(frozen=True, config=CHECKED)
class MemoryRate:
    """Fractions of the data sheet's memory bandwidth that programs reach."""

    decode: Positive
    """In decoding, which reads weights and the KV cache."""
    stream: Positive
    """In long element-wise kernels: optimizer steps, copies, norms and activation functions."""
    sharpness: Annotated[StrictFloat, Field(ge=1)] | None = None
    """Exponent p with which a product of few rows takes `(compute^p + memory^p)^(1/p)` in decoding: 1 if
    arithmetic and reading weights follow one another. None: the longer of both."""
    passes: NonNegative = 0.0
    """How often element-wise kernels read or write all of a layer's hidden states and intermediate
    activations in a forward pass. A backward pass takes twice as many."""


@dataclass(frozen=True, config=CHECKED)
class LinkRate:
    """The speed of collectives over one link, by bytes and ranks.

    A ring moves its bytes at `share` of the link's bandwidth. Each collective takes `launch_us` besides the
    link's own latency, which grows with the ranks.
    """

    share: Positive
    """Fraction of the link's bandwidth in large collectives."""
    launch_us: NonNegative = 0.0
    """Microseconds of each collective, whatever its size."""


@dataclass(frozen=True, config=CHECKED)
class HostTimes:
    """Time that the host of a backend or engine takes, in microseconds, and rates of its own kernels."""

    layer_us: NonNegative = 0.0
    """Time to launch the kernels of one layer in one pass, forward or backward. The host of a GPU does this
    ahead of it, so that it is a minimum and is not added; on a CPU it is added. It does not count in decode
    steps that are CUDA graphs (`BackendTraits.captured_families`)."""
    gap_us: NonNegative = 0.0
    """Per layer of a decode step, added: gaps between kernels that a CUDA graph leaves. Where the host
    launches the kernels, these are part of that time."""
    step_us: NonNegative = 0.0
    """Per decode step: scheduling, preparing inputs, sampling. It is added, or a minimum where the engine
    schedules ahead (`BackendTraits.schedules_ahead_on`). Per training step of a model that is sharded over
    ranks of a CPU: what does not grow with the bytes, such as waiting for the slower rank."""
    sequence_us: NonNegative = 0.0
    """Per running sequence of a decode step, added to `step_us`."""
    expert_us: NonNegative = 0.0
    """Per layer with experts in one pass or decode step, added, where tokens are sent to the ranks of their
    experts: the device waits while the host reads how many there are for each, and launches what follows."""
    exchange_us: NonNegative = 0.0
    """Per layer with experts in one pass, added to `expert_us` where NCCL sends the tokens
    (`BackendTraits.has_exchange_kernels`): the host sorts them, and waits for what other ranks will send."""
    expert_launch_us: NonNegative = 0.0
    """The same where the host reads nothing: all experts are on the rank, or a CUDA graph has the layer."""
    expert_loop_us: NonNegative = 0.0
    """Per expert of a layer in one pass, added, where no kernel computes all experts at once: the host
    launches the products of each (`hardware.GROUPED_PRODUCT`)."""
    attention: Positive | None = None
    """Fraction of dense bf16 FLOP/s that its own attention kernels reach; None: that of `Calibration`."""
    passes: NonNegative | None = None
    """Value in the place of `MemoryRate.passes`, where kernels are fused in another way; None: that one, and
    0 in decoding, where few tokens are computed."""


@dataclass(frozen=True, config=CHECKED)
class TrainerTimes:
    """What the passes of a trainer of reinforcement learning take besides those of programs that pre-train.

    Sequences differ in length, and losses and statistics are of each token.
    """

    factor: Annotated[StrictFloat, Field(ge=1)] = 1.0
    """Seconds of its kernels other than attention, over those of the same ones in pre-training."""
    layer_us: NonNegative = 0.0
    """Microseconds for each layer in one pass, added: the device waits for the host."""


@dataclass(frozen=True, config=CHECKED)
class TransferRates:
    """Rates in 1e9 bytes per second of one process, and the time per tensor, where no link says them."""

    store_gb_per_s: Positive
    """Into or out of Ray's object store and shared memory: one copy in the memory of the host."""
    disk_gb_per_s: Positive
    """Files of checkpoints and weights."""
    tensor_us: NonNegative
    """Microseconds of each tensor in a weight update: gathering, converting and loading it."""
    checksum_gb_per_s: Positive | None = None
    """The checksum that verifies new weights where they are sent, received and held; None: not
    counted."""


@dataclass(frozen=True, config=CHECKED)
class PublishedError:
    """How far a plan with shipped figures is from published runs that nothing was fitted to."""

    rows: Annotated[StrictInt, Field(ge=1)]
    """Number of measurements."""
    error: NonNegative
    """Mean of |predicted / measured - 1|."""
    ratio: Positive
    """Median of predicted / measured."""
    right_signs: Annotated[StrictInt, Field(ge=0)] | None = None
    """Number of gains that are predicted on the side of 1 that they were measured on; None: no gains."""


@dataclass(frozen=True, config=CHECKED)
class Calibration:
    """The rates that programs reach on one kind of device."""

    name: str
    """The file's name, without its ending."""
    devices: tuple[str, ...]
    """Names of the devices that it holds for."""
    source: str
    """The source of the measurements, with time and place, in a sentence."""
    matmul: FrozenMapping[str, MatmulRate]
    """By dtype. `fp32` and `bf16` are required."""
    attention: Positive
    """Fraction of dense bf16 FLOP/s in attention kernels over long sequences: of those that engines choose
    themselves, and of those that `attention_of` does not name."""
    memory: MemoryRate
    intra: LinkRate
    """Between devices of one machine."""
    inter: LinkRate
    """Between machines."""
    host_copy: LinkRate
    """Between a device and pinned memory of its machine."""
    host: FrozenMapping[str, HostTimes]
    """By training backend and generation engine."""
    transfers: TransferRates
    attention_of: FrozenMapping[str, Positive] = Field(default_factory=dict)
    """The same by kernel, without its version (`types.kernels.AttentionKernel`)."""
    updates: LinkRate | None = None
    """Between machines, where weights are sent from trainers to engines. None: as `inter`."""
    exchange: LinkRate | None = None
    """Between machines, where kernels such as DeepEP's send tokens to experts and all ports are in use. Not
    where NCCL does, as for hflow's trainers and engines. None: as `inter`."""
    expert_wait: Annotated[StrictFloat, Field(ge=1)] = 1.0
    """Where ranks divide experts, seconds of an engine's steps, of a trainer's kernels but attention and of
    its exchange of tokens over those of evenly divided tokens: tokens choose experts, and all ranks wait for
    the one with most."""
    trainer: TrainerTimes = Field(default_factory=TrainerTimes)
    """What a trainer of reinforcement learning takes besides. Nothing where steps of hflow were measured."""
    overlap_cost: Annotated[StrictFloat, Field(ge=0, le=1)] = 0.0
    """Seconds that computation loses for each second of collectives that run beside it, as both need the
    device's units and memory."""
    sample_us: NonNegative = 0.0
    """Microseconds of each sample outside of its engine: its episode, its reward, the store and the ledger.
    The controller handles samples one after the other, beside engines on GPUs, and on their cores on a
    CPU."""
    node_us: NonNegative = 0.0
    """Microseconds of each execution of a batch node, and of each update of an engine's weights, besides its
    work: what the controller does, and messages to its workers and back."""
    process_us: NonNegative = 0.0
    """What is added to `node_us` where workers are processes, which Ray's messages reach."""
    parallel: Annotated[StrictFloat, Field(ge=0, le=1)] = 0.0
    """Part p of the seconds of products and attention that the cores of a CPU's worker divide: `c` cores take
    `1 - p + p / c` of the seconds of one. Source: Amdahl 1967, "Validity of the single processor approach to
    achieving large scale computing capabilities". Cores share the worker's memory bandwidth, and one of them
    does its other work."""
    is_measured: StrictBool = False
    """Whether it was measured on the user's hardware, rather than shipped with hflow."""
    versions: FrozenMapping[str, str] = Field(default_factory=dict)
    """Package in `MEASURED_WITH` -> its version when its figures were measured; empty: shipped figures."""
    missed: FrozenMapping[str, NonNegative] = Field(default_factory=dict)
    """Part of what was measured, such as `matmul` -> mean absolute error (0.05: 5 %) on measurements that no
    figure was fitted to."""
    published: FrozenMapping[str, PublishedError] = Field(default_factory=dict)
    """Kind of figure, such as `training pass` -> how far plans are from published runs on devices of this
    family. Only of shipped figures: `configs/hardware/accuracy.json`, which
    `benchmarks/planner/cost_model/validate.py` writes."""
    unmeasured: tuple[str, ...] = ()
    """Parts that this hardware could not show, such as `inter` on one machine; they are shipped figures."""

    def __post_init__(self) -> None:
        for part, names in (("matmul", DTYPES), ("host", (*BACKENDS.own, *ENGINES.own))):
            for name in names:
                if name not in getattr(self, part):
                    raise ValueError(f"{part}.{name} is missing; it has no default")

    def matmul_rate(self, dtype: str) -> MatmulRate:
        """Return the rate of products in a precision; those without a rate of their own have that of bf16."""
        return self.matmul.get(dtype, self.matmul["bf16"])

    def attention_share(self, kernel: str) -> float:
        """Return the fraction of dense bf16 FLOP/s that a kernel of attention, of any version, reaches."""
        name = self.measured_kernel(kernel)
        return self.attention if name is None else self.attention_of[name]

    def measured_kernel(self, kernel: str) -> str | None:
        """Return the name of an attention kernel in `attention_of`; None if it is not there."""
        names = [name for name in self.attention_of if kernel.startswith(name)]
        return max(names, key=len, default=None)

    def host_times(self, name: str) -> HostTimes:
        """Return the host's times of a backend or engine; one of another package has those of the default."""
        return self.host[self.host_name(name)]

    def host_name(self, name: str) -> str:
        """Return the backend or engine that `host_times` are those of."""
        return name if name in self.host else (ENGINES if is_engine(name) else BACKENDS).default


def changed_figures(
    calibration: Calibration, installed: Mapping[str, str], kernels: Iterable[str]
) -> Iterator[str]:
    """Yield warnings about figures that were measured with another kernel, or another version of a package.

    There are none for a shipped calibration. The kernels are the plan's, without versions.
    """
    again = "measure again with hflow profile"
    if calibration.is_measured and calibration.attention_of:
        measured = " and ".join(calibration.attention_of)
        for kernel in sorted(set(kernels) - set(calibration.attention_of)):
            yield (
                f"calibration {calibration.name}: attention was measured with {measured}, and the plan "
                f"computes it with {kernel}, which takes other times; {again}"
            )
    for package, version in calibration.versions.items():
        if package in installed and installed[package] != version:
            yield (
                f"calibration {calibration.name}: {MEASURED_WITH[package]} were measured with {package} "
                f"{version}, and {installed[package]} is installed; {again}"
            )


def check_device(calibration: Calibration, device: str, key: str) -> None:
    """Refuse a calibration of other hardware.

    Args:
        key: the setting that names the calibration, for the message.

    Raises:
        PlanError: if it does not hold for the device.
    """
    if device not in calibration.devices:
        raise PlanError(
            f"{key} was measured on {', '.join(calibration.devices)}, but the cluster has {device}; "
            "measure these devices with hflow profile, or set calibration=null for the shipped figures"
        )
