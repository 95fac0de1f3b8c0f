"""A root stream: groups open, their samples finish, their nodes run, and they are accepted or refused.

What happens to accepted and refused groups differs between the trained stream (`rollout`) and
side streams (`evaluation`), which override the hooks at the end of `StreamState`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from hflow.graph.ir import Level
from hflow.planner.ir import ScheduledNode, ScheduledStream
from hflow.runtime.events import OpenGroup, Refusal, Refuse
from hflow.runtime.state.groups import Emit, Group, Member, SampleDependencies


class StreamState:
    """Groups of one stream between admission and acceptance.

    Attributes:
        groups: open groups by id.
        num_generating: samples whose source has not reported, abandoned ones included.
        abandoned: samples that were refused while generating; they occupy an engine until they
            report.
        orphans: (node, key) still at work on what was refused; their results are ignored.
        exhausted: whether the dataset has no further row (for this evaluation).
    """

    def __init__(self, stream: ScheduledStream, nodes: Sequence[ScheduledNode], emit: Emit) -> None:
        self.stream = stream
        self.graph = SampleDependencies(stream, nodes)
        self.groups: dict[int, Group] = {}
        self.next_group = 0
        self.num_generating = 0
        self.abandoned: set[int] = set()
        self.orphans: set[tuple[str, int]] = set()
        self.exhausted = False
        self._emit = emit

    # ------------------------------------------------------------------ events
    def open_group(self) -> None:
        """Admit the next group."""
        group = Group(self.next_group, self.graph, self._emit)
        self.groups[group.number] = group
        self.next_group += 1
        self.num_generating += self.graph.size
        self._emit(OpenGroup(self.stream.name, group.number, tuple(group.members)))

    def exhaust(self, number: int) -> None:
        """The dataset had no row for this group."""
        group = self.groups.pop(number, None)
        assert group is not None, f"group {number} of {self.stream.name} is not open"
        assert group.tasks_left == self.graph.num_tasks, f"group {number} exists: it has finished samples"
        self.num_generating -= self.graph.size
        self.exhausted = True

    def sample_done(self, sample: int, oldest: int) -> None:
        """The source finished a sample."""
        found = self._report(sample)
        if found is None:
            return
        group, member = found
        member.oldest = oldest
        if self._is_stale(member):
            self._refuse_sample(group, sample, self.graph.source, Refusal.STALE)
            return
        group.finish_sample_task(sample, self.graph.source)
        self._close_if_complete(group)

    def sample_failed(self, sample: int, reason: Refusal, message: str = "") -> None:
        """The source gave up on a sample."""
        found = self._report(sample)
        if found is not None:
            self._refuse_sample(found[0], sample, self.graph.source, reason, message)

    def node_done(self, name: str, key: int, keep: bool) -> None:
        """A sample or group node is done; `keep` False refuses what it looked at."""
        if not keep:
            self.node_failed(name, key, Refusal.KEEP)
        elif (group := self._finish_running(name, key)) is not None:
            if self.graph.levels[name] is Level.SAMPLE:
                group.finish_sample_task(key, name)
            else:
                group.finish_group_task(name)
            self._close_if_complete(group)

    def node_failed(self, name: str, key: int, reason: Refusal, message: str = "") -> None:
        """A sample or group node gave up, or said that this is not to be kept."""
        group = self._finish_running(name, key)
        if group is None:
            return
        if self.graph.levels[name] is Level.SAMPLE:
            self._refuse_sample(group, key, name, reason, message)
        else:
            self._refuse_group(group, name, reason, message)
            self._refused(name, reason, message)

    def discard_sample(self, sample: int) -> None:
        """The source reported on a sample of a run that is stopping: nothing follows."""
        self._report(sample)

    def discard_node(self, name: str, key: int) -> None:
        """A node reported in a run that is stopping: nothing follows."""
        self._finish_running(name, key)

    def awaited(self) -> Iterator[tuple[str, int]]:
        """What nodes are at work on, or wait at a station to begin with; orphans too."""
        yield from self.orphans
        for group in self.groups.values():
            yield from ((name, group.number) for name in group.running)
            for sample, member in group.members.items():
                yield from ((name, sample) for name in member.running)

    def movable_groups(self) -> list[int]:
        """Open groups of which no member has ended or was refused, in order of admission."""
        size = self.graph.size
        return [
            number
            for number, group in self.groups.items()
            if len(group.members) == size and all(member.generating for member in group.members.values())
        ]

    def members_of(self, number: int) -> frozenset[int]:
        """The samples that are left of a group; none where it is not open."""
        group = self.groups.get(number)
        return frozenset(group.members if group else ())

    def is_orphan(self, name: str, key: int) -> bool:
        """Whether what a node is at work on was refused meanwhile."""
        return (name, key) in self.orphans

    def samples_of(self, name: str, key: int) -> tuple[int, ...]:
        """The samples that are left of what a node works on."""
        if self.graph.levels[name] is Level.SAMPLE:
            return (key,)
        return tuple(self.groups[key].members)

    @property
    def has_running_nodes(self) -> bool:
        """Whether a sample or group node is at work."""
        return any(group.has_running_nodes for group in self.groups.values())

    @property
    def wants_decision(self) -> bool:
        """Whether the last event may have completed something beyond its own group."""
        raise NotImplementedError

    # ------------------------------------------------------------------ steps
    def _report(self, sample: int) -> tuple[Group, Member] | None:
        """Take a sample off the engine; None for an abandoned one."""
        if sample in self.abandoned:
            self.abandoned.remove(sample)
            self.num_generating -= 1
            return None
        group = self.groups.get(sample // self.graph.size)
        assert group is not None, f"sample {sample} of {self.stream.name} is in no open group"
        member = group.members.get(sample)
        assert member is not None, f"sample {sample} of {self.stream.name} was refused"
        assert member.generating, f"sample {sample} of {self.stream.name} is done twice"
        self.num_generating -= 1
        member.generating = False
        return group, member

    def _finish_running(self, name: str, key: int) -> Group | None:
        """Take a node off the running ones; None if what it worked on was refused meanwhile."""
        if (name, key) in self.orphans:
            self.orphans.remove((name, key))
            return None
        at_sample = self.graph.levels[name] is Level.SAMPLE
        group = self.groups.get(key // self.graph.size if at_sample else key)
        assert group is not None, f"{name} reports on {key}, which is in no open group"
        if at_sample:
            assert key in group.members, f"{name} reports on sample {key}, which was refused"
        running = group.members[key].running if at_sample else group.running
        assert name in running, f"{name} does not run for {key}"
        running.remove(name)
        return group

    def _refuse_sample(
        self, group: Group, sample: int, node: str, reason: Refusal, message: str = ""
    ) -> None:
        self._refuse_samples(group, {sample: message}, node, reason)

    def _refuse_samples(self, group: Group, messages: Mapping[int, str], node: str, reason: Refusal) -> None:
        """Refuse members for one reason, each with its message; and the others where too few are left."""
        gone = []
        for sample, message in messages.items():
            gone.append(self._abandon(group, sample))
            self._emit(Refuse(self.stream.name, group.number, (sample,), node, reason, message))
        if len(group.members) < max(1, self.stream.min_group):
            self._refuse_group(group, node, Refusal.SMALL_GROUP)
            self._refused(node, reason, list(messages.values())[-1])
        else:
            for member in gone:
                group.forget(member)
            self._close_if_complete(group)

    def _refuse_group(self, group: Group, node: str, reason: Refusal, message: str = "") -> None:
        """Refuse all members that are left and forget the group."""
        samples = tuple(group.members)
        for sample in samples:
            self._abandon(group, sample)
        self.orphans.update((name, group.number) for name in group.running)
        self.groups.pop(group.number, None)
        if samples:
            self._emit(Refuse(self.stream.name, group.number, samples, node, reason, message))

    def _abandon(self, group: Group, sample: int) -> Member:
        member = group.members.pop(sample)
        if member.generating:
            self.abandoned.add(sample)
        self.orphans.update((name, sample) for name in member.running)
        return member

    def _close_if_complete(self, group: Group) -> None:
        if group.tasks_left == 0:
            del self.groups[group.number]
            self._accepted(group)

    # ------------------------------------------------------------------ hooks
    def _is_stale(self, member: Member) -> bool:
        return False

    def _accepted(self, group: Group) -> None:
        raise NotImplementedError

    def _refused(self, node: str, reason: Refusal, message: str) -> None:
        """A whole group was refused; `node`, `reason` and `message` are those of its last refusal."""
