"""Which metrics a run shows: the default, and the choice of `report.show`."""

from __future__ import annotations

import importlib
from collections.abc import Container, Mapping, Sequence
from fnmatch import fnmatchcase

from hflow.base.errors import ConfigError, nearest
from hflow.config import RunConfig
from hflow.graph.ir import TRAJECTORY_FIELDS, Graph, Level, Node, Stream
from hflow.graph.queries import reported_field
from hflow.metrics import Metric, declared
from hflow.planner.plan.rows import Plan
from hflow.training.interface import LOSS
from hflow.types import Unit
from hflow.types.engine import EPISODE_COUNTS

DECLARING_MODULES = (
    "hflow.runtime.execution.batch_runner",
    "hflow.runtime.records.device_use",
    "hflow.runtime.records.step_metrics",
    "hflow.runtime.state.run_state",
    "hflow.services.limits",
)
"""The modules that declare metrics, besides `hflow.training.interface`, for those who ask for them."""


def builtin_metrics() -> tuple[Metric, ...]:
    """Return all metrics that hflow computes by itself, sorted by name."""
    for module in DECLARING_MODULES:
        importlib.import_module(module)
    return declared()


class ShownMetrics:
    """Picks the metrics that the live panel and the plain lines show (None: the default), and labels them."""

    def __init__(self, plan: Plan, patterns: Sequence[str] | None = None) -> None:
        self._labels = _default_labels(plan)
        self._patterns = patterns

    def pick(self, values: Mapping[str, float]) -> dict[str, float]:
        """Return label -> value of what is shown, in the order of the patterns."""
        if self._patterns is None:
            return {label: values[name] for name, label in self._labels.items() if name in values}
        names = (name for pattern in self._patterns for name in values if fnmatchcase(name, pattern))
        return {self._labels.get(name, name): values[name] for name in names}


def check_metric_names(config: RunConfig, graph: Graph) -> None:
    """Refuse names in `report.show` and `keep_best` that no metric of this recipe can have.

    The metrics that a node returns are known only when it runs, so any `NODE/name` is accepted for one that
    may return some.

    Raises:
        ConfigError: for the first such name, with the nearest metric.
    """
    best = () if config.keep_best is None else (config.keep_best.removeprefix("-"),)
    patterns = [
        *(("report.show", shown) for shown in config.report.show or ()),
        *(("keep_best", b) for b in best),
    ]
    for key, pattern in patterns:
        if not _can_exist(pattern, graph):
            raise ConfigError(
                f"{key}: {pattern!r} is not a metric of this recipe. Use a name from docs/metrics.md, "
                f"NODE/NAME for what a node returns, or STREAM/FIELD{nearest(pattern, _names(graph))}"
            )


def _can_exist(pattern: str, graph: Graph) -> bool:
    streams = {stream.name for stream in graph.streams}
    nodes = {node.name for node in graph.nodes} - streams  # a stream is named after its source
    first, slash, last = pattern.partition("/")
    if slash and any(fnmatchcase(node, first) for node in nodes):
        return True
    if first in streams and any(last.startswith(f"{node.name}.") for node in graph.nodes):
        return True
    source = next((node for node in graph.nodes if node.name == first and first in streams), None)
    if source is not None and (source.spec.metrics or last in EPISODE_COUNTS):
        return True
    if any(metric.key_of(pattern) is not None for metric in builtin_metrics() if "{node}" not in metric.name):
        return True
    return any(fnmatchcase(name, pattern) for name in _names(graph))


def _names(graph: Graph) -> list[str]:
    """Return names to match a pattern against: declared metrics, fields of streams, and losses."""
    fields = {f"{stream.name}/{field}" for stream in graph.streams for field in _number_fields(graph, stream)}
    losses = {LOSS.member(node.name) for node in graph.nodes if node.spec.verb == "train"}
    return sorted({*fields, *losses, *(m.member("0") for m in builtin_metrics() if "{node}" not in m.name)})


def _number_fields(graph: Graph, stream: Stream) -> set[str]:
    """Return the fields of a stream that are averaged over its samples."""
    units = dict(TRAJECTORY_FIELDS)
    for dataset in graph.datasets:
        if dataset.name == stream.dataset:
            units |= dict(dataset.columns)
    for node in graph.nodes:
        if node.stream == stream.name:
            units |= {returned.field: returned.unit for returned in node.spec.returns}
    return {field for field, unit in units.items() if unit in (Unit.SEQUENCE, Unit.GROUP)} - {"group"}


def _default_labels(plan: Plan) -> dict[str, str]:
    """Return metric -> label of losses and scores of samples, on held-out streams also of groups.

    A policy's entropy and the mean length of what it generates are shown too, as they tell that it collapses.
    """
    graph, labels = plan.graph, {}
    lengths = {}
    num_train_nodes = sum(node.spec.verb == "train" for node in graph.nodes)
    for node in graph.nodes:
        if node.spec.verb == "train":
            mark = "" if num_train_nodes == 1 else f"{node.name} "
            labels[LOSS.member(node.name)] = f"{mark}loss"
            labels[f"{node.name}/entropy"] = f"{mark}entropy"
        is_trained = graph.root_stream(node.stream).trained
        levels = (Level.SAMPLE,) if is_trained else (Level.SAMPLE, Level.GROUP)
        for field in _scores(graph, node, levels):
            is_held_out = graph.learns and not is_trained
            labels[f"{node.stream}/{field}"] = f"held-out {field}" if is_held_out else field
        if node.spec.verb == "generate" and is_trained:
            lengths[f"{node.stream}/num_tokens"] = "mean length"
    return labels | lengths


def _scores(graph: Graph, node: Node, levels: Container[Level]) -> list[str]:
    """Return all fields of a body of these levels; for other nodes, the number reported for each sample."""
    if node.spec.verb == "compute" and node.spec.level in levels:
        return [returned.field for returned in node.spec.returns]
    field = reported_field(graph, node.name)
    return [field] if field else []
