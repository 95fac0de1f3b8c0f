"""`RunObserver` passes what a run reports to its files and to the display."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from hflow.base.secrets import mask_secrets
from hflow.base.waiting import Awaited
from hflow.config.schema import ReportConfig
from hflow.launch.running.observer_thread import ObserverThread
from hflow.launch.running.shown_metrics import ShownMetrics, builtin_metrics
from hflow.launch.running.step_warnings import (
    EngineGapWarning,
    EvaluationWarning,
    NoGradientWarning,
    TruncationWarning,
)
from hflow.metrics import Metric, find_metric
from hflow.planner.plan.rows import Plan
from hflow.planner.plan.staleness import staleness_bound
from hflow.report.text.live import Display, Lags, LiveRow, RolloutView
from hflow.report.text.samples import sample_markdown
from hflow.runtime.events import Refusal
from hflow.runtime.records import step_metrics as metrics
from hflow.runtime.records.activity import Activity, OngoingWork
from hflow.runtime.records.body_log import BodyLog
from hflow.runtime.records.metrics_log import MetricsLog
from hflow.runtime.records.sample_text_files import write_samples
from hflow.runtime.records.trace import Trace
from hflow.runtime.saving.checkpoint import Checkpoints
from hflow.runtime.saving.run_directory import RunDirectory
from hflow.runtime.state import run_state
from hflow.types.body_line import BodyLine
from hflow.workers.interface import BodyRetry, Span

SMOOTHING = 0.9
"""Weight of the earlier steps in the average step time, from which the remaining time is estimated."""
WINDOW = 20
"""Steps over which shares of time and lags are averaged, so that they are steady enough to read."""


class RunObserver:
    """Writes every row of metrics and every span, and shows the few numbers that a person watches.

    Without a directory, texts of samples and what bodies print are not written. `shows_output=False`: the
    terminal has what they print already.
    """

    def __init__(
        self,
        plan: Plan,
        log: MetricsLog,
        trace: Trace,
        display: Display,
        report: ReportConfig | None = None,
        checkpoints: Checkpoints | None = None,
        directory: RunDirectory | None = None,
        observers: ObserverThread | None = None,
        *,
        shows_output: bool = True,
    ) -> None:
        report = report or ReportConfig()
        self._shown_metrics = ShownMetrics(plan, report.show)
        run = str(directory.path) if directory else plan.graph.name
        self._step_warnings = (
            EngineGapWarning(plan.graph, report.max_engine_kl, _low_precisions(plan)),
            NoGradientWarning(plan.graph, run),
            TruncationWarning(),
        )
        self._evaluations = EvaluationWarning(plan.graph)
        self._num_steps = plan.schedule.num_steps
        self._rollout = RolloutTracker(runs_ahead=staleness_bound(plan.schedule) != 0)
        self._log = log
        self._trace = trace
        self._display = display
        self._checkpoints = checkpoints
        self._samples = directory.samples if directory else None
        self._observers = observers
        show = display.note if shows_output else None
        self._bodies = BodyLog(directory.bodies, plan.graph, show) if directory else None
        self._seconds_per_step = 0.0
        self._tokens_per_second = 0.0
        self._step = 0
        self._step_start: float | None = None
        """When the step before was complete; None: workers start."""
        self._work: dict[OngoingWork, None] = {}
        """What workers do, in the order in which it began."""
        self._samples_done: Mapping[str, tuple[int, int]] = {}
        self._noted: set[tuple[str, Refusal]] = set()
        self._noted_retries: set[str] = set()
        self.shown: dict[str, float] = {}
        """Last values of what is shown, by label."""
        self.warnings: list[str] = []
        """What the run was warned of."""
        display.follow(self.activity)

    @property
    def not_evaluated(self) -> Mapping[str, tuple[int, int]]:
        """Side stream -> (refused samples, all samples) of its last evaluation, if it refused any."""
        return self._evaluations.missing

    def on_step(self, step: int, values: Mapping[str, float]) -> None:
        """Log a step and show it."""
        self._step, self._step_start = step + 1, time.time()
        seconds = values[metrics.STEP_SECONDS.name]
        average = self._seconds_per_step
        self._seconds_per_step = SMOOTHING * average + (1 - SMOOTHING) * seconds if average else seconds
        self._tokens_per_second = values.get(metrics.TOKENS_PER_SECOND.name, 0.0)
        self._write(self._step, values)
        self._tell("on_step", self._step, values)
        self._rollout.add_step(values)
        self._show(values)
        for check in self._step_warnings:
            for warning in check.check(self._step, values):
                self.on_warning(warning)

    def on_rewind(self, step: int) -> None:
        """Continue the curves from a checkpoint of `step` completed steps."""
        self._log.rewind(step)

    def on_rollout(self, values: Mapping[str, float], samples: Mapping[str, tuple[int, int]]) -> None:
        """Show the present state of generation, while a step is under way."""
        self._rollout.update(values)
        self._samples_done = samples
        self._display.refresh(self._row({}))

    def on_evaluation(self, step: int, values: Mapping[str, float]) -> None:
        """Log an evaluation and show it."""
        self._write(step, values)
        self._tell("on_evaluation", step, values)
        if values:
            self._show(values)
        for warning in self._evaluations.check(step, values):
            self.on_warning(warning)

    def on_samples(self, number: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write the texts of some samples of a batch."""
        if rows:
            self._tell("on_samples", number, rows)
        if self._samples is not None and rows:
            write_samples(self._samples, number, rows)
            by_tag: dict[str, list[str]] = {}
            for row in rows:
                tag = f"refused/{row['stream']}" if "refused_by" in row else f"samples/{row['stream']}"
                by_tag.setdefault(tag, []).append(sample_markdown(row))
            for tag, texts in by_tag.items():
                self._log.write_text(number, tag, "\n\n---\n\n".join(texts))

    def on_refusal(self, node: str, reason: Refusal, message: str) -> None:
        """Show the first failure of each kind; all are counted in the metrics."""
        self._tell("on_refusal", node, str(reason), mask_secrets(message))
        self._evaluations.add_refusal(node, message)
        if message and not reason.is_drop and (node, reason) not in self._noted:
            self._noted.add((node, reason))
            counted = metrics.REFUSED.member(reason)
            self._display.note(f"{node} refused a sample ({reason}): {message}; more count as {counted}")

    def on_body_lines(self, worker: int, lines: Sequence[BodyLine]) -> None:
        """Write what bodies have printed, and show some of it."""
        if self._bodies is not None:
            self._bodies.write(worker, lines)

    def on_retry(self, worker: int, retry: BodyRetry) -> None:
        """Keep a span of the wait, and show the first of each node; all are counted in the metrics."""
        end = retry.start + retry.wait
        details = {"key": retry.key, "message": retry.message}
        self._trace.add(worker, Span(f"retry {retry.node}", "bodies", retry.start, end, details))
        if retry.node not in self._noted_retries:
            self._noted_retries.add(retry.node)
            counted = metrics.RETRIES.member(retry.node)
            self._display.note(f"{retry.node} is tried again: {retry.message}; more count as {counted}")

    def on_warning(self, warning: str) -> None:
        """Show a warning, and keep it for the summary."""
        self.warnings.append(warning)
        self._display.note(warning)
        self._tell("on_warning", mask_secrets(warning))

    def close(self, reason: str) -> None:
        """Let the observers finish: the run is `done`, was `stopped`, or has `failed`."""
        if self._bodies is not None:
            self._bodies.close()
        if self._observers is not None:
            self._observers.close(reason)
            self._warn_of_failures()

    def on_progress(self, phase: str) -> None:
        """Show which phase of the start has begun."""
        self._display.note(phase)

    def wait_for(self, what: Awaited) -> AbstractContextManager[None]:
        """Show what workers that start wait for. Nothing of an earlier start runs any more."""
        self._work.clear()
        self._samples_done, self._step_start = {}, None
        return self._display.wait_for(what)

    def on_begin(self, work: OngoingWork) -> None:
        """Show what workers begin to do."""
        if self._step_start is None:
            self._step_start = time.time()
        self._work[work] = None

    def on_finish(self, work: OngoingWork) -> None:
        """Show that work has ended."""
        self._work.pop(work, None)

    def activity(self) -> Activity:
        """Return the activity of the run at this moment. Called from any thread."""
        return Activity(
            step_start=self._step_start,
            awaited=self._display.awaited,
            work=tuple(self._work),
            samples=self._samples_done,
            seconds_per_step=self._seconds_per_step,
            warnings=tuple(self.warnings),
        )

    def on_span(self, worker: int, span: Span) -> None:
        """Keep a span for the trace."""
        self._trace.add(worker, span)

    def _tell(self, method: str, *arguments: Any) -> None:
        """Pass a report to the observers, and warn of those that have failed."""
        if self._observers is not None:
            self._observers.send(method, *arguments)
            self._warn_of_failures()

    def _warn_of_failures(self) -> None:
        assert self._observers is not None
        for failure in self._observers.failures():
            self.on_warning(failure)

    def _write(self, step: int, values: Mapping[str, float]) -> None:
        self._log.write(step, values)
        if self._checkpoints is not None:
            self._checkpoints.add_values(step, values)

    def _show(self, values: Mapping[str, float]) -> None:
        shown = self._shown_metrics.pick(values)
        self.shown.update(shown)
        self._display.update(self._row(shown))

    def _row(self, shown: Mapping[str, float]) -> LiveRow:
        return LiveRow(
            self._step,
            self._num_steps,
            shown,
            self._tokens_per_second,
            self._seconds_per_step,
            self._rollout.view(),
        )


