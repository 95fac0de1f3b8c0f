"""What becomes ready when a node of one stream is done for a sample or a group. Static tables."""

from __future__ import annotations

from collections.abc import Sequence

from hflow.plan.ir import Level, ScheduledNode, ScheduledStream


class SampleGraph:
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
