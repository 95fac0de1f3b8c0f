"""`StepMetrics` collects what happens during a run and makes one row of metrics of each step.

Invariant: every number is counted in exactly one row. Values of a batch go into the row of its step;
everything else (time, tokens, refused samples) goes into the row of the step that completes next.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import pstdev
from typing import Any, Protocol

from hflow.graph.ir import Graph
from hflow.graph.queries import PREFERRED, reported_field
from hflow.metrics import Metric, declare
from hflow.planner.plan.rows import Plan
from hflow.runtime.events import Refusal
from hflow.runtime.records.activity import OngoingWork
from hflow.runtime.records.device_use import DeviceUse
from hflow.types import EpisodeState
from hflow.types.body_line import BodyLine
from hflow.types.engine import EngineStats
from hflow.workers.interface import BodyRetry, ComputeReady, SampleReady, Span, WorkerReport

STEP_SECONDS = declare("time/step_seconds", "s", "time since the step before was complete", live="last")
TOKENS_PER_SECOND = declare(
    "time/tokens_per_second", "tokens/s", "tokens of the batch over `time/step_seconds`", live="last"
)
DEVICE_TOKENS_PER_SECOND = declare(
    "time/tokens_per_second_per_device",
    "tokens/s",
    "`time/tokens_per_second` over the number of devices, those of engines included",
)
SAMPLES_PER_SECOND = declare(
    "time/samples_per_second", "samples/s", "samples of the batch over `time/step_seconds`"
)
GENERATED_TOKENS_PER_SECOND = declare(
    "time/generated_tokens_per_second",
    "tokens/s",
    "tokens that the engines generated, over `time/step_seconds`",
)
BUSY_ENGINES = declare(
    "busy/engines", "share", "share of the time in which engines generated, on average", live="mean"
)
BUSY_TRAINERS = declare(
    "busy/trainers", "share", "share of the time in which training devices ran batch nodes", live="mean"
)
BATCH_SAMPLES = declare("batch/samples", "samples", "samples of the step's batch")
BATCH_TOKENS = declare("batch/tokens", "tokens", "tokens of the step's batch, prompts included")
NUM_INTERRUPTED = declare(
    "rollout/interrupted", "samples", "samples that a sync interrupted since the row before", live="sum"
)
KEPT_TOKENS = declare(
    "rollout/kept_tokens",
    "tokens",
    "tokens that interrupted samples kept, so that they were not generated again",
    live="sum",
)
NUM_MOVED = declare(
    "rollout/moved", "samples", "samples that continued, with their tokens, on an engine with less to do"
)
REFUSED = declare(
    "refused/{reason}",
    "samples",
    "samples that a node refused: `keep`, `failed`, `timeout` or `small_group`",
    live="sum",
)
EVALUATION_REFUSED = declare(
    "{stream}/refused",
    "samples",
    "samples that were refused in an evaluation, so that no mean counts them; from the first such one on",
)
NUM_EVALUATED = declare(
    "{stream}/evaluated", "samples", "samples that the means of an evaluation count, beside `STREAM/refused`"
)
DROPPED = declare(
    "dropped/{reason}",
    "samples",
    "samples that took too long: `stale` (age rule) or `queue_full` (`schedule.queue`)",
    live="sum",
)
RETRIES = declare(
    "{node}/retries", "calls", "calls of a reward or other body that failed and were made again"
)
EPISODES = declare(
    "episodes/{state}",
    "episodes",
    "episodes of several turns in this state, on average; `episodes/terminated` counts those that ended",
    live="now",
)
REWARD_STD = declare(
    "{stream}/reward_std", "", "standard deviation of the reward over the samples of the batch"
)
ZERO_STD_GROUPS = declare(
    "{stream}/zero_std_groups",
    "share",
    "share of the groups whose samples all have the same reward, so that group advantages are 0",
)
MIN_TOKENS = declare("{stream}/min_tokens", "tokens", "generated tokens of the shortest sample of the batch")
MAX_TOKENS = declare("{stream}/max_tokens", "tokens", "generated tokens of the longest sample of the batch")
STALENESS_MEAN = declare("staleness/mean", "versions", "mean lag of the samples that the step trained")
STALENESS_MAX = declare(
    "staleness/max", "versions", "largest lag of the samples that the step trained", live="max"
)
MEAN_IN_FLIGHT = declare(
    "staleness/in_flight", "versions", "the part of the mean lag that arose while samples were generated"
)
MEAN_IN_QUEUE = declare(
    "staleness/in_queue", "versions", "the part of the mean lag that arose while samples waited"
)
LAG_SHARES = declare(
    "staleness/lag_{lag}", "share", "share of the samples with this lag", live="mean", is_histogram=True
)
IN_FLIGHT_SHARES = declare(
    "staleness/in_flight_{lag}",
    "share",
    "share of the samples with this lag from generation",
    live="mean",
    is_histogram=True,
)
IN_QUEUE_SHARES = declare(
    "staleness/in_queue_{lag}",
    "share",
    "share of the samples with this lag from waiting",
    live="mean",
    is_histogram=True,
)

MIN_REFRESH_SECONDS = 0.25
"""Shortest time between two updates of the live panel while a step is under way."""


class RunEvents(Protocol):
    """Receives what a run reports: files, a live display, a test."""

    def on_step(self, step: int, values: Mapping[str, float]) -> None:
        """Receive the row of a completed training step."""
        ...

    def on_rollout(self, values: Mapping[str, float], samples: Mapping[str, tuple[int, int]]) -> None:
        """Receive the present state of generation, while a step is under way.

        Args:
            values: the `rollout/` and `episodes/` counts.
            samples: stream -> samples that are finished and wanted, of a batch or evaluation that is being
                generated.
        """
        ...

    def on_evaluation(self, step: int, values: Mapping[str, float]) -> None:
        """Receive the metrics of a side stream, evaluated with the weights of `step` completed steps."""
        ...

    def on_samples(self, number: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Receive the texts of some samples of a batch, as `sample_texts.SampleRow`.

        `number` is that of the row of metrics that has the batch: its completed steps.
        """
        ...

    def on_refusal(self, node: str, reason: Refusal, message: str) -> None:
        """Receive a refusal; `message` is the error of the node's body, or empty."""
        ...

    def on_retry(self, worker: int, retry: BodyRetry) -> None:
        """Receive a body that failed on a worker and is tried again."""
        ...

    def on_body_lines(self, worker: int, lines: Sequence[BodyLine]) -> None:
        """Receive what bodies have printed on a worker."""
        ...

    def on_warning(self, warning: str) -> None:
        """Receive what the user should know, in one line."""
        ...

    def on_begin(self, work: OngoingWork) -> None:
        """Receive what workers begin to do."""
        ...

    def on_finish(self, work: OngoingWork) -> None:
        """Receive work that has ended; it had begun."""
        ...

    def on_span(self, worker: int, span: Span) -> None:
        """Receive the span of something that a worker did (-1: the controller)."""
        ...


