"""Hands what a run reports to its files and to the display."""

from __future__ import annotations

from collections.abc import Mapping

from hflow.graph.ir import Graph, Level
from hflow.report.live import Display, LiveRow
from hflow.runtime.events import Refusal
from hflow.runtime.metrics import MetricsLog
from hflow.runtime.trace import Trace
from hflow.workers.base import Span

SMOOTHING = 0.9
"""Weight of the past in the step time that the time left is foretold from."""


class RunObserver:
    """Writes every row and span, and shows the few numbers that a person watches."""

    def __init__(self, graph: Graph, num_steps: int, log: MetricsLog, trace: Trace, display: Display) -> None:
        self._labels = _labels(graph)
        self._num_steps = num_steps
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
        self._show(values)

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
        self._display.update(LiveRow(self._step, self._num_steps, shown, self._speed, self._seconds))


def _labels(graph: Graph) -> dict[str, str]:
    """Metric -> label: losses, what sample-level bodies score, and on held-out streams groups' scores too."""
    labels = {}
    for node in graph.nodes:
        if node.spec.verb == "train":
            labels[f"{node.name}/loss"] = "loss" if _is_only(graph, "train") else f"{node.name} loss"
        trained = graph.stream(node.stream).trained
        shown = (Level.SAMPLE,) if trained else (Level.SAMPLE, Level.GROUP)
        if node.spec.runs_as_compute and node.spec.level in shown:
            for returned in node.spec.returns:
                held_out = "" if trained else "held-out "
                labels[f"{node.stream}/{returned.field}"] = held_out + returned.field
    return labels


def _is_only(graph: Graph, verb: str) -> bool:
    return sum(node.spec.verb == verb for node in graph.nodes) == 1
