"""`Evaluation`: a side stream, whose whole dataset runs once for each version at which it is due.

Invariant: during an evaluation of trained weights, all its engines hold exactly the evaluated version.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from hflow.graph.ir import Level
from hflow.planner.plan.rows import ScheduledNode, ScheduledStream
from hflow.runtime.events import Accept, FormBatch, Refusal, Refuse
from hflow.runtime.state.groups import Emit, Group
from hflow.runtime.state.progress import RunProgress
from hflow.runtime.state.rules import EngineWeights, evaluation_due, next_evaluation
from hflow.runtime.state.snapshot import EvaluationSnapshot, GroupSnapshot, StreamSnapshot
from hflow.runtime.state.stream_state import StreamState


class Evaluation(StreamState):
    """A side stream.

    Training does not wait for an evaluation to begin, except for nodes whose `needs` name it. Once a node
    changes a model that the stream reads, an evaluation of the earlier version is skipped, unless all its
    engines have been given that version. Evaluations of models that never change are never skipped.

    Attributes:
        active: the version that is being evaluated; None between evaluations.
        last: the highest version whose evaluation has begun.
        formed: versions whose evaluation is complete.
        num_groups: groups of the dataset; None until the first evaluation has reached its end.
    """

    def __init__(
        self,
        stream: ScheduledStream,
        nodes: Sequence[ScheduledNode],
        models: tuple[str, ...],
        engine_weights: tuple[EngineWeights, ...],
        progress: RunProgress,
        emit: Emit,
    ) -> None:
        super().__init__(stream, nodes, emit)
        self.active: int | None = None
        self.last = -1
        self.formed: set[int] = set()
        self.num_groups: int | None = None
        self.models = models
        self.engine_weights = engine_weights
        self._accepted_groups: list[Group] = []
        self._first_group = 0
        """The group that read the first row in this evaluation."""
        self._progress = progress
        self._has_batch_nodes = any(
            node.stream == stream.name and node.level is Level.BATCH for node in nodes
        )
        self._to_reopen: deque[GroupSnapshot] = deque()
        """Groups of a snapshot that are opened again before others are opened."""
        self._continued: tuple[int, StreamSnapshot] | None = None
        """The version that was being evaluated when the run was saved, and its groups."""

    def evaluation_snapshot(self) -> EvaluationSnapshot:
        """Return the progress of a side stream, besides its groups."""
        formed, last = tuple(sorted(self.formed)), self.last
        if self._has_batch_nodes and last in self.formed and last >= self._progress.num_formed:
            formed, last = formed[:-1], last - 1  # its batch nodes have not run: it is evaluated again
        first_group = self.next_group if self.active is None else self._first_group
        return EvaluationSnapshot(first_group, self.active, last, formed, self.num_groups)

    def restore(self, groups: StreamSnapshot, snapshot: EvaluationSnapshot) -> None:
        """Continue after the evaluations of a snapshot. An active one continues when it begins again."""
        self.next_group, self.num_groups = snapshot.first_group, snapshot.num_groups
        self.formed, self.last = set(snapshot.formed), snapshot.last
        if snapshot.active is not None:
            self.last = snapshot.active - 1
            self._continued = snapshot.active, groups

    def abandon(self) -> None:
        """Refuse all groups of an evaluation that cannot be completed, since the run ends."""
        for group in (*self._accepted_groups, *self.groups.values()):
            self._refuse_group(group, self.dependencies.source, Refusal.STOPPED)
        for snapshot in self._to_reopen:
            samples = tuple(member.sample for member in snapshot.members)
            source = self.dependencies.source
            self._emit(Refuse(self.stream.name, snapshot.number, samples, source, Refusal.STOPPED))
        self._to_reopen.clear()
        self._accepted_groups.clear()
        self.active = None

    @property
    def occupies_engines(self) -> bool:
        """Whether its samples run (abandoned ones too) or more may be opened."""
        return self.active is not None or self.num_generating > 0

    @property
    def is_complete(self) -> bool:
        """Whether the dataset is at its end and every group is accepted or refused."""
        return self.active is not None and self.exhausted and not self.groups

    @property
    def needs_decision(self) -> bool:
        """Whether the evaluation is complete, or no engine works on it any more."""
        return self.is_complete or self.num_generating == 0

    def candidate(self) -> int | None:
        """Return the version that the next evaluation would be of; None if that is not known now."""
        if self.models:
            versions = {weights.version for weights in self.engine_weights}
            return versions.pop() if len(versions) == 1 else None
        version = next_evaluation(self.stream, self.last, self._progress.num_steps)
        return version if version is not None and version <= self._progress.num_formed else None

    def is_expected(self, version: int) -> bool:
        """Return whether an evaluation of this version is due, has not begun, and is still possible."""
        return (
            version > self.last
            and evaluation_due(self.stream, version, self._progress.num_steps)
            and (self._progress.is_unchanged(self.models, version) or self._engines_have(version))
        )

    def happens_at(self, version: int) -> bool:
        """Return whether this version was, is being, or will be evaluated."""
        return version in self.formed or version == self.active or self.is_expected(version)

    def begin(self, version: int) -> None:
        """Begin an evaluation at the dataset's first row. Group ids continue to ascend."""
        self.active = self.last = version
        self._first_group = self.next_group
        self.exhausted = self.num_groups == 0
        if self._continued is not None and self._continued[0] == version:
            _, snapshot = self._continued
            self.next_group, self._to_reopen = snapshot.next_group, deque(snapshot.groups)
            self.exhausted = self._has_opened_all()
        self._continued = None

    def open_group(self) -> None:
        """Admit the next group. From the second evaluation on, the last group is known as such."""
        if self._to_reopen:
            self._accepted_groups += self._reopen((self._to_reopen.popleft(),))
        else:
            super().open_group()
        self.exhausted = self._has_opened_all()

    def exhaust(self, number: int) -> None:
        """Remove a group without a row; the dataset has as many groups as came before it."""
        super().exhaust(number)
        self._to_reopen.clear()  # they have no row either
        count = number - self._first_group
        self.num_groups = count if self.num_groups is None else min(self.num_groups, count)

    def finish(self) -> None:
        """End the evaluation and make a batch of its accepted groups."""
        assert self.active is not None, f"no evaluation of {self.stream.name} is active"
        groups = sorted(self._accepted_groups, key=lambda group: group.number)
        samples = tuple(sample for group in groups for sample in group.members)
        self.num_generated -= len(samples)
        self._emit(FormBatch(self.stream.name, self.active, samples, tuple(g.number for g in groups)))
        self.formed.add(self.active)
        self.active = None
        if self.num_groups is not None:
            # Groups without a row do not count, so that ids do not depend on timing.
            self.next_group = self._first_group + self.num_groups
        self._accepted_groups.clear()

    def _engines_have(self, version: int) -> bool:
        """Return whether all its engines have been given these weights, loaded or not."""
        return all(weights.target == version for weights in self.engine_weights)

    def _has_opened_all(self) -> bool:
        return not self._to_reopen and self.next_group - self._first_group == self.num_groups

    def _accepted(self) -> Iterable[Group]:
        return self._accepted_groups

    def _on_complete(self, group: Group) -> None:
        self._accepted_groups.append(group)
        if not group.was_accepted:
            self._emit(Accept(self.stream.name, group.number, tuple(group.members)))