class StepMetrics:
    """Rows of the steps in progress, and counters since the last completed step.

    `more_values` returns what else a row has, since the call before. `busy/engines` is a share of the time of
    the plan's engines, `busy/trainers` of the time of workers that run batch nodes with models.
    """

    def __init__(self, plan: Plan, more_values: Callable[[], Mapping[str, float]] = dict) -> None:
        self._more_values = more_values
        self._num_engines = sum(replica.layout.data for replica in plan.replicas if replica.role == "gen")
        self._num_trainers = len({worker for r in plan.replicas if r.role != "gen" for worker in r.workers})
        self._num_devices = plan.cluster.num_devices
        self.devices = DeviceUse(plan)
        self._staleness = StalenessMetrics()
        self._rewards = RewardMetrics(plan.graph)
        self._rows: dict[int, dict[str, float]] = {}
        self._refused: Counter[str] = Counter()
        self._retries: Counter[str] = Counter()
        self._engine_stats = EngineStats()
        self._episodes = EpisodeCounts()
        self._num_moved = 0
        self._device_seconds: Counter[int] = Counter()
        """Worker -> seconds that its device ran batch nodes."""
        self._last_step_at = self._last_refresh_at = time.monotonic()

    def add_values(self, step: int, values: Mapping[str, float]) -> None:
        """Add values to a step's row."""
        self._rows.setdefault(step, {}).update(values)

    def sum_values(self, step: int, values: Mapping[str, float]) -> None:
        """Add numbers to those in a step's row."""
        row = self._rows.setdefault(step, {})
        for name, value in values.items():
            row[name] = row.get(name, 0.0) + value

    def add_refused(self, reason: Refusal, num_samples: int) -> None:
        """Count samples that were refused or dropped."""
        family = DROPPED if reason.is_drop else REFUSED
        self._refused[family.member(reason.value)] += num_samples

    def add_report(self, report: WorkerReport) -> None:
        """Count what a worker's engines, episodes and bodies did."""
        for retry in report.retries:
            self._retries[RETRIES.member(retry.node)] += 1
        self._engine_stats += report.engine_stats
        self.devices.add_report(report)
        self._episodes.add_report(report.worker, report.episodes)

    def forget_worker(self, worker: int) -> None:
        """Note that a worker's process was replaced, and counts from zero."""
        self._episodes.forget_worker(worker)

    def add_sample(self, sample: SampleReady, *, is_trained: bool) -> None:
        """Count a sample that its source finished, of the trained stream or another one."""
        if sample.num_turns > 1:
            self._episodes.has_turns = True
        if is_trained:
            self._staleness.add_sample(sample.sample, sample.oldest, sample.newest)
            self._rewards.add_sample(sample)

    def add_result(self, result: ComputeReady) -> None:
        """Count what a node reports of a sample."""
        self._rewards.add_result(result)

    def forget_samples(self, stream: str, samples: Sequence[int]) -> None:
        """Forget samples of a trained stream that will not be trained."""
        self._staleness.forget(samples)
        self._rewards.forget(stream, samples)

    def add_batch(self, stream: str, step: int, samples: Sequence[int], group_size: int) -> None:
        """Add the metrics of the samples that a step trains to its row."""
        self.add_values(step, self._staleness.take_batch(samples, step))
        self.add_values(step, self._rewards.take_batch(stream, samples, group_size))

    def add_moved(self, num_samples: int) -> None:
        """Count samples that moved to another engine."""
        self._num_moved += num_samples

    def add_device_seconds(self, worker: int, seconds: float) -> None:
        """Add the time that a batch node took on a worker's device."""
        self._device_seconds[worker] += seconds  # type: ignore[assignment]

    def refresh(self, rollout_counts: Callable[[], Mapping[str, float]]) -> dict[str, float] | None:
        """Return the present counts for the live panel, or None if the last ones are still recent."""
        now = time.monotonic()
        if now - self._last_refresh_at < MIN_REFRESH_SECONDS:
            return None
        self._last_refresh_at = now
        states = self._episodes.current() if self._episodes.has_turns else {}
        episodes = {EPISODES.member(state): float(num) for state, num in states.items()}
        return {**rollout_counts(), **episodes}

    def finish_step(self, step: int, rollout_counts: Mapping[str, float]) -> dict[str, float]:
        """Return the row of a completed step and reset the counters.

        `rollout_counts` are the present ones of `RunState.rollout_counts`.
        """
        now = time.monotonic()
        seconds, self._last_step_at = now - self._last_step_at, now
        stats = self._engine_stats
        row = self._rows.pop(step, {})
        row[STEP_SECONDS.name] = seconds
        row[GENERATED_TOKENS_PER_SECOND.name] = stats.num_tokens / seconds
        row[BUSY_ENGINES.name] = stats.seconds / seconds / max(1, self._num_engines)
        row[BUSY_TRAINERS.name] = sum(self._device_seconds.values()) / seconds / max(1, self._num_trainers)
        if stats.num_interrupted:
            row[NUM_INTERRUPTED.name] = stats.num_interrupted
            row[KEPT_TOKENS.name] = stats.num_kept
        if self._num_moved:
            row[NUM_MOVED.name] = self._num_moved
        if tokens := row.get(BATCH_TOKENS.name):
            row[TOKENS_PER_SECOND.name] = tokens / seconds
            row[DEVICE_TOKENS_PER_SECOND.name] = tokens / seconds / self._num_devices
        if samples := row.get(BATCH_SAMPLES.name):
            row[SAMPLES_PER_SECOND.name] = samples / seconds
        row.update({**self._refused, **self._retries, **rollout_counts})
        row.update({**self._episodes.finish_step(), **self.devices.finish_step(), **self._more_values()})
        self._engine_stats, self._num_moved = EngineStats(), 0
        self._device_seconds.clear()
        self._refused.clear()
        self._retries.clear()
        return dict(sorted(row.items()))


