"""Hands what a run reports to its files and to the display."""

from __future__ import annotations

from collections.abc import Container, Mapping

from hflow.graph.ir import Graph, Level, Node
from hflow.planner.ir import Plan
from hflow.planner.reported_field import reported_field
from hflow.planner.staleness import staleness_bound
from hflow.report.live import Display, LiveRow
from hflow.report.live_rollout import Tally
from hflow.runtime.events import Refusal
from hflow.runtime.execution.metrics_log import MetricsLog
from hflow.runtime.execution.trace import Trace
from hflow.workers.interface import Span

SMOOTHING = 0.9
"""Weight of the past in the step time that the time left is foretold from."""


class RunObserver:
    """Writes every row and span, and shows the few numbers that a person watches."""

    def __init__(self, plan: Plan, log: MetricsLog, trace: Trace, display: Display) -> None:
        self._labels = _labels(plan)
        self._num_steps = plan.schedule.num_steps
        self._tally = Tally(runs_ahead=staleness_bound(plan.schedule) != 0)
        self._log = log
        self._trace = trace
        self._display = display
        self._seconds = 0.0
        self._speed = 0.0
        self._step = 0
        self._noted: set[tuple[str, Refusal]] = set()
        self.shown: dict[str, float] = {}
        """Last values of what is shown, by label."""

    def on_step(self, step: int, values: Mapping[str, float]) -> None:
        """Log a step and show it."""
        self._step = step + 1
        seconds = values["time/step_seconds"]
        self._seconds = SMOOTHING * self._seconds + (1 - SMOOTHING) * seconds if self._seconds else seconds
        self._speed = values.get("time/tokens_per_second", 0.0)
        self._log.write(self._step, values)
        self._tally.step(values)
        self._show(values)

    def on_rollout(self, values: Mapping[str, float]) -> None:
        """Show how generation stands between two steps."""
        self._tally.glance(values)
        self._display.glance(self._row({}))

    def on_evaluation(self, step: int, values: Mapping[str, float]) -> None:
        """Log an evaluation and show it."""
        self._log.write(step, values)
        if values:
            self._show(values)

    def on_refusal(self, node: str, reason: Refusal, message: str) -> None:
        """Show the first failure of each kind; all are counted in the metrics."""
        if message and not reason.is_drop and (node, reason) not in self._noted:
            self._noted.add((node, reason))
            self._display.note(
                f"{node} refused a sample ({reason}): {message}; more count as refused/{reason}"
            )

    def on_span(self, worker: int, span: Span) -> None:
        """Keep a span for the trace."""
        self._trace.add(worker, span)

    def _show(self, values: Mapping[str, float]) -> None:
        shown = {label: values[name] for name, label in self._labels.items() if name in values}
        self.shown.update(shown)
        self._display.update(self._row(shown))

    def _row(self, shown: Mapping[str, float]) -> LiveRow:
        return LiveRow(self._step, self._num_steps, shown, self._speed, self._seconds, self._tally.rollout())


def _labels(plan: Plan) -> dict[str, str]:
    """Metric -> label: losses, and what samples are given, on held-out streams groups too."""
    graph, labels = plan.graph, {}
    for node in graph.nodes:
        if node.spec.verb == "train":
            labels[f"{node.name}/loss"] = "loss" if _is_only(graph, "train") else f"{node.name} loss"
        trained = graph.root_stream(node.stream).trained
        levels = (Level.SAMPLE,) if trained else (Level.SAMPLE, Level.GROUP)
        for field in _shown_fields(graph, node, levels):
            labels[f"{node.stream}/{field}"] = field if trained else f"held-out {field}"
    return labels


def _shown_fields(graph: Graph, node: Node, levels: Container[Level]) -> list[str]:
    """All that a body of these levels returns; else the number that the node tells of each sample."""
    if node.spec.runs_as_compute and node.spec.level in levels:
        return [returned.field for returned in node.spec.returns]
    told = reported_field(graph, node.name)
    return [told] if told else []


def _is_only(graph: Graph, verb: str) -> bool:
    return sum(node.spec.verb == verb for node in graph.nodes) == 1
