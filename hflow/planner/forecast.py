"""The part of a plan that is estimated: bytes held, bytes moved, seconds, the period.

Values only. They decide nothing in a run and are no part of the digest; but what does not fit by
them is refused before anything starts.
"""

from __future__ import annotations

from dataclasses import dataclass

from hflow.planner.workload import Workload

Parts = tuple[tuple[str, int], ...]
"""Named bytes, as (name, bytes)."""


@dataclass(frozen=True)
class PhaseMemory:
    """Memory of devices that are alike, in one phase of a step."""

    group: str
    devices: tuple[int, ...]
    """Devices with exactly these bytes."""
    phase: str
    """`generate`, `wake` (weights on their way to an engine), or the batch node that runs."""
    resident: Parts
    """What stays whichever phase it is, as (`actor@train weights`, bytes)."""
    transient: Parts
    """What the phase itself needs at its peak, as (`activations`, bytes)."""

    @property
    def total(self) -> int:
        """Bytes at the phase's peak."""
        return sum(size for _, size in (*self.resident, *self.transient))


@dataclass(frozen=True)
class NodeTime:
    """Seconds of one firing of a node (a source: of one whole batch), and what they consist of."""

    node: str
    seconds: float
    parts: tuple[tuple[str, float], ...]
    """Named seconds that add up to the whole, as (`forward`, 1.2), (`all-gather`, 0.1)."""
    limit: str
    """What bounds the largest part: `compute`, `memory bandwidth`, `network`, `latency`, `disk`."""


@dataclass(frozen=True)
class Pace:
    """How fast engines draw responses one by one, such that a batch takes its source's seconds."""

    slots: int
    """Responses that are drawn at once, over all engines."""
    seconds_per_token: float
    """Of one response, while the slots are full; its prompt's share is spread over its tokens."""


@dataclass(frozen=True)
class StepTraffic:
    """One collective step of an edge's redistribution, on a sample batch."""

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
    """Bytes that a batch node's inputs move, on a batch with sampled lengths."""

    consumer: str
    num_bytes: int
    lower_bound: int
    """Bytes that any split of equal balance must move."""
    local_bytes: int
    """Bytes that the node reads where they lie already."""
    imbalance: float
    """Tokens of the heaviest dp rank over the mean; of a train node, whose minibatches each wait for the
    heaviest, of all minibatches together."""
    steps: tuple[StepTraffic, ...]
    """The largest ones first, at most 16."""
    num_steps: int
    """All collective steps."""
    num_node_bytes: int = 0
    """Bytes among `num_bytes` that cross machines."""
    busiest_bytes: int = 0
    """Bytes that the busiest worker sends or receives, whichever is more."""


@dataclass(frozen=True)
class CycleStep:
    """One arc of the critical cycle: a node takes its seconds, then the edge leads on."""

    node: str
    seconds: float
    why: str
    """The edge to the next node in words: `data`, `weights of actor`, `order of group all`, ..."""
    lag: int
    """Steps that the edge crosses."""


@dataclass(frozen=True)
class Slot:
    """When one node (or engine turn) runs in the steady state."""

    node: str
    lane: str
    """The device group, or the engine's name where it has devices of its own."""
    start: float
    """Seconds after the period's start; may be larger than the period."""
    seconds: float
    step: int = 0
    """To which of the period's `num_steps` steps it belongs."""


@dataclass(frozen=True)
class Period:
    """The steady state: seconds a step, and what they are bound by."""

    seconds: float
    """Maximum over all cycles of (seconds on the cycle / steps that it crosses)."""
    cycle: tuple[CycleStep, ...]
    """The cycle that reaches it: what has to become faster."""
    slots: tuple[Slot, ...]
    idle: tuple[tuple[str, float], ...]
    """Device group, or engine with devices of its own -> share of the period in which none of them work."""
    num_steps: int = 1
    """Steps that `slots` cover, after which they repeat: more than one where nodes do not fire in every
    step, or engines take weights every few steps."""


@dataclass(frozen=True)
class Forecast:
    """All estimates of one plan."""

    workload: tuple[tuple[str, Workload], ...]
    """Root stream -> lengths."""
    memory: tuple[PhaseMemory, ...]
    times: tuple[NodeTime, ...]
    period: Period | None
    traffic: tuple[EdgeTraffic, ...]
    missing: tuple[str, ...] = ()
    """What could not be estimated, and why, a line each."""
    layouts: tuple[tuple[str, str], ...] = ()
    """Replica whose layout nobody asked for -> why it has the one that it has."""
    pace: Pace | None = None
    """Of the trained stream; None where it is not generated, or its models' sizes are unknown."""

    def peak(self, device: int) -> PhaseMemory | None:
        """The phase in which a device holds most."""
        phases = [phase for phase in self.memory if device in phase.devices]
        return max(phases, key=lambda phase: phase.total, default=None)