class StalenessMetrics:
    """The weight versions of the trained stream's samples, from their generation to their step.

    The lag of a token is the version that its step begins with, minus that of the weights that generated it.
    A sample's lag is that of its oldest token. It is the sum of two parts: newest - oldest version
    (in flight), and step - newest version (in queue).
    """

    def __init__(self) -> None:
        self._versions: dict[int, tuple[int, int]] = {}
        """Sample -> versions of its oldest and newest token; only samples with generated tokens."""

    def add_sample(self, sample: int, oldest: int, newest: int) -> None:
        """Remember the versions of a generated sample."""
        if oldest >= 0:
            self._versions[sample] = oldest, newest

    def forget(self, samples: Iterable[int]) -> None:
        """Forget samples that will not be trained."""
        for sample in samples:
            self._versions.pop(sample, None)

    def take_batch(self, samples: Iterable[int], step: int) -> dict[str, float]:
        """Return the metrics of the samples that a step trains, and forget these samples.

        These are the means of the lag and its two parts, their histograms, and the largest lag.
        """
        versions = [self._versions.pop(sample) for sample in samples if sample in self._versions]
        if not versions:
            return {}
        lags = [step - oldest for oldest, _ in versions]
        in_flight = [newest - oldest for oldest, newest in versions]
        in_queue = [step - newest for _, newest in versions]
        return {
            STALENESS_MEAN.name: sum(lags) / len(versions),
            MEAN_IN_FLIGHT.name: sum(in_flight) / len(versions),
            MEAN_IN_QUEUE.name: sum(in_queue) / len(versions),
            STALENESS_MAX.name: float(max(lags)),
            **_histogram(LAG_SHARES, lags),
            **_histogram(IN_FLIGHT_SHARES, in_flight),
            **_histogram(IN_QUEUE_SHARES, in_queue),
        }


