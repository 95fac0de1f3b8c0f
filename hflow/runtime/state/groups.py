"""One group of samples from admission to acceptance.

Invariant: a node runs for a sample or group exactly once, at the moment when the last thing it waits for is
done. Every node keeps a countdown of these things; a refused member is subtracted from all countdowns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

from hflow.graph.ir import Level
from hflow.planner.plan.rows import ScheduledNode, ScheduledStream
from hflow.runtime.events import Instruction, RunGroup, RunSample
from hflow.runtime.state.snapshot import GroupSnapshot, MemberSnapshot

Emit = Callable[[Instruction], None]


class SampleDependencies:
    """The source, sample nodes and group nodes of one stream, and what each waits for. Never changes.

    A sample node waits once for each node it needs. A group node waits once for each group node it needs,
    and once per member for each sample node it needs. A node without needs waits for the source.

    Attributes:
        sample_dependents: source, sample or group node -> sample nodes that need it.
        group_dependents: source, sample or group node -> group nodes that need it.
        sample_countdowns: sample node -> its countdown at the start.
        group_countdowns: group node -> its countdown at the start, in a full group.
        member_needs: group node -> those of its needs that are counted once per member.
        num_member_tasks: tasks of one member (the source and the sample nodes).
        num_tasks: tasks after which a full group is accepted.
    """

    def __init__(self, stream: ScheduledStream, nodes: Sequence[ScheduledNode]) -> None:
        self.stream = stream.name
        self.source = stream.source
        self.size = stream.group_size
        nodes = [node for node in nodes if node.stream == stream.name and node.level is not Level.BATCH]
        self.levels = {node.name: node.level for node in nodes}
        needs = {node.name: tuple(dict.fromkeys(node.needs)) or (stream.source,) for node in nodes}
        known = {stream.source, *self.levels}
        for name, names in needs.items():
            assert known.issuperset(names), f"{name} needs {sorted(set(names) - known)}, not of its stream"

        samples = [name for name, level in self.levels.items() if level is Level.SAMPLE]
        groups = [name for name, level in self.levels.items() if level is Level.GROUP]
        per_member = {stream.source, *samples}
        self.sample_dependents = {name: tuple(n for n in samples if name in needs[n]) for name in known}
        self.group_dependents = {name: tuple(n for n in groups if name in needs[n]) for name in known}
        self.sample_countdowns = {name: len(needs[name]) for name in samples}
        self.member_needs = {name: tuple(n for n in needs[name] if n in per_member) for name in groups}
        self.group_countdowns = {
            name: len(needs[name]) + (self.size - 1) * len(self.member_needs[name]) for name in groups
        }
        self.num_member_tasks = 1 + len(samples)
        self.num_tasks = self.size * self.num_member_tasks + len(groups)


class Member:
    """A sample that is still part of its group. Members share their sets, as there are many of them."""

    __slots__ = ("countdowns", "done", "generating", "oldest", "running")

    def __init__(self, dependencies: SampleDependencies) -> None:
        self.countdowns = dependencies.sample_countdowns.copy()
        self.generating = True
        self.running: frozenset[str] = frozenset()
        self.done: frozenset[str] = frozenset()
        self.oldest = -1


@cache
def with_name(names: frozenset[str], name: str) -> frozenset[str]:
    """Return names with one more."""
    return names | {name}


@cache
def without_name(names: frozenset[str], name: str) -> frozenset[str]:
    """Return names without one."""
    return names - {name}


class Group:
    """The members and countdowns of one group.

    Attributes:
        was_accepted: whether an earlier part of the run had accepted it.
    """

    __slots__ = (
        "_dependencies",
        "_emit",
        "countdowns",
        "done",
        "members",
        "number",
        "running",
        "tasks_left",
        "was_accepted",
    )

    def __init__(self, number: int, dependencies: SampleDependencies, emit: Emit) -> None:
        self._dependencies = dependencies
        self._emit = emit
        self.number = number
        first = number * dependencies.size
        self.members = {sample: Member(dependencies) for sample in range(first, first + dependencies.size)}
        self.countdowns = dependencies.group_countdowns.copy()
        self.running: set[str] = set()
        self.done: set[str] = set()
        self.tasks_left = dependencies.num_tasks
        self.was_accepted = False

    @property
    def has_running_nodes(self) -> bool:
        """Whether a sample or group node works on this group."""
        return bool(self.running) or any(member.running for member in self.members.values())

    def finish_sample_task(self, sample: int, name: str) -> None:
        """Record that the source or a sample node is done for one member; run what waited for it."""
        member = self.members[sample]
        member.done = with_name(member.done, name)
        self.tasks_left -= 1
        for node in self._dependencies.sample_dependents[name]:
            self._count_down_sample(sample, member, node)
        for node in self._dependencies.group_dependents[name]:
            self._count_down_group(node, 1)

    def finish_group_task(self, name: str) -> None:
        """Record that a group node is done; run what waited for it."""
        self.done.add(name)
        self.tasks_left -= 1
        for node in self._dependencies.sample_dependents[name]:
            for sample, member in self.members.items():
                self._count_down_sample(sample, member, node)
        for node in self._dependencies.group_dependents[name]:
            self._count_down_group(node, 1)

    def snapshot(self, *, is_accepted: bool) -> GroupSnapshot:
        """Return the group as plain values."""
        members = tuple(
            MemberSnapshot(sample, member.oldest, tuple(sorted(member.done)))
            for sample, member in self.members.items()
        )
        return GroupSnapshot(self.number, members, tuple(sorted(self.done)), is_accepted)

    def restore(self, snapshot: GroupSnapshot) -> None:
        """Do again, in a new group, what was done in a snapshot's; run the nodes that are not done.

        These may be nodes that the recipe did not have then. Those that it has no more are ignored.
        """
        levels, source = self._dependencies.levels, self._dependencies.source
        self.was_accepted = snapshot.is_accepted
        emit, self._emit = self._emit, lambda instruction: None
        remaining = {member.sample: member for member in snapshot.members}
        for sample in self.members.keys() - remaining.keys():
            self.forget(self.members.pop(sample))
        for sample, past in remaining.items():
            member = self.members[sample]
            member.oldest, member.generating = past.oldest, source not in past.done
            for name in past.done:
                if name == source or levels.get(name) is Level.SAMPLE:
                    self.finish_sample_task(sample, name)
        for name in snapshot.done:
            if levels.get(name) is Level.GROUP:
                self.finish_group_task(name)
        self._emit = emit
        for sample, member in self.members.items():
            member.running -= member.done
            for node in sorted(member.running):
                emit(RunSample(node, sample))
        self.running -= self.done
        for node in sorted(self.running):
            emit(RunGroup(node, self.number, tuple(self.members)))

    def forget(self, member: Member) -> None:
        """Subtract a member that was taken out of `members` from all countdowns."""
        self.tasks_left -= self._dependencies.num_member_tasks - len(member.done)
        for node, needs in self._dependencies.member_needs.items():
            num_missing = sum(need not in member.done for need in needs)
            if num_missing:
                self._count_down_group(node, num_missing)

    def _count_down_sample(self, sample: int, member: Member, node: str) -> None:
        member.countdowns[node] -= 1
        if member.countdowns[node] == 0:
            member.running = with_name(member.running, node)
            self._emit(RunSample(node, sample))

    def _count_down_group(self, node: str, count: int) -> None:
        self.countdowns[node] -= count
        if self.countdowns[node] == 0:
            self.running.add(node)
            self._emit(RunGroup(node, self.number, tuple(self.members)))
