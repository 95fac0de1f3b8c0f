"""The rows of a forecast: estimates of memory, traffic, seconds and the period of a plan.

They are not part of the digest, since a run does not read them. Estimated memory decides two things before
anything starts: the layouts that the user left open, and whether the plan is refused because it does not fit.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

from hflow.planner.plan.workload import Workload
from hflow.shapes.model_shape import LEFT_OUT_BY_DEFAULT


class MemoryCategory(StrEnum):
    """A use of memory. Reports give each category a colour and a letter, in this order."""

    WEIGHTS = "weights"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"
    ACTIVATIONS = "activations"
    LOGITS = "logits"
    KV_CACHE = "KV cache"
    BUFFERS = "buffers"
    """What collectives, weight transfers and the backward pass of a layer use for a moment."""
    RUNTIME = "runtime"
    """The runtime of the device, and what nodes keep there (`NodeType.memory`)."""


class MemoryItem(NamedTuple):
    """Named bytes of a device."""

    name: str
    num_bytes: int
    category: MemoryCategory


@dataclass(frozen=True)
class PhaseMemory:
    """Memory of a set of devices with equal contents, in one phase of a step."""

    group: str
    devices: tuple[int, ...]
    """Devices that hold exactly these bytes."""
    phase: str
    """`generate`, `wake` (an engine takes new weights), or the name of the batch node that runs."""
    resident: tuple[MemoryItem, ...]
    """Items that the device holds in all phases, such as `actor@train weights`."""
    transient: tuple[MemoryItem, ...]
    """Items that only this phase needs, at its peak, such as `activations`."""

    @property
    def total(self) -> int:
        """Bytes at the phase's peak."""
        return sum(item.num_bytes for item in (*self.resident, *self.transient))


@dataclass(frozen=True)
class HostMemory:
    """Memory of machines with equal contents, besides that of their devices."""

    machines: tuple[int, ...]
    items: tuple[MemoryItem, ...]
    """Bytes that may be there at the same time."""
    capacity: int | None
    """Memory of a machine; None: unknown."""

    @property
    def total(self) -> int:
        """Bytes of all items."""
        return sum(item.num_bytes for item in self.items)


@dataclass(frozen=True)
class NodeTime:
    """Seconds that a node takes for one batch, and what they consist of."""

    node: str
    seconds: float
    parts: tuple[tuple[str, float], ...]
    """Named seconds that add up to `seconds`, as (`forward`, 1.2), (`all-gather`, 0.1)."""
    limit: str
    """The limit of most of the seconds: `compute`, `memory bandwidth`, `network`, `latency`, `host` or
    `disk`."""


@dataclass(frozen=True)
class Pace:
    """Speed of generation sample by sample."""

    slots: int
    """Responses that are generated at once, over all engines."""
    seconds_per_token: float
    """Seconds per token of one response while all slots are used; the prompt's time is spread over the
    response's tokens."""
    steps: tuple[tuple[int, float], ...] = ()
    """Number of responses that run -> seconds per token of each, ascending up to `slots`. Empty: all numbers
    are equally fast."""
    seconds_per_sample: float = 0.0
    """Seconds of each response beside its tokens, which its node type states."""

    def speed(self, num_running: float) -> float:
        """Return the speed-up of a response while fewer than all slots are used.

        Between two numbers the larger one counts, so that the speed changes in few steps.
        """
        for num, seconds in self.steps:
            if num_running <= num:
                return self.seconds_per_token / seconds
        return 1.0


@dataclass(frozen=True)
class StepTraffic:
    """One collective step of a redistribution, for a batch with sampled lengths."""

    kind: str
    """`bcast`, `gather` or `scatter`."""
    root: int
    sources: tuple[int, ...]
    destinations: tuple[int, ...]
    num_samples: int
    fields: tuple[str, ...]
    num_bytes: int


@dataclass(frozen=True)
class EdgeTraffic:
    """Bytes that the inputs of a node move, for a batch with sampled lengths."""

    consumer: str
    num_bytes: int
    lower_bound: int
    """Bytes that any equally balanced split must move."""
    local_bytes: int
    """Bytes that the node reads without moving them."""
    imbalance: float
    """Tokens of the heaviest dp rank over the mean. Each minibatch of a train node waits for its heaviest
    rank, so there these tokens are summed over the minibatches."""
    steps: tuple[StepTraffic, ...]
    """The largest first, at most 16."""
    num_steps: int
    """Number of collective steps, listed or not."""
    num_node_bytes: int = 0
    """The part of `num_bytes` that crosses machines."""
    busiest_bytes: int = 0
    """Bytes that the busiest worker sends or receives, whichever is more."""
    scale: int = 1
    """Number of machines that each machine of the estimate represents: it left out the others, with their
    part of the batch, and multiplied the bytes. 1: nothing was left out."""


