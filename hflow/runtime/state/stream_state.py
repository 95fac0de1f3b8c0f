"""`StreamState`: the groups of one root stream between admission and acceptance.

Groups are opened, their samples are generated, their nodes run, and they are accepted or refused. What
happens then differs between the trained stream (`trained_stream`) and side streams (`evaluation`), which
override the hooks at the end of the class.

Invariant: every sample that was opened reports exactly once, also after it was refused. Until then it
counts as generating.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from hflow.graph.ir import Level
from hflow.planner.plan.rows import ScheduledNode, ScheduledStream
from hflow.runtime.events import OpenGroup, Refusal, Refuse
from hflow.runtime.state.groups import Emit, Group, Member, SampleDependencies, with_name, without_name
from hflow.runtime.state.snapshot import GroupSnapshot, StreamSnapshot


class StreamState:
    """The groups of one stream.

    Attributes:
        dependencies: what the stream's nodes wait for.
        groups: open groups by id.
        next_group: id of the group that is opened next.
        num_generating: samples whose source has not reported, abandoned ones included.
        num_generated: samples that the source has finished for the next batch, or for this evaluation.
        abandoned: samples that were refused while they were generated. They occupy an engine until they
            report.
        orphans: (node, key) of nodes that work on something that was refused; their results are ignored.
        exhausted: whether the dataset has no further row (on a side stream: for this evaluation).
    """

    def __init__(self, stream: ScheduledStream, nodes: Sequence[ScheduledNode], emit: Emit) -> None:
        self.stream = stream
        self.dependencies = SampleDependencies(stream, nodes)
        self.groups: dict[int, Group] = {}
        self.next_group = 0
        self.num_generating = self.num_generated = 0
        self.abandoned: set[int] = set()
        self.orphans: set[tuple[str, int]] = set()
        self.exhausted = False
        self._emit = emit

    # Events
    def open_group(self) -> None:
        """Admit the next group."""
        group = Group(self.next_group, self.dependencies, self._emit)
        self.groups[group.number] = group
        self.next_group += 1
        self.num_generating += self.dependencies.size
        self._emit(OpenGroup(self.stream.name, group.number, tuple(group.members)))

    def exhaust(self, number: int) -> None:
        """Remove a group for which the dataset had no row."""
        group = self.groups.pop(number, None)
        assert group is not None, f"group {number} of {self.stream.name} is not open"
        has_started = group.tasks_left != self.dependencies.num_tasks
        assert not has_started, f"group {number} has a row: some of its samples are finished"
        self.num_generating -= self.dependencies.size
        self.exhausted = True

    def sample_done(self, sample: int, oldest: int) -> None:
        """Handle a sample that its source finished."""
        reported = self._end_generation(sample)
        if reported is None:
            return
        group, member = reported
        member.oldest = oldest
        if self._is_stale(member):
            self._refuse_sample(group, sample, self.dependencies.source, Refusal.STALE)
            return
        group.finish_sample_task(sample, self.dependencies.source)
        self._accept_if_complete(group)

    def sample_failed(self, sample: int, reason: Refusal, message: str = "") -> None:
        """Handle a sample on which its source failed."""
        reported = self._end_generation(sample)
        if reported is not None:
            self._refuse_sample(reported[0], sample, self.dependencies.source, reason, message)

    def node_done(self, name: str, key: int, keep: bool) -> None:
        """Handle a sample or group node that is done; `keep=False` refuses its sample or group."""
        if not keep:
            self.node_failed(name, key, Refusal.KEEP)
        elif (group := self._end_node(name, key)) is not None:
            if self.dependencies.levels[name] is Level.SAMPLE:
                group.finish_sample_task(key, name)
            else:
                group.finish_group_task(name)
            self._accept_if_complete(group)

    def node_failed(self, name: str, key: int, reason: Refusal, message: str = "") -> None:
        """Handle a sample or group node that failed, or that refused its sample or group."""
        group = self._end_node(name, key)
        if group is None:
            return
        if self.dependencies.levels[name] is Level.SAMPLE:
            self._refuse_sample(group, key, name, reason, message)
        else:
            self._refuse_group(group, name, reason, message)
            self._on_group_refused(name, reason, message)

    # In a run that is ending, nothing follows from these events; a snapshot contains what is done.
    def note_sample(self, sample: int, oldest: int) -> None:
        """Note that a sample's source is done."""
        if (reported := self._end_generation(sample)) is not None:
            _, member = reported
            member.oldest = oldest
            member.done = with_name(member.done, self.dependencies.source)

    def note_node(self, name: str, key: int) -> None:
        """Note that a sample or group node is done."""
        if (group := self._end_node(name, key)) is not None:
            if self.dependencies.levels[name] is Level.SAMPLE:
                group.members[key].done = with_name(group.members[key].done, name)
            else:
                group.done.add(name)

    def discard_sample(self, sample: int) -> None:
        """Ignore the report of a sample: it has to be generated again."""
        self._end_generation(sample)

    def discard_node(self, name: str, key: int) -> None:
        """Ignore the report of a node: it has to run again."""
        self._end_node(name, key)

    # Snapshots
    def snapshot(self) -> StreamSnapshot:
        """Return the groups that are in no batch yet."""
        groups = [group.snapshot(is_accepted=True) for group in self._accepted()]
        groups += [group.snapshot(is_accepted=False) for group in self.groups.values()]
        in_order = sorted(groups, key=lambda group: group.number)
        return StreamSnapshot(self.stream.name, self.next_group, tuple(in_order))

    def _reopen(self, groups: Iterable[GroupSnapshot]) -> list[Group]:
        """Open groups of a snapshot again, and return those that were accepted and lack no node."""
        accepted = []
        for snapshot in groups:
            group = Group(snapshot.number, self.dependencies, self._emit)
            group.restore(snapshot)
            self.num_generated += sum(not member.generating for member in group.members.values())
            if snapshot.is_accepted and group.tasks_left == 0:
                accepted.append(group)
                continue
            self.groups[group.number] = group
            self._accept_if_complete(group)
            unfinished = tuple(sample for sample, member in group.members.items() if member.generating)
            if unfinished:
                self.num_generating += len(unfinished)
                self._emit(OpenGroup(self.stream.name, group.number, unfinished, is_continued=True))
        return accepted

    # Queries
    @property
    def has_running_nodes(self) -> bool:
        """Whether a sample or group node is running."""
        return any(group.has_running_nodes for group in self.groups.values())

    @property
    def needs_decision(self) -> bool:
        """Whether the last event may have consequences beyond its own group."""
        raise NotImplementedError

    def running_nodes(self) -> Iterator[tuple[str, int]]:
        """Yield (node, key) of all nodes that run or wait for their devices, orphans included."""
        yield from self.orphans
        for group in self.groups.values():
            yield from ((name, group.number) for name in group.running)
            for sample, member in group.members.items():
                yield from ((name, sample) for name in member.running)

    def generating(self) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Yield each open group that has samples whose source has not reported, with these samples."""
        for number, group in self.groups.items():
            if samples := tuple(sample for sample, member in group.members.items() if member.generating):
                yield number, samples

    def movable_groups(self) -> list[int]:
        """Return the open groups whose members are all being generated, in order of admission."""
        size = self.dependencies.size
        return [
            number
            for number, group in self.groups.items()
            if len(group.members) == size and all(member.generating for member in group.members.values())
        ]

    def members_of(self, number: int) -> frozenset[int]:
        """Return the remaining samples of a group; empty if it is not open."""
        group = self.groups.get(number)
        return frozenset(group.members if group else ())

    def is_orphan(self, name: str, key: int) -> bool:
        """Return whether a node works on something that was refused meanwhile."""
        return (name, key) in self.orphans

    def samples_of(self, name: str, key: int) -> tuple[int, ...]:
        """Return the remaining samples of what a node works on."""
        if self.dependencies.levels[name] is Level.SAMPLE:
            return (key,)
        return tuple(self.groups[key].members)

    # Steps
    def _end_generation(self, sample: int) -> tuple[Group, Member] | None:
        """Record that no engine works on a sample any more. Returns None for an abandoned sample."""
        if sample in self.abandoned:
            self.abandoned.remove(sample)
            self.num_generating -= 1
            return None
        group = self.groups.get(sample // self.dependencies.size)
        assert group is not None, f"sample {sample} of {self.stream.name} is in no open group"
        member = group.members.get(sample)
        assert member is not None, f"sample {sample} of {self.stream.name} was refused"
        assert member.generating, f"sample {sample} of {self.stream.name} is done twice"
        self.num_generating -= 1
        self.num_generated += 1
        member.generating = False
        return group, member

    def _end_node(self, name: str, key: int) -> Group | None:
        """Record that a node is not running any more. Returns None if its sample or group was refused."""
        if (name, key) in self.orphans:
            self.orphans.remove((name, key))
            return None
        is_sample_node = self.dependencies.levels[name] is Level.SAMPLE
        group = self.groups.get(key // self.dependencies.size if is_sample_node else key)
        assert group is not None, f"{name} reports on {key}, which is in no open group"
        if is_sample_node:
            member = group.members.get(key)
            assert member is not None, f"{name} reports on sample {key}, which was refused"
            assert name in member.running, f"{name} does not run for {key}"
            member.running = without_name(member.running, name)
        else:
            assert name in group.running, f"{name} does not run for {key}"
            group.running.remove(name)
        return group

    def _refuse_sample(
        self, group: Group, sample: int, node: str, reason: Refusal, message: str = ""
    ) -> None:
        self._refuse_samples(group, {sample: message}, node, reason)

    def _refuse_samples(self, group: Group, messages: Mapping[int, str], node: str, reason: Refusal) -> None:
        """Refuse members for one reason, each with its message. If too few remain, refuse the others too."""
        removed = []
        for sample, message in messages.items():
            removed.append(self._remove_member(group, sample))
            self._emit(Refuse(self.stream.name, group.number, (sample,), node, reason, message))
        if len(group.members) < max(1, self.stream.min_group):
            self._refuse_group(group, node, Refusal.SMALL_GROUP)
            self._on_group_refused(node, reason, list(messages.values())[-1])
        else:
            for member in removed:
                group.forget(member)
            self._accept_if_complete(group)

    def _refuse_group(self, group: Group, node: str, reason: Refusal, message: str = "") -> None:
        """Refuse all remaining members and forget the group."""
        samples = tuple(group.members)
        for sample in samples:
            self._remove_member(group, sample)
        self.orphans.update((name, group.number) for name in group.running)
        self.groups.pop(group.number, None)
        if samples:
            self._emit(Refuse(self.stream.name, group.number, samples, node, reason, message))

    def _remove_member(self, group: Group, sample: int) -> Member:
        member = group.members.pop(sample)
        if member.generating:
            self.abandoned.add(sample)
        else:
            self.num_generated -= 1
        self.orphans.update((name, sample) for name in member.running)
        return member

    def _accept_if_complete(self, group: Group) -> None:
        if group.tasks_left == 0:
            del self.groups[group.number]
            self._on_complete(group)

    # Hooks
    def _accepted(self) -> Iterable[Group]:
        """Return the accepted groups that are in no batch yet."""
        raise NotImplementedError

    def _is_stale(self, member: Member) -> bool:
        """Return whether a member is too old to train."""
        return False

    def _on_complete(self, group: Group) -> None:
        """Accept a group whose nodes are all done."""
        raise NotImplementedError

    def _on_group_refused(self, node: str, reason: Refusal, message: str) -> None:
        """Handle the refusal of a whole group, given the node, reason and message of its last refusal."""
