"""Generation engines, and device groups with the order of their batch nodes.

This module holds state only; `batch_nodes` and `weight_updates` decide how it changes. Invariants: a device
group that engines share runs no batch node while one of them is not asleep; a node on several groups runs on
all of them at once, in the same cycle.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from hflow.planner.plan.rows import ScheduledNode
from hflow.runtime.state.evaluation import Evaluation
from hflow.runtime.state.rules import EngineWeights


class EnginePhase(enum.Enum):
    """What an engine does, as far as it has been confirmed."""

    ASLEEP = enum.auto()
    WAKING = enum.auto()
    """`Wake` was sent and not confirmed yet."""
    AWAKE = enum.auto()
    DRAINING = enum.auto()
    """Awake, but it takes no new samples and sleeps when the last one is finished."""
    FALLING_ASLEEP = enum.auto()
    """`Sleep` was sent and not confirmed yet."""


@dataclass(eq=False)
class EngineState:
    """One generation replica."""

    name: str
    models: tuple[str, ...]
    """Trained models whose weights it receives: those of all streams that use it."""
    serves_trained_stream: bool
    evaluations: tuple[Evaluation, ...]
    """Side streams that use it."""
    is_separate: bool = False
    """Whether weights are published for it, because it shares no devices with nodes that train or infer."""
    weights: EngineWeights = field(default_factory=EngineWeights)
    phase: EnginePhase = EnginePhase.ASLEEP
    is_publishing: bool = False
    """Whether `Publish` was sent for its target version and not confirmed yet."""
    has_dropped_weights: bool = False
    """Whether it sleeps without its weights, so that it loads others when it wakes."""
    is_lost: bool = False
    """Whether its worker has failed, and it has not been started again yet. It counts as asleep."""

    @property
    def version(self) -> int:
        """Version of its weights, -1 before the first."""
        return self.weights.version

    @property
    def target(self) -> int:
        """Version that it was given last, loaded or not."""
        return self.weights.target

    @property
    def has_pending_weights(self) -> bool:
        """Whether it was given weights that it has not loaded yet."""
        return self.weights.target != self.weights.version

    @property
    def is_evaluating(self) -> bool:
        """Whether evaluation samples run on it, so that it must keep its weights and stay awake."""
        return any(evaluation.occupies_engines for evaluation in self.evaluations)

    @property
    def is_confirmed(self) -> bool:
        """Whether every instruction about it has been confirmed."""
        is_stable = self.phase in (EnginePhase.ASLEEP, EnginePhase.AWAKE, EnginePhase.DRAINING)
        return is_stable and not self.is_publishing

    @property
    def is_loading(self) -> bool:
        """Whether it reads new weights from the devices that train them; nodes must not change them now."""
        return self.phase is EnginePhase.WAKING and self.has_pending_weights and not self.is_separate


@dataclass(eq=False)
class DeviceTurns:
    """One device group and a pointer into the fixed order of its batch nodes, cycle after cycle.

    If engines share the group, each cycle begins with their generation turn. A node on several groups has a
    place in the order of each.
    """

    name: str
    nodes: tuple[ScheduledNode, ...]
    engines: tuple[EngineState, ...] = ()
    cycle: int = 0
    """The step that the pointer is at."""
    in_turn: bool = True
    """Whether the pointer is at the generation turn, before the cycle's nodes."""
    position: int = 0
    """Index in `nodes` of the next node, or of the running one."""
    running: ScheduledNode | None = None

    @property
    def next_node(self) -> ScheduledNode | None:
        """The node at the pointer, if the group is free to run it."""
        if self.in_turn or self.running is not None or self.position == len(self.nodes):
            return None
        return self.nodes[self.position]

    def step_forward(self) -> None:
        """Move the pointer past a node, or past the generation turn."""
        if self.in_turn:
            self.in_turn = False
        else:
            self.position += 1

    def next_cycle(self) -> None:
        """Move the pointer to the beginning of the next step."""
        self.cycle, self.position, self.in_turn = self.cycle + 1, 0, True