@dataclass(frozen=True)
class CycleStep:
    """One part of the critical cycle: a node, and the edge to the next node."""

    node: str
    seconds: float
    why: str
    """The edge to the next node as text: `data`, `weights of actor`, `order of group all`, ..."""
    lag: int
    """Steps that the edge crosses."""


@dataclass(frozen=True)
class Slot:
    """When one node, or one turn of an engine, runs in the steady state."""

    node: str
    lane: str
    """The device group, or the engine's name if it has its own devices."""
    start: float
    """Seconds after the period's start; may exceed the period."""
    seconds: float
    step: int = 0
    """The index of its step among the period's `num_steps` steps."""


@dataclass(frozen=True)
class Period:
    """The steady state of a schedule: seconds per step, and what limits them."""

    seconds: float
    """Seconds per step: the maximum over all cycles of (seconds on the cycle / steps that it crosses)."""
    cycle: tuple[CycleStep, ...]
    """The critical cycle, which reaches this maximum: only making it faster shortens the period."""
    slots: tuple[Slot, ...]
    idle: tuple[tuple[str, float], ...]
    """Device group, or engine with its own devices -> fraction of a step in which it is idle."""
    num_steps: int = 1
    """Steps that `slots` cover before they repeat: more than one if nodes do not fire in every step, or
    engines take weights only every few steps."""
    simulated: float | None = field(default=None, metadata=LEFT_OUT_BY_DEFAULT)
    """Seconds of a step that the state machine takes where `seconds` leaves out waiting for late responses.
    Idle shares are of these then."""


class SimulatedStep(NamedTuple):
    """A step in the steady state that the state machine reaches on the virtual clock."""

    seconds: float
    idle: tuple[tuple[str, float], ...]
    """Idle devices, as rows of `Period.idle`."""


@dataclass(frozen=True)
class Candidate:
    """A plan that the search for a placement compared with others."""

    placement: str
    """Devices and layouts, as the setting `placement`."""
    settings: tuple[tuple[str, Any], ...]
    """Settings that the search changed, by their key in the configuration."""
    seconds: float
    """Estimated seconds of a step."""
    memory_bytes: int
    """Bytes of the fullest device in the phase that needs most."""
    why: str
    """Which replicas share devices, how much slower than the best that is, and what the step waits for."""


@dataclass(frozen=True)
class Remedy:
    """Settings with which a step is shorter; they have been tried."""

    settings: tuple[tuple[str, Any], ...]
    """Key of the configuration -> its value."""
    gain: float
    """Share of a step that they save."""


@dataclass(frozen=True)
class Limit:
    """Something that makes a step longer than necessary."""

    cause: str
    """A clause, such as `actor@gen is idle for 75 % of a step`."""
    remedies: tuple[Remedy, ...]
    """Empty: none of those that were tried shortens a step noticeably."""
    idle: tuple[str, ...] = ()
    """Device groups, or engines with devices of their own, that the remedies would use."""


@dataclass(frozen=True)
class Forecast:
    """All estimates of one plan."""

    workload: tuple[tuple[str, Workload], ...] = ()
    """Root stream -> lengths of its samples."""
    memory: tuple[PhaseMemory, ...] = ()
    times: tuple[NodeTime, ...] = ()
    period: Period | None = None
    traffic: tuple[EdgeTraffic, ...] = ()
    missing: tuple[str, ...] = ()
    """The figures that could not be estimated, with the reason, one line each."""
    layouts: tuple[tuple[str, str], ...] = ()
    """Replica whose layout the planner chose -> the reason for the choice."""
    backend: str = ""
    """The training backend that the planner chose where models leave it open, with the reason; else empty."""
    candidates: tuple[Candidate, ...] = ()
    """The placements that the search compared, the chosen plan first; empty if nothing was searched."""
    limits: tuple[Limit, ...] = ()
    """Causes of a step longer than necessary. Empty unless `compile_plan` is called with `with_limits`."""
    pace: Pace | None = None
    """Pace of the trained stream; None if it is not generated, or the sizes of its models are unknown."""
    host: tuple[HostMemory, ...] = ()
    """The items in the memory of machines; empty on CPUs, where it is the memory of the devices."""

    def peaks(self) -> dict[int, PhaseMemory]:
        """Return the phase in which each device holds most; devices without phases are left out."""
        fullest: dict[int, PhaseMemory] = {}
        for phase in sorted(self.memory, key=lambda phase: -phase.total):
            for device in phase.devices:
                fullest.setdefault(device, phase)
        return fullest
