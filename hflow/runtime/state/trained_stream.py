"""`TrainedStream`: accepted groups wait in a queue until a batch is formed of them.

Where samples age, the oldest groups go into a batch first, and samples that would be too old for the next
step are dropped: finished ones and running ones. Where nothing ages, batches follow the order of the data.

Invariant: no sample in the queue or in an open group is too old for the next step to be formed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from hflow.planner.plan.rows import Schedule, ScheduledStream
from hflow.planner.plan.staleness import staleness_bound
from hflow.runtime.events import Accept, FormBatch, Refusal, Refuse
from hflow.runtime.state.groups import Emit, Group, Member
from hflow.runtime.state.progress import RunProgress
from hflow.runtime.state.rules import is_stale, look_ahead_limit
from hflow.runtime.state.snapshot import StreamSnapshot
from hflow.runtime.state.stream_state import StreamState

MIN_FAILED_GROUPS = 16
"""Groups in a row that may fail at least before the run stops."""


class TrainedStream(StreamState):
    """The trained stream.

    Attributes:
        models: trained models that the source reads. If there are none, samples do not age.
        queue: accepted groups that are in no batch yet, by id.
        num_accepted: groups ever accepted, trained ones included; dropped ones are subtracted.
        num_refused: groups refused since the last batch was formed.
        num_failed: groups in a row that were refused because a body failed: since then none was accepted.
        max_failed: the run stops when there are more. They are twice as many as can be in flight, so that a
            service that is away for a moment does not stop the run.
        last_failure: node, reason and message of the last of them.
        refusal_counts: how often each (node, reason) refused a group since then.
        refusal_messages: the last error of each (node, reason), where a body failed.
        max_queue: length of the queue beyond which the oldest group is dropped; None: no limit.
        age_limit: the largest lag with which a sample may train; None: no limit. It is the bound that the
            plan certifies, which without the age rule only samples of an earlier plan can exceed.
    """

    def __init__(
        self,
        stream: ScheduledStream,
        schedule: Schedule,
        progress: RunProgress,
        emit: Emit,
    ) -> None:
        super().__init__(stream, schedule.nodes, emit)
        assert stream.batch is not None, f"{stream.name} has no batch: it is not the trained stream"
        self.batch = stream.batch
        self.models = progress.trained_models(stream.models)
        self.queue: dict[int, Group] = {}
        self.num_accepted = 0
        self.num_refused = self.num_failed = 0
        self.last_failure: tuple[str, Refusal, str] | None = None
        self.refusal_counts: Counter[tuple[str, Refusal]] = Counter()
        self.refusal_messages: dict[tuple[str, Refusal], str] = {}
        self._settings = schedule.settings
        self._progress = progress
        self.max_queue = schedule.settings.queue if self.models else None
        self.age_limit = staleness_bound(schedule) if self.models else None
        self.max_failed = max(MIN_FAILED_GROUPS, 2 * self._max_in_flight())
        assert self.age_limit is None or self.age_limit >= schedule.settings.sync_every - 1, (
            f"no sample can be within {self.age_limit} versions: weights change every "
            f"{schedule.settings.sync_every} steps"
        )

    @property
    def num_admitted(self) -> int:
        """Groups accepted plus groups running, which admission limits."""
        return self.num_accepted + len(self.groups)

    @property
    def can_form_batch(self) -> bool:
        """Whether the queue has a batch, and the run has a step for it."""
        if len(self.queue) < self.batch or self._progress.num_formed >= self._progress.num_steps:
            return False
        return bool(self.models) or self._is_in_order()

    @property
    def is_full(self) -> bool:
        """Whether the queue is full. No groups are opened then."""
        return self.max_queue is not None and len(self.queue) >= self.max_queue

    @property
    def cannot_fill_batch(self) -> bool:
        """Whether the dataset is exhausted and the remaining groups are too few for another batch."""
        if not self.exhausted:
            return False
        num_remaining = len(self.queue) + len(self.groups)
        return num_remaining < self.batch and self._progress.num_formed < self._progress.num_steps

    @property
    def has_too_many_refusals(self) -> bool:
        """Whether all groups fail, or more were refused since the last batch than the settings allow."""
        is_failing = self.num_failed > self.max_failed
        return is_failing or self.num_refused > self._settings.max_refused_per_step

    @property
    def needs_decision(self) -> bool:
        """Whether no further batch can be filled, too much was refused, or engines have drained."""
        is_drained = self.num_generating == 0 and not self._settings.interrupt
        return is_drained or self.cannot_fill_batch or self.has_too_many_refusals

    def describe_refusals(self) -> str:
        """Return the error for too many refusals: how many groups, which node refused most, and why."""
        if self.num_failed > self.max_failed and self.last_failure is not None:
            node, reason, message = self.last_failure
            return (
                f"{self.num_failed} groups in a row were refused as a node failed, the last by {node} "
                f"({reason}){_why(message)}; correct that, or set retries= "
                f"of {node} if it fails by chance"
            )
        (node, reason), times = self.refusal_counts.most_common(1)[0]
        why = _why(self.refusal_messages.get((node, reason), ""))
        return (
            f"{self.num_refused} groups were refused since the last batch, {times} of them by {node} "
            f"({reason}){why}; fix {node} or raise schedule.max_refused_per_step"
        )

    def forget_refusals(self) -> None:
        """Start to count refusals again."""
        self.num_refused = self.num_failed = 0
        self.last_failure = None
        self.refusal_counts.clear()
        self.refusal_messages.clear()

    def group_limit(self, engine_version: int, steps_trained: int) -> int:
        """Return the number of groups that may have been admitted by now.

        It never exceeds what the run needs. Where the age limit is lower than the certified lag, groups that
        would be too old when they train are not admitted either. The stream is generated by weights of
        `engine_version`; if it reads no trained ones, `steps_trained` counts.
        """
        if self.models:
            limit = self._settings.admission_limit(engine_version, self.batch)
            if self.age_limit is not None:
                limit = min(limit, (engine_version + self.age_limit + 1) * self.batch)
        else:
            limit = look_ahead_limit(steps_trained, self.batch)
        return min(limit, self._progress.num_steps * self.batch)

    def open_group_at(self, version: int) -> None:
        """Admit the next group. No token of it will be older than the weights of `version`."""
        number = self.next_group
        self.open_group()
        if self.models:
            for member in self.groups[number].members.values():
                member.oldest = version

    def form_batch(self) -> None:
        """Form the batch of the next step of the oldest accepted groups, in the order of their ids."""
        oldest = sorted(self.queue.values(), key=self._rank)[: self.batch]
        groups = sorted(oldest, key=lambda group: group.number)
        numbers = tuple(group.number for group in groups)
        for number in numbers:
            del self.queue[number]
        samples = tuple(sample for group in groups for sample in group.members)
        self.num_generated -= len(samples)
        self._emit(FormBatch(self.stream.name, self._progress.num_formed, samples, numbers))
        self._progress.form_batch()
        self.forget_refusals()
        self._drop_stale()

    def restore(self, snapshot: StreamSnapshot, steps: int, num_refused: int) -> None:
        """Open the groups of a snapshot again, after some completed steps.

        Those that the limits of this run do not allow, which may be lower than before, are dropped.
        """
        self.next_group, self.num_refused = snapshot.next_group, num_refused
        self.num_accepted = steps * self.batch
        for group in self._reopen(snapshot.groups):
            self.queue[group.number] = group
            self.num_accepted += 1
        self._drop_stale()
        self._drop_beyond_queue()

    def _max_in_flight(self) -> int:
        """Return the number of groups that can be open at a time."""
        settings = self._settings
        limit = settings.admission_limit(0, self.batch)
        return max(1, min(limit, settings.max_concurrent // self.dependencies.size))

    def _accepted(self) -> Iterable[Group]:
        return self.queue.values()

    def _is_in_order(self) -> bool:
        """Return whether no open group precedes the last group of the next batch in the data's order.

        Where nothing ages, it gains nothing to prefer groups that finish first. So batches do not depend
        on timing.
        """
        first_open = next(iter(self.groups), self.next_group)
        return sorted(self.queue)[self.batch - 1] < first_open

    def _is_stale(self, member: Member) -> bool:
        step = self._progress.num_formed
        return self.age_limit is not None and is_stale(member.oldest, step, self.age_limit)

    def _on_complete(self, group: Group) -> None:
        if not self._drop_stale_members(group):
            return
        self.queue[group.number] = group
        self.num_accepted += 1
        self.num_failed = 0
        if not group.was_accepted:
            self._emit(Accept(self.stream.name, group.number, tuple(group.members)))
        self._drop_beyond_queue()

    def _drop_beyond_queue(self) -> None:
        while self.max_queue is not None and len(self.queue) > self.max_queue:
            self._drop_group(min(self.queue.values(), key=self._rank))

    def _rank(self, group: Group) -> tuple[int, int]:
        """Return the sort key for batches: the age where samples age, then the data's order."""
        versions = (member.oldest for member in group.members.values())
        return (min(versions) if self.models else 0, group.number)

    def _drop_group(self, group: Group) -> None:
        """Drop an accepted group because the queue is too long."""
        del self.queue[group.number]
        self.num_accepted -= 1
        samples, source = tuple(group.members), self.dependencies.source
        self.num_generated -= len(samples)
        self._emit(Refuse(self.stream.name, group.number, samples, source, Refusal.QUEUE_FULL))

    def _drop_stale(self) -> None:
        """Drop all samples that are too old for the next step, running ones included."""
        if self.age_limit is None:
            return
        for group in tuple(self.queue.values()):
            if not self._drop_stale_members(group):
                del self.queue[group.number]
                self.num_accepted -= 1
        for group in tuple(self.groups.values()):
            messages = {
                sample: _describe_running(group, member)
                for sample, member in group.members.items()
                if self._is_stale(member)
            }
            if messages:
                self._refuse_samples(group, messages, self.dependencies.source, Refusal.STALE)

    def _drop_stale_members(self, group: Group) -> bool:
        """Drop those members of a complete group that are too old. Returns False if the group is refused."""
        stale = tuple(sample for sample, member in group.members.items() if self._is_stale(member))
        if not stale:
            return True
        for sample in stale:
            del group.members[sample]
        self.num_generated -= len(stale)
        source = self.dependencies.source
        self._emit(Refuse(self.stream.name, group.number, stale, source, Refusal.STALE))
        if len(group.members) >= max(1, self.stream.min_group):
            return True
        self._refuse_group(group, source, Refusal.SMALL_GROUP)
        self._on_group_refused(source, Refusal.STALE, "")
        return False

    def _on_group_refused(self, node: str, reason: Refusal, message: str) -> None:
        if reason.is_drop:
            return
        self.num_refused += 1
        self.refusal_counts[node, reason] += 1
        if reason is Refusal.KEEP:
            self.num_failed = 0
        else:
            self.num_failed += 1
            self.last_failure = node, reason, message
        if message:
            self.refusal_messages[node, reason] = message


def _why(message: str) -> str:
    return f": {message}" if message else ""


def _describe_running(group: Group, member: Member) -> str:
    """Return the nodes that a member which became too old still waited for."""
    nodes = ", ".join(sorted(member.running | group.running))
    return f"{nodes} had not answered" if nodes else ""
