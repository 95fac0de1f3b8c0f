"""One group of samples on its way from admission to acceptance."""

from __future__ import annotations

from collections.abc import Callable

from hflow.runtime.events import Instruction, RunGroup, RunSample
from hflow.runtime.sample_graph import SampleGraph

Emit = Callable[[Instruction], None]


class Member:
    """A sample that its group has not lost."""

    __slots__ = ("done", "generating", "oldest", "running", "waits")

    def __init__(self, graph: SampleGraph) -> None:
        self.waits = graph.sample_waits.copy()
        self.generating = True
        self.running: set[str] = set()
        self.done: set[str] = set()
        self.oldest = -1


class Group:
    """Countdowns of one group. It emits each node at the moment when nothing holds it any more."""

    __slots__ = ("_emit", "_graph", "members", "number", "running", "tasks_left", "waits")

    def __init__(self, number: int, graph: SampleGraph, emit: Emit) -> None:
        self._graph = graph
        self._emit = emit
        self.number = number
        first = number * graph.size
        self.members = {sample: Member(graph) for sample in range(first, first + graph.size)}
        self.waits = graph.group_waits.copy()
        self.running: set[str] = set()
        self.tasks_left = graph.num_tasks

    @property
    def has_running_nodes(self) -> bool:
        """Whether a sample or group node is at work on this group."""
        return bool(self.running) or any(member.running for member in self.members.values())

    def finish_sample_task(self, sample: int, name: str) -> None:
        """The source or a sample node is done for one member."""
        member = self.members[sample]
        member.done.add(name)
        self.tasks_left -= 1
        for node in self._graph.sample_followers[name]:
            self._release_sample(sample, member, node)
        for node in self._graph.group_followers[name]:
            self._release_group(node, 1)

    def finish_group_task(self, name: str) -> None:
        """A group node is done."""
        self.tasks_left -= 1
        for node in self._graph.sample_followers[name]:
            for sample, member in self.members.items():
                self._release_sample(sample, member, node)
        for node in self._graph.group_followers[name]:
            self._release_group(node, 1)

    def forget(self, member: Member) -> None:
        """A member was taken out of `members`: nothing waits for it any longer."""
        self.tasks_left -= self._graph.num_member_tasks - len(member.done)
        for node, needs in self._graph.member_needs.items():
            missing = sum(need not in member.done for need in needs)
            if missing:
                self._release_group(node, missing)

    def _release_sample(self, sample: int, member: Member, node: str) -> None:
        member.waits[node] -= 1
        if member.waits[node] == 0:
            member.running.add(node)
            self._emit(RunSample(node, sample))

    def _release_group(self, node: str, count: int) -> None:
        self.waits[node] -= count
        if self.waits[node] == 0:
            self.running.add(node)
            self._emit(RunGroup(node, self.number, tuple(self.members)))
