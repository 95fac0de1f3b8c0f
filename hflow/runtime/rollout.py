"""The trained stream: accepted groups queue until there are enough of them to be bound to a step.

Where samples age, a batch is formed as soon as B groups are accepted. So nothing is left in the
queue when the step to be filled moves on, and a group that is young enough when it is accepted is
so when it trains. Where nothing ages, batches follow the data's order.
"""

from __future__ import annotations

from collections import Counter

from hflow.plan.ir import Schedule, ScheduledStream
from hflow.runtime.events import FormBatch, Refusal, Refuse
from hflow.runtime.groups import Emit, Group, Member
from hflow.runtime.progress import Progress
from hflow.runtime.staleness import admission_limit, certified_lag, is_stale, look_ahead_limit
from hflow.runtime.stream_state import StreamState


class Rollout(StreamState):
    """The trained stream.

    Attributes:
        queue: accepted groups that no batch holds yet, by id.
        num_accepted: groups ever accepted, those included that were trained on.
        num_refused: groups refused since the last batch was formed.
        causes: how often each (node, reason) refused a group since then.
        messages: what each of these said last, where a body failed.
        models: trained models that the source reads; where there are none, nothing ages.
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
        self._lag = certified_lag(schedule.max_staleness, schedule.sync_every)

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
    def is_dry(self) -> bool:
        """Whether the dataset is exhausted and what is left cannot fill another batch."""
        left = len(self.queue) + len(self.groups)
        return self.exhausted and left < self.batch and self._progress.formed < self._progress.num_steps

    @property
    def is_refused_out(self) -> bool:
        """Whether more groups were refused since the last batch than a run may lose."""
        return self.num_refused > self._schedule.max_refused_per_step

    @property
    def wants_decision(self) -> bool:
        """Whether a batch is full, can never be, or too much was refused."""
        return self.is_formable or self.is_dry or self.is_refused_out

    def describe_refusals(self) -> str:
        """One line for the user: how many groups were refused, mostly by whom, and why."""
        (node, reason), times = self.causes.most_common(1)[0]
        message = self.messages.get((node, reason))
        why = f": {message}" if message else ""
        return (
            f"{self.num_refused} groups were refused since the last batch, {times} of them by {node} "
            f"({reason}){why}; mend {node} or raise max_refused_per_step"
        )

    def limit(self, engine_version: int, steps_trained: int) -> int:
        """Groups that may ever have been admitted by now; more than the run needs are never."""
        if self.models:
            ahead = admission_limit(
                engine_version, self.batch, self._schedule.max_staleness, self._schedule.sync_every
            )
        else:
            ahead = look_ahead_limit(steps_trained, self.batch)
        return min(ahead, self._progress.num_steps * self.batch)

    def form_batch(self) -> None:
        """Bind the accepted groups with the least ids to the next step."""
        numbers = tuple(sorted(self.queue)[: self.batch])
        groups = [self.queue.pop(number) for number in numbers]
        samples = tuple(sample for group in groups for sample in group.members)
        self._emit(FormBatch(self.stream.name, self._progress.formed, samples, numbers))
        self._progress.form_batch()
        self.num_refused = 0
        self.causes.clear()
        self.messages.clear()

    def _is_in_order(self) -> bool:
        """Whether no open group would have come before the batch's last one.

        Where nothing ages, nothing is gained by taking who finishes first: batches follow the data's
        order, whatever the timing.
        """
        first_open = next(iter(self.groups), self.next_group)
        return sorted(self.queue)[self.batch - 1] < first_open

    def _is_stale(self, member: Member) -> bool:
        return bool(self.models) and is_stale(member.oldest, self._progress.formed, self._lag)

    def _accepted(self, group: Group) -> None:
        if self._keep_fresh(group):
            self.queue[group.number] = group
            self.num_accepted += 1

    def _refused(self, node: str, reason: Refusal, message: str) -> None:
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
