"""Generation engines, and device groups with their cyclic order. Plain state, no decisions."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from hflow.planner.ir import ScheduledNode
from hflow.runtime.state.evaluation import Evaluation
from hflow.runtime.state.weight_version import WeightCopy


class EngineState(enum.Enum):
    """What a generation engine was last told, and whether it confirmed."""

    ASLEEP = enum.auto()
    WAKING = enum.auto()
    AWAKE = enum.auto()
    DRAINING = enum.auto()
    """It is to stop once its samples are finished, and takes no fresh ones."""
    SLEEPING = enum.auto()


@dataclass(eq=False)
class Engine:
    """One generation replica."""

    name: str
    models: tuple[str, ...]
    """Trained models whose weights it is given: those of all streams that use it."""
    serves_rollout: bool
    """Whether the trained stream uses it."""
    evaluations: tuple[Evaluation, ...]
    """Side streams that use it."""
    is_separate: bool = False
    """Whether weights are published for it, as it shares no devices with whoever trains or infers."""
    copy: WeightCopy = field(default_factory=WeightCopy)
    """The versions of its weights."""
    state: EngineState = EngineState.ASLEEP
    is_publishing: bool = False
    """Whether the weights of its target are being published."""

    @property
    def version(self) -> int:
        """Version of its weights, -1 before the first."""
        return self.copy.version

    @property
    def target(self) -> int:
        """Version that it was given last, whether it has loaded it or not."""
        return self.copy.target

    @property
    def is_behind(self) -> bool:
        """Whether it was given weights that it has not loaded yet."""
        return self.copy.target != self.copy.version

    @property
    def is_held(self) -> bool:
        """Whether evaluation samples run on it, so that it keeps its weights and stays awake."""
        return any(evaluation.occupies_engines for evaluation in self.evaluations)

    @property
    def is_settled(self) -> bool:
        """Whether all that was told about it is confirmed."""
        at_rest = self.state in (EngineState.ASLEEP, EngineState.AWAKE, EngineState.DRAINING)
        return at_rest and not self.is_publishing

    @property
    def is_loading(self) -> bool:
        """Whether it takes new weights from those who train them, which must not change meanwhile."""
        return self.state is EngineState.WAKING and self.is_behind and not self.is_separate


@dataclass(eq=False)
class DeviceOrder:
    """One device group: its batch nodes fire in a fixed order, cycle after cycle.

    Where engines share the group, each cycle opens with their turn.
    """

    name: str
    nodes: tuple[ScheduledNode, ...]
    engines: tuple[Engine, ...] = ()
    cycle: int = 0
    """The step that the pointer is at."""
    in_turn: bool = True
    """Whether the pointer is before the cycle's nodes, where the generation turn is."""
    position: int = 0
    """Index in `nodes` of the next one, or of the running one."""
    running: ScheduledNode | None = None

    @property
    def next_node(self) -> ScheduledNode | None:
        """The node that the pointer is at, if the group is free for it."""
        if self.in_turn or self.running is not None or self.position == len(self.nodes):
            return None
        return self.nodes[self.position]

    def step_forward(self) -> None:
        """Move the pointer past a node, or past the turn."""
        if self.in_turn:
            self.in_turn = False
        else:
            self.position += 1

    def next_cycle(self) -> None:
        """Wrap around to the next step's turn."""
        self.cycle, self.position, self.in_turn = self.cycle + 1, 0, True
