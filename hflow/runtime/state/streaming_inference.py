"""Stations: devices on which a model works on samples and groups as they arrive.

A reward model before a `keep` cannot wait for a batch. What arrives for it waits at the station of its
devices; whenever the station is free, all that waits for one node goes through the model together. So
micro-batches are as large as the model is slow, and all ranks of the replica are told the same things in
the same order, one at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from hflow.graph.ir import Level
from hflow.planner.ir import Schedule
from hflow.runtime.events import Instruction, RunGroup, RunSample, RunStreamingInference
from hflow.runtime.state.groups import Emit
from hflow.runtime.state.stream_state import StreamState

Key = tuple[str, int]
"""A node, and the sample or group that it works on."""


@dataclass(eq=False)
class StreamingReplica:
    """One device group that no batch node and no engine uses."""

    name: str
    waiting: deque[Key] = field(default_factory=deque)
    """In order of arrival; what was refused meanwhile is passed over when its turn comes."""
    running: set[Key] = field(default_factory=set)
    num_fired: int = 0


class StreamingReplicas:
    """All stations of a run.

    Args:
        schedule: nodes of samples and groups that have a device group run at its station.
        emit: takes instructions.
    """

    def __init__(self, schedule: Schedule, emit: Emit) -> None:
        self._emit = emit
        placed = [node for node in schedule.nodes if node.level is not Level.BATCH and node.group]
        self.all = {node.group: StreamingReplica(node.group) for node in placed if node.group}
        self._at = {node.name: self.all[node.group] for node in placed if node.group}
        trained = schedule.streams[0]
        num_groups = trained.batch or 1
        sizes = {Level.GROUP: num_groups, Level.SAMPLE: num_groups * trained.group_size}
        self._most = {node.name: sizes[node.level] for node in placed}
        """Node -> most samples or groups at once: those of a batch."""

    @property
    def nodes(self) -> frozenset[str]:
        """The nodes that run at stations."""
        return frozenset(self._at)

    def pass_on(self, instruction: Instruction) -> None:
        """Emit what streams emit, but nodes that have a station wait there."""
        match instruction:
            case RunSample(node, key) | RunGroup(node, key) if node in self._at:
                self._at[node].waiting.append((node, key))
            case _:
                self._emit(instruction)

    def done(self, node: str, key: int) -> None:
        """A node reports on a sample or group."""
        if (station := self._at.get(node)) is not None:
            assert (node, key) in station.running, f"{node} does not run for {key}"
            station.running.remove((node, key))

    def fire(self, stream_of: Mapping[str, StreamState]) -> None:
        """Let every free station begin with what waits there."""
        for station in self.all.values():
            while station.waiting and not station.running:
                self._begin(station, stream_of)

    def clear(self, stream_of: Mapping[str, StreamState]) -> None:
        """Nothing new is to start: give up what waits."""
        for station in self.all.values():
            for node, key in station.waiting:
                stream_of[node].discard_node(node, key)
            station.waiting.clear()

    def _begin(self, station: StreamingReplica, stream_of: Mapping[str, StreamState]) -> None:
        """Fire the node that waits longest, on all that waits for it."""
        node = station.waiting[0][0]
        keys: list[int] = []
        samples: list[int] = []
        others: deque[Key] = deque()
        for name, key in station.waiting:
            if name != node or len(keys) == self._most[node]:
                others.append((name, key))
            elif stream_of[node].is_orphan(node, key):
                stream_of[node].discard_node(node, key)
            else:
                keys.append(key)
                samples += stream_of[node].samples_of(node, key)
        station.waiting = others
        if keys:
            station.running = {(node, key) for key in keys}
            self._emit(RunStreamingInference(node, station.num_fired, tuple(keys), tuple(samples)))
            station.num_fired += 1