class RolloutTracker:
    """Sums and averages over steps of the metrics that are declared `live`, for the panel."""

    def __init__(self, *, runs_ahead: bool) -> None:
        self._runs_ahead = runs_ahead
        self._live = [metric for metric in builtin_metrics() if metric.live]
        self._rows: deque[Mapping[str, float]] = deque(maxlen=WINDOW)
        self._sums: Counter[str] = Counter()
        self._latest: dict[str, float] = {}

    def add_step(self, values: Mapping[str, float]) -> None:
        """Add the row of a completed step."""
        self._rows.append(values)
        for name, value in values.items():
            metric = find_metric(name, self._live)
            if metric is None:
                continue
            if metric.live == "sum":
                self._sums[name] += int(value)
            elif metric.live == "last":
                self._latest[name] = value

    def update(self, values: Mapping[str, float]) -> None:
        """Take the present counts, while a step is under way."""
        self._latest.update(values)

    def view(self) -> RolloutView | None:
        """Return the panel's view of generation; None where generation and training take turns."""
        episodes = _family(metrics.EPISODES, self._latest)
        if not (self._runs_ahead or episodes):
            return None
        version, max_lag = self._latest.get(run_state.VERSION.name), metrics.STALENESS_MAX.name
        return RolloutView(
            version=None if version is None else int(version),
            num_running=int(self._latest.get(run_state.NUM_RUNNING.name, 0)),
            num_queued=int(self._latest.get(run_state.NUM_QUEUED.name, 0)),
            num_accepted=int(self._latest.get(run_state.NUM_ACCEPTED.name, 0)),
            refused=_family(metrics.REFUSED, self._sums),
            dropped=_family(metrics.DROPPED, self._sums),
            num_interrupted=self._sums[metrics.NUM_INTERRUPTED.name],
            num_kept_tokens=self._sums[metrics.KEPT_TOKENS.name],
            engines=self._time_share(metrics.BUSY_ENGINES),
            trainers=self._time_share(metrics.BUSY_TRAINERS),
            lags=Lags(
                total=self._lag_shares(metrics.LAG_SHARES),
                in_flight=self._lag_shares(metrics.IN_FLIGHT_SHARES),
                in_queue=self._lag_shares(metrics.IN_QUEUE_SHARES),
                maximum=max((int(row[max_lag]) for row in self._rows if max_lag in row), default=None),
            ),
            episodes=episodes,
            runs_ahead=self._runs_ahead,
        )

    def _time_share(self, metric: Metric) -> float | None:
        """Return a share of the time of the last steps; None before the first step."""
        seconds = sum(row[metrics.STEP_SECONDS.name] for row in self._rows)
        busy = sum(row[metric.name] * row[metrics.STEP_SECONDS.name] for row in self._rows)
        return busy / seconds if seconds else None

    def _lag_shares(self, metric: Metric) -> dict[int, float]:
        """Return lag -> share of the samples, averaged over the last steps."""
        rows = [row for row in self._rows if metrics.STALENESS_MAX.name in row]
        shares: dict[int, float] = {}
        for row in rows:
            for name, share in row.items():
                if lag := metric.key_of(name):
                    shares[int(lag)] = shares.get(int(lag), 0.0) + share / len(rows)
        return dict(sorted(shares.items()))


def _family(metric: Metric, values: Mapping[str, float]) -> dict[str, int]:
    """Return key -> value of the members of a family."""
    members = ((metric.key_of(name), value) for name, value in values.items())
    return {key: int(value) for key, value in members if key is not None}


def _low_precisions(plan: Plan) -> dict[str, str]:
    """Return the models that an engine or the trainer quantises, with the setting that ends it."""
    settings, found = dict(plan.settings), {}
    for model in plan.graph.models:
        for key in ("fp8", "gen.cache_dtype", "gen.quantization"):
            if settings.get(f"models.{model.name}.{key}") is not None:
                found[model.name] = f"{key}=null"
    return found
