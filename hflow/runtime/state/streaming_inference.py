"""Models that work on samples and groups as they arrive, on devices of their own.

A reward model whose `keep` decides on a sample cannot wait for a batch. Its samples wait in a queue of its
devices. Whenever the devices are free, all that waits for one node goes through the model together. So the
slower the model is, the larger are its micro-batches. Models with common devices share a queue.

Invariant: a replica runs one node at a time, and all its ranks get the same samples in the same order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from hflow.graph.ir import Level
from hflow.planner.plan.rows import Schedule
from hflow.planner.plan.schedule import streaming_queues
from hflow.runtime.events import Instruction, RunGroup, RunSample, RunStreamingInference
from hflow.runtime.state.groups import Emit
from hflow.runtime.state.stream_state import StreamState

NodeKey = tuple[str, int]
"""A node, and the sample or group that it works on."""


@dataclass(eq=False)
class StreamingReplica:
    """The queue of device groups that no batch node and no engine uses."""

    name: str
    waiting: deque[NodeKey] = field(default_factory=deque)
    """In order of arrival. What was refused meanwhile is skipped when its turn comes."""
    running: set[NodeKey] = field(default_factory=set)
    num_runs: int = 0


class StreamingReplicas:
    """The queues of all device groups that run models on arriving samples.

    They are the queues of sample and group nodes that have a device group (`streaming_queues`).

    Attributes:
        queues: the queues by name.
    """

    def __init__(self, schedule: Schedule, emit: Emit) -> None:
        self._emit = emit
        nodes_of = streaming_queues(schedule)
        self.queues = {name: StreamingReplica(name) for name, _ in nodes_of}
        self._replica_of = {node.name: self.queues[name] for name, nodes in nodes_of for node in nodes}
        trained = schedule.streams[0]
        num_groups = trained.batch or schedule.settings.max_concurrent
        max_keys = {Level.GROUP: num_groups, Level.SAMPLE: num_groups * trained.group_size}
        self._max_keys = {node.name: max_keys[node.level] for _, nodes in nodes_of for node in nodes}
        """Node -> most samples or groups that it runs on at once: those of a batch."""

    @property
    def nodes(self) -> frozenset[str]:
        """The nodes that are queued here."""
        return frozenset(self._replica_of)

    def num_runs(self) -> tuple[tuple[str, int], ...]:
        """Return the number of times that a model has run from each queue."""
        return tuple((name, replica.num_runs) for name, replica in self.queues.items())

    def restore(self, num_runs: Iterable[tuple[str, int]]) -> None:
        """Continue to count from what `num_runs` returned."""
        for name, number in num_runs:
            if name in self.queues:
                self.queues[name].num_runs = number

    def emit_or_queue(self, instruction: Instruction) -> None:
        """Emit a stream's instruction, or queue it if it runs a node with a queue."""
        match instruction:
            case RunSample(node, key) | RunGroup(node, key) if node in self._replica_of:
                self._replica_of[node].waiting.append((node, key))
            case _:
                self._emit(instruction)

    def done(self, node: str, key: int) -> None:
        """Record that a node is done with a sample or group; other nodes are ignored."""
        if (replica := self._replica_of.get(node)) is not None:
            assert (node, key) in replica.running, f"{node} does not run for {key}"
            replica.running.remove((node, key))

    def run_waiting(self, stream_of: Mapping[str, StreamState]) -> None:
        """Let every free replica run what waits."""
        for replica in self.queues.values():
            while replica.waiting and not replica.running:
                self._run_next(replica, stream_of)

    def clear(self, stream_of: Mapping[str, StreamState]) -> None:
        """Discard what waits, in a run that is stopping."""
        for replica in self.queues.values():
            for node, key in replica.waiting:
                stream_of[node].discard_node(node, key)
            replica.waiting.clear()

    def _run_next(self, replica: StreamingReplica, stream_of: Mapping[str, StreamState]) -> None:
        """Run the node that waits longest, on all that waits for it."""
        node = replica.waiting[0][0]
        stream = stream_of[node]
        keys: list[int] = []
        samples: list[int] = []
        still_waiting: deque[NodeKey] = deque()
        for name, key in replica.waiting:
            if name != node or len(keys) == self._max_keys[node]:
                still_waiting.append((name, key))
            elif stream.is_orphan(node, key):
                stream.discard_node(node, key)
            else:
                keys.append(key)
                samples += stream.samples_of(node, key)
        replica.waiting = still_waiting
        if keys:
            replica.running = {(node, key) for key in keys}
            self._emit(RunStreamingInference(node, replica.num_runs, tuple(keys), tuple(samples)))
            replica.num_runs += 1
