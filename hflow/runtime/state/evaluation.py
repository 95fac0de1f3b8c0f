"""A side stream: at each version where it is due, its whole dataset runs once."""

from __future__ import annotations

from collections.abc import Sequence

from hflow.planner.ir import ScheduledNode, ScheduledStream
from hflow.runtime.events import Accept, FormBatch
from hflow.runtime.state.firing_rules import evaluation_due, next_evaluation
from hflow.runtime.state.groups import Emit, Group
from hflow.runtime.state.progress import Progress
from hflow.runtime.state.stream_state import StreamState
from hflow.runtime.state.weight_version import WeightCopy


class Evaluation(StreamState):
    """A side stream.

    Nothing waits for an evaluation of trained weights to begin, except writers that `needs` bind
    to it: once a writer changes a model that it reads, an evaluation of that version is off, unless
    all its engines were given a copy before.
    Evaluations of unchanging models, and of streams that read none, are never skipped.

    Attributes:
        active: the version that is being evaluated, if any.
        last: the greatest version ever begun.
        formed: versions whose evaluation is complete.
        models: trained models that its engines hold; their weights are of one version during an
            evaluation.
        copies: versions of its engines' weights.
    """

    def __init__(
        self,
        stream: ScheduledStream,
        nodes: Sequence[ScheduledNode],
        models: tuple[str, ...],
        copies: tuple[WeightCopy, ...],
        progress: Progress,
        emit: Emit,
    ) -> None:
        super().__init__(stream, nodes, emit)
        self.active: int | None = None
        self.last = -1
        self.formed: set[int] = set()
        self.models = models
        self.copies = copies
        self._kept: list[Group] = []
        self._first = 0
        self._num_groups: int | None = None
        self._progress = progress

    @property
    def occupies_engines(self) -> bool:
        """Whether samples of it run (abandoned ones too) or may still be opened."""
        return self.active is not None or self.num_generating > 0

    @property
    def is_complete(self) -> bool:
        """Whether the dataset is through and every group accepted or refused."""
        return self.active is not None and self.exhausted and not self.groups

    @property
    def wants_decision(self) -> bool:
        """Whether the evaluation is complete, or has left its engines."""
        return self.is_complete or self.num_generating == 0

    def candidate(self) -> int | None:
        """The version that the next evaluation would be of, if it can be told now."""
        if self.models:
            versions = {copy.version for copy in self.copies}
            return versions.pop() if len(versions) == 1 else None
        version = next_evaluation(self.stream, self.last, self._progress.num_steps)
        return version if version is not None and version <= self._progress.formed else None

    def is_expected(self, version: int) -> bool:
        """Whether an evaluation of this version is due, has not begun, and can still be had."""
        return (
            version > self.last
            and evaluation_due(self.stream, version, self._progress.num_steps)
            and (self._progress.is_untouched(self.models, version) or self._is_in_hand(version))
        )

    def happens_at(self, version: int) -> bool:
        """Whether this version was, is being, or will be evaluated."""
        return version in self.formed or version == self.active or self.is_expected(version)

    def begin(self, version: int) -> None:
        """Start over at the dataset's first row; group ids go on counting."""
        self.active = self.last = version
        self._first = self.next_group
        self.exhausted = self._num_groups == 0

    def open_group(self) -> None:
        """Admit the next group; after a first pass it is known which one is the last."""
        super().open_group()
        self.exhausted = self.next_group - self._first == self._num_groups

    def exhaust(self, number: int) -> None:
        """The dataset had no row for this group: so it has no more than came before."""
        super().exhaust(number)
        known = self._num_groups
        count = number - self._first
        self._num_groups = count if known is None else min(known, count)

    def finish(self) -> None:
        """Bind what was accepted to the version that was evaluated."""
        assert self.active is not None, f"no evaluation of {self.stream.name} runs"
        groups = sorted(self._kept, key=lambda group: group.number)
        samples = tuple(sample for group in groups for sample in group.members)
        self._emit(FormBatch(self.stream.name, self.active, samples, tuple(g.number for g in groups)))
        self.formed.add(self.active)
        self.active = None
        self._kept.clear()

    def _is_in_hand(self, version: int) -> bool:
        """Whether all its engines have a copy of these weights, or one lies ready for them."""
        return all(copy.target == version for copy in self.copies)

    def _accepted(self, group: Group) -> None:
        self._kept.append(group)
        self._emit(Accept(self.stream.name, group.number, tuple(group.members)))