class RewardMetrics:
    """Rewards and lengths of the trained stream's samples, from their generation to their step.

    A sample's reward is what its first node reports as `reward`, or as `score` where none reports a reward.
    """

    def __init__(self, graph: Graph) -> None:
        fields = {node.name: reported_field(graph, node.name) for node in graph.nodes}
        names = [name for kind in PREFERRED for name, field in fields.items() if field == kind]
        node_of: dict[str, str] = {}
        for name in names:
            root = graph.root_stream(graph.node(name).stream)
            if root.trained:
                node_of.setdefault(root.name, name)
        self._stream_of = {name: stream for stream, name in node_of.items()}
        """Node that reports the rewards of a trained stream -> that stream."""
        self._by_source = {stream for stream, name in node_of.items() if graph.stream(stream).source == name}
        """Streams whose source reports their rewards."""
        self._rewards: dict[str, dict[int, float]] = defaultdict(dict)
        self._lengths: dict[str, dict[int, int]] = defaultdict(dict)

    def add_sample(self, sample: SampleReady) -> None:
        """Remember a generated sample's length, and its reward if its source returns one."""
        self._lengths[sample.stream][sample.sample] = sample.num_learned
        if sample.value is not None and sample.stream in self._by_source:
            self._rewards[sample.stream][sample.sample] = sample.value

    def add_result(self, result: ComputeReady) -> None:
        """Remember a sample's reward, if this node reports it."""
        stream = self._stream_of.get(result.node)
        if result.value is not None and stream is not None:
            self._rewards[stream][result.key] = result.value

    def forget(self, stream: str, samples: Iterable[int]) -> None:
        """Forget samples that will not be trained."""
        rewards, lengths = self._rewards[stream], self._lengths[stream]
        for sample in samples:
            rewards.pop(sample, None)
            lengths.pop(sample, None)

    def take_batch(self, stream: str, samples: Sequence[int], group_size: int) -> dict[str, float]:
        """Return the metrics of the samples that a step trains, and forget these samples.

        Rewards are left out where some are not known yet: those that batch nodes give, and those of samples
        that were scored before the run was resumed.
        """
        all_lengths, all_rewards = self._lengths[stream], self._rewards[stream]
        lengths = [all_lengths[x] for x in samples if x in all_lengths]
        rewards = {x: all_rewards[x] for x in samples if x in all_rewards}
        self.forget(stream, samples)
        values: dict[str, float] = {}
        if lengths:
            values[MIN_TOKENS.member(stream)] = float(min(lengths))
            values[MAX_TOKENS.member(stream)] = float(max(lengths))
        if len(rewards) == len(samples) > 1:
            values[REWARD_STD.member(stream)] = pstdev(rewards.values())
            if group_size > 1:
                groups: dict[int, set[float]] = {}
                for sample, reward in rewards.items():
                    groups.setdefault(sample // group_size, set()).add(reward)
                num_equal = sum(len(found) == 1 for found in groups.values())
                values[ZERO_STD_GROUPS.member(stream)] = num_equal / len(groups)
        return values


class EpisodeCounts:
    """Episodes of all workers by state.

    Attributes:
        has_turns: whether any episode has called a model more than once. Until then nothing is reported:
            how many single completions run is known from the groups.
    """

    def __init__(self) -> None:
        self.has_turns = False
        self._latest: dict[int, Mapping[str, int]] = {}
        """Worker -> its last report."""
        self._current: Counter[str] = Counter()
        """The sum of the last reports: thousands of workers report often."""
        self._sums: Counter[str] = Counter()
        self._num_reports = 0
        self._num_ended_before = 0
        """Episodes that had ended at the last completed step."""

    def add_report(self, worker: int, states: Mapping[str, int]) -> None:
        """Add a worker's report: its episodes in each state. `terminated` counts all that ever ended."""
        if states:
            before = self._latest.get(worker, {})
            for state in before.keys() | states.keys():
                self._current[state] += states.get(state, 0) - before.get(state, 0)
            for state, number in self._current.items():
                self._sums[state] += number
            self._latest[worker] = states
            self._num_reports += 1

    def forget_worker(self, worker: int) -> None:
        """Note that a worker's process was replaced: its episodes are gone."""
        states = self._latest.pop(worker, {})
        self._current.subtract(states)
        self._num_ended_before -= states.get(EpisodeState.TERMINATED.value, 0)

    def current(self) -> Counter[str]:
        """Return the number of episodes in each state, over all workers."""
        return self._current

    def finish_step(self) -> dict[str, float]:
        """Return the metrics since the last completed step; empty where no episode takes several turns.

        `episodes/STATE` is the mean over the reports of this time, or the last known number without a
        report. `episodes/terminated` is the number of episodes that ended.
        """
        current, sums, num_reports = self._current, self._sums, self._num_reports
        terminated = EpisodeState.TERMINATED.value
        num_ended = current[terminated] - self._num_ended_before
        self._num_ended_before = current[terminated]
        self._sums, self._num_reports = Counter(), 0
        if not self.has_turns:
            return {}
        values = {
            state: sums[state] / num_reports if num_reports else float(current[state]) for state in current
        }
        values[terminated] = float(num_ended)
        return {EPISODES.member(state): value for state, value in values.items()}


def average_fields(summaries: Iterable[Mapping[str, tuple[float, int]]]) -> dict[str, float]:
    """Return the mean of each field from the (sum, count) pairs of several workers."""
    sums: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for summary in summaries:
        for name, (total, count) in summary.items():
            sums[name] += total  # type: ignore[assignment]
            counts[name] += count
    return {name: sums[name] / counts[name] for name in sorted(counts) if counts[name]}


def _histogram(family: Metric, lags: Sequence[int]) -> dict[str, float]:
    """Return the share of each lag that occurs."""
    return {family.member(lag): num / len(lags) for lag, num in sorted(Counter(lags).items())}
