"""One group of samples on its way from admission to acceptance."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hflow.graph.ir import Level
from hflow.planner.ir import ScheduledNode, ScheduledStream
from hflow.runtime.events import Instruction, RunGroup, RunSample

# -------------------- What becomes ready when a node of one stream is done for a sample or a group.
# Static tables.


class SampleDependencies:
    """The source, sample and group nodes of one stream, compiled into countdowns.

    A node starts with the number of completions that it waits for and fires at zero. A group
    node waits for every sample-level need once a member; a sample node waits once for each need.
    A node that needs nothing waits for the source, before which there is no sample.

    Attributes:
        sample_followers: source, sample or group node -> sample nodes that need it.
        group_followers: source, sample or group node -> group nodes that need it.
        sample_waits: sample node -> its countdown.
        group_waits: group node -> its countdown in a full group.
        member_needs: group node -> its needs that are counted once a member.
        num_member_tasks: completions that one member brings (the source and the sample nodes).
        num_tasks: completions after which a full group is accepted.
    """

    def __init__(self, stream: ScheduledStream, nodes: Sequence[ScheduledNode]) -> None:
        self.stream = stream.name
        self.source = stream.source
        self.size = stream.group_size
        mine = [node for node in nodes if node.stream == stream.name and node.level is not Level.BATCH]
        self.levels = {node.name: node.level for node in mine}
        needs = {node.name: tuple(dict.fromkeys(node.needs)) or (stream.source,) for node in mine}
        known = {stream.source, *self.levels}
        for name, names in needs.items():
            assert known.issuperset(names), f"{name} needs {sorted(set(names) - known)}, not of its stream"

        samples = [name for name, level in self.levels.items() if level is Level.SAMPLE]
        groups = [name for name, level in self.levels.items() if level is Level.GROUP]
        per_member = {stream.source, *samples}
        self.sample_followers = {name: tuple(n for n in samples if name in needs[n]) for name in known}
        self.group_followers = {name: tuple(n for n in groups if name in needs[n]) for name in known}
        self.sample_waits = {name: len(needs[name]) for name in samples}
        self.member_needs = {name: tuple(n for n in needs[name] if n in per_member) for name in groups}
        self.group_waits = {
            name: len(needs[name]) + (self.size - 1) * len(self.member_needs[name]) for name in groups
        }
        self.num_member_tasks = 1 + len(samples)
        self.num_tasks = self.size * self.num_member_tasks + len(groups)


Emit = Callable[[Instruction], None]


class Member:
    """A sample that its group has not lost."""

    __slots__ = ("done", "generating", "oldest", "running", "waits")

    def __init__(self, graph: SampleDependencies) -> None:
        self.waits = graph.sample_waits.copy()
        self.generating = True
        self.running: set[str] = set()
        self.done: set[str] = set()
        self.oldest = -1


class Group:
    """Countdowns of one group. It emits each node at the moment when nothing holds it any more."""

    __slots__ = ("_emit", "_graph", "members", "number", "running", "tasks_left", "waits")

    def __init__(self, number: int, graph: SampleDependencies, emit: Emit) -> None:
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
