"""The trained stream: accepted groups queue until there are enough of them to be bound to a step.

Where samples age, the oldest are bound first, and those go that the next step would find too old:
finished ones when the step to be filled moves on, running ones too. So a sample's step is known to be
young enough for it from the moment when it is bound. Where nothing ages, batches follow the data's order.
"""

from __future__ import annotations

from collections import Counter

from hflow.planner.ir import Schedule, ScheduledStream
from hflow.planner.staleness import age_limit
from hflow.runtime.events import Accept, FormBatch, Refusal, Refuse
from hflow.runtime.state.groups import Emit, Group, Member
from hflow.runtime.state.progress import Progress
from hflow.runtime.state.staleness import admission_limit, is_stale, look_ahead_limit
from hflow.runtime.state.stream_state import StreamState


class Rollout(StreamState):
    """The trained stream.

    Attributes:
        queue: accepted groups that no batch holds yet, by id.
        num_accepted: groups ever accepted, those included that were trained on.
        num_refused: groups refused since the last batch was formed.
        causes: how often each (node, reason) refused a group since then.
        messages: what each of these said last, where a body failed.
        models: trained models that the source reads; where there are none, nothing ages.
        bound: groups that may queue, beyond which the oldest is dropped; None where nothing ages.
        age_limit: the largest lag with which a sample may train; None where the age rule is off.
    """

    def __init__(
        self,
        stream: ScheduledStream,
        schedule: Schedule,
        progress: Progress,
        emit: Emit,
    ) -> None:
        super().__init__(stream, schedule.nodes, emit)
        assert stream.batch is not None, f"{stream.name} has no batch: it is not the trained stream"
        self.batch = stream.batch
        self.models = progress.trained_models(stream.models)
        self.queue: dict[int, Group] = {}
        self.num_accepted = 0
        self.num_refused = 0
        self.causes: Counter[tuple[str, Refusal]] = Counter()
        self.messages: dict[tuple[str, Refusal], str] = {}
        self._schedule = schedule
        self._progress = progress
        self.bound = schedule.settings.queue if self.models else None
        self.age_limit = age_limit(schedule) if self.models else None
        assert self.age_limit is None or self.age_limit >= schedule.settings.sync_every - 1, (
            f"no sample can be within {self.age_limit} versions: weights change every "
            f"{schedule.settings.sync_every} steps"
        )

    @property
    def num_admitted(self) -> int:
        """Groups accepted plus groups running: what admission counts."""
        return self.num_accepted + len(self.groups)

    @property
    def is_formable(self) -> bool:
        """Whether a batch can be formed now."""
        if len(self.queue) < self.batch or self._progress.formed >= self._progress.num_steps:
            return False
        return bool(self.models) or self._is_in_order()

    @property
    def is_full(self) -> bool:
        """Whether as many groups are accepted as may wait: no more are opened then."""
        return self.bound is not None and len(self.queue) >= self.bound

    @property
    def is_dry(self) -> bool:
        """Whether the dataset is exhausted and what is left cannot fill another batch."""
        left = len(self.queue) + len(self.groups)
        return self.exhausted and left < self.batch and self._progress.formed < self._progress.num_steps

    @property
    def is_refused_out(self) -> bool:
        """Whether more groups were refused since the last batch than a run may lose."""
        return self.num_refused > self._schedule.settings.max_refused_per_step

    @property
    def wants_decision(self) -> bool:
        """Whether no batch can be filled any more, too much was refused, or engines are empty at last."""
        is_drained = self.num_generating == 0 and not self._schedule.settings.interrupt
        return self.is_dry or self.is_refused_out or is_drained

    def describe_refusals(self) -> str:
        """One line for the user: how many groups were refused, mostly by whom, and why."""
        (node, reason), times = self.causes.most_common(1)[0]
        message = self.messages.get((node, reason))
        why = f": {message}" if message else ""
        return (
            f"{self.num_refused} groups were refused since the last batch, {times} of them by {node} "
            f"({reason}){why}; mend {node} or raise schedule.max_refused_per_step"
        )

    def limit(self, engine_version: int, steps_trained: int) -> int:
        """Groups that may ever have been admitted by now; more than the run needs are never.

        Nor are groups that would be too old when their turn comes, where samples may not get as old as
        the formula lets them.
        """
        if self.models:
            ahead = admission_limit(
                engine_version,
                self.batch,
                self._schedule.settings.max_staleness,
                self._schedule.settings.sync_every,
            )
            if self.age_limit is not None:
                ahead = min(ahead, (engine_version + self.age_limit + 1) * self.batch)
        else:
            ahead = look_ahead_limit(steps_trained, self.batch)
        return min(ahead, self._progress.num_steps * self.batch)

    def open_group_at(self, version: int) -> None:
        """Admit the next group; no token of it is older than the weights of `version`."""
        number = self.next_group
        self.open_group()
        if self.models:
            for member in self.groups[number].members.values():
                member.oldest = version

    def form_batch(self) -> None:
        """Bind the oldest accepted groups to the next step, in the order of their ids."""
        oldest = sorted(self.queue.values(), key=self._rank)[: self.batch]
        groups = sorted(oldest, key=lambda group: group.number)
        numbers = tuple(group.number for group in groups)
        for number in numbers:
            del self.queue[number]
        samples = tuple(sample for group in groups for sample in group.members)
        self._emit(FormBatch(self.stream.name, self._progress.formed, samples, numbers))
        self._progress.form_batch()
        self.num_refused = 0
        self.causes.clear()
        self.messages.clear()
        self._drop_stale()

    def _is_in_order(self) -> bool:
        """Whether no open group would have come before the batch's last one.

        Where nothing ages, nothing is gained by taking who finishes first: batches follow the data's
        order, whatever the timing.
        """
        first_open = next(iter(self.groups), self.next_group)
        return sorted(self.queue)[self.batch - 1] < first_open

    def _is_stale(self, member: Member) -> bool:
        return self.age_limit is not None and is_stale(member.oldest, self._progress.formed, self.age_limit)

    def _accepted(self, group: Group) -> None:
        if not self._keep_fresh(group):
            return
        self.queue[group.number] = group
        self.num_accepted += 1
        self._emit(Accept(self.stream.name, group.number, tuple(group.members)))
        if self.bound is not None and len(self.queue) > self.bound:
            self._drop(min(self.queue.values(), key=self._rank))

    def _rank(self, group: Group) -> tuple[int, int]:
        """Where samples age the oldest go first; else the data's order counts."""
        ages = (member.oldest for member in group.members.values())
        return (min(ages) if self.models else 0, group.number)

    def _drop(self, group: Group) -> None:
        """More groups wait than may: this one makes room."""
        del self.queue[group.number]
        self.num_accepted -= 1
        samples = tuple(group.members)
        self._emit(Refuse(self.stream.name, group.number, samples, self.graph.source, Refusal.QUEUE_FULL))

    def _drop_stale(self) -> None:
        """The step to be filled moved on: drop what it would find too old, and abort what still runs."""
        if self.age_limit is None:
            return
        for group in tuple(self.queue.values()):
            if not self._keep_fresh(group):
                del self.queue[group.number]
                self.num_accepted -= 1
        for group in tuple(self.groups.values()):
            stale = {
                s: _awaited(group, member) for s, member in group.members.items() if self._is_stale(member)
            }
            if stale:
                self._refuse_samples(group, stale, self.graph.source, Refusal.STALE)

    def _refused(self, node: str, reason: Refusal, message: str) -> None:
        if reason.is_drop:
            return
        self.num_refused += 1
        self.causes[node, reason] += 1
        if message:
            self.messages[node, reason] = message

    def _keep_fresh(self, group: Group) -> bool:
        """Drop members of a finished group that the next step would find too old; False if all go."""
        stale = tuple(sample for sample, member in group.members.items() if self._is_stale(member))
        if not stale:
            return True
        for sample in stale:
            del group.members[sample]
        self._emit(Refuse(self.stream.name, group.number, stale, self.graph.source, Refusal.STALE))
        if len(group.members) >= max(1, self.stream.min_group):
            return True
        self._refuse_group(group, self.graph.source, Refusal.SMALL_GROUP)
        self._refused(self.graph.source, Refusal.STALE, "")
        return False


def _awaited(group: Group, member: Member) -> str:
    """What a member that ran out of time still waited for, in words."""
    nodes = ", ".join(sorted(member.running | group.running))
    return f"{nodes} had not answered" if nodes else ""
