"""`DeviceUse`: the seconds of each node, the share of the devices' peak that training reaches, and memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

from hflow.base.intervals import covered_length
from hflow.metrics import declare
from hflow.planner.forecast.cost.flops import Work, training_flops
from hflow.planner.forecast.cost.roofline import Rates
from hflow.planner.plan.hardware import GIB, Hardware
from hflow.planner.plan.rows import Plan
from hflow.planner.plan.traits import traits
from hflow.workers.interface import NodeResult, Span, WorkerReport

NODE_SECONDS = declare(
    "seconds/{node}",
    "s",
    "seconds of a node on the worker where it took longest: those of the step's batch, or, of a node that "
    "runs as samples arrive, those since the row before. Those of a generation replica, such as "
    "`seconds/actor@gen`, load new weights",
)
MFU = declare(
    "{node}/mfu",
    "share",
    "model FLOPs utilization: the FLOPs that training on the batch needs, over those that the node's devices "
    "make at their peak in `seconds/NODE`",
)
PEAK_MEMORY = declare(
    "memory/{group}",
    "GiB",
    "most memory in use on a device of this group so far: on a GPU by all processes, on a CPU the resident "
    "memory of the worker's process",
)
PLANNED_MEMORY = declare("memory_planned/{group}", "GiB", "the plan's estimate of `memory/GROUP`")
COMPUTED, LEARNED = "computed_tokens", "num_tokens"
"""Metrics of a train node: tokens that passed through the model, and those of which it computed the loss."""


class DeviceUse:
    """Counts what devices did since the last completed step, and the most memory that they had."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._engine_nodes = _engine_nodes(plan)
        self._names = {node.name: node.name for node in plan.graph.nodes}
        self._names |= {f"weights {route.dst}": route.dst for route in plan.weights}
        self._intervals: dict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)
        """(name, worker) -> when it ran since the last completed step."""
        self._engine_seconds: dict[tuple[str, int], float] = defaultdict(float)
        self._peak_bytes: dict[int, int] = {}
        """Worker -> the most memory that it reported."""
        self._measured = [group for group in plan.groups if _is_measured(plan, group.devices)]
        self._planned = _planned_memory(plan)

    def add_report(self, report: WorkerReport) -> None:
        """Count the spans and engines of a worker's report."""
        worker, seconds = report.worker, report.engine_stats.seconds
        for span in report.spans:
            self.add_span(worker, span)
        if seconds and worker in self._engine_nodes:
            self._engine_seconds[self._engine_nodes[worker], worker] += seconds
        self._peak_bytes[worker] = max(report.peak_bytes, self._peak_bytes.get(worker, 0))

    def add_span(self, worker: int, span: Span) -> None:
        """Count a span, if it is that of a node or of new weights."""
        if name := self._names.get(span.name):
            self._intervals[name, worker].append((span.start, span.end))

    def batch_node(
        self, node: str, results: Sequence[NodeResult], lengths: Collection[int]
    ) -> dict[str, float]:
        """Return the metrics of a node that ran on a batch.

        `lengths` are the tokens of each sample of the batch.
        """
        seconds = max((result.span.end - result.span.start for result in results), default=0.0)
        values = {NODE_SECONDS.member(node): seconds}
        counted = next((result.metrics for result in results if COMPUTED in result.metrics), {})
        if self._plan.graph.node(node).spec.verb == "train" and counted and seconds:
            replica = self._plan.replica(self._plan.placement(node).replicas[0])
            hardware = self._plan.hardware.at(replica.workers[0])
            peak = len(replica.workers) * peak_flops(hardware, replica.dtype)
            if flops := train_node_flops(self._plan, node, lengths, counted[COMPUTED], counted[LEARNED]):
                values[MFU.member(node)] = flops / (seconds * peak)
        return values

    def finish_step(self) -> dict[str, float]:
        """Return the metrics since the last completed step, and reset the seconds."""
        seconds: dict[str, float] = {}
        by_worker = {key: covered_length(parts) for key, parts in self._intervals.items()}
        for (name, _), value in (*by_worker.items(), *self._engine_seconds.items()):
            seconds[name] = max(value, seconds.get(name, 0.0))
        self._intervals.clear()
        self._engine_seconds.clear()
        return {**{NODE_SECONDS.member(name): value for name, value in seconds.items()}, **self._memory()}

    def _memory(self) -> dict[str, float]:
        values: dict[str, float] = {}
        for group in self._measured:
            if peak := max(self._peak_bytes.get(worker, 0) for worker in group.devices):
                values[PEAK_MEMORY.member(group.name)] = peak / GIB
                if planned := self._planned.get(group.name):
                    values[PLANNED_MEMORY.member(group.name)] = planned / GIB
        return values


def peak_flops(hardware: Hardware, dtype: str) -> float:
    """Return the FLOP/s of a device that MFU is a share of.

    They are those of a GPU's data sheet, and of a CPU, which has none, those of large products of matrices by
    the calibration.
    """
    if hardware.device.type == "cpu":
        return Rates.of(hardware, dtype).flops
    return hardware.device.tflops[dtype] * 1e12


def train_node_flops(
    plan: Plan, node: str, lengths: Collection[int], num_computed: float, num_learned: float
) -> float:
    """Return the FLOPs that a train node needs for a batch; 0 if the sizes of its model are unknown.

    Args:
        lengths: tokens of each sample. Those of several trajectories count as one sequence.
        num_computed: tokens that passed through the model, over all epochs.
        num_learned: tokens of which the node computed the loss, in one epoch.
    """
    replica = plan.replica(plan.placement(node).replicas[0])
    shape, epochs = dict(plan.shapes).get(replica.model), dict(plan.cuts)[node].epochs
    if shape is None:
        return 0.0
    work = Work(
        groups=0.0,  # no FLOPs depend on it
        sequences=epochs * len(lengths),
        tokens=epochs * sum(lengths),
        rows=num_computed,
        learned=epochs * num_learned,
        squares=epochs * sum(length**2 for length in lengths),
    )
    return training_flops(shape, work, has_adapters=replica.adapter_parameters > 0)


def _engine_nodes(plan: Plan) -> dict[int, str]:
    """Return worker -> the node that its engine generates for; the trained one of several."""
    sources = [stream.source for stream in plan.schedule.streams if stream.replicas]
    others = [node.name for node in plan.graph.nodes if node.spec.verb == "generate"]
    nodes: dict[int, str] = {}
    for node in dict.fromkeys((*sources, *others)):
        for name in plan.placement(node).replicas:
            for worker in plan.replica(name).workers:
                nodes.setdefault(worker, node)
    return nodes


def _is_measured(plan: Plan, devices: Sequence[int]) -> bool:
    """Return whether workers measure all memory of these devices.

    An engine in a process of its own has memory that the worker of a CPU does not see.
    """
    engines = [r for r in plan.replicas if r.role == "gen" and not set(devices).isdisjoint(r.workers)]
    return plan.cluster.device != "cpu" or not any(traits(r.backend).has_own_process for r in engines)


def _planned_memory(plan: Plan) -> Mapping[str, int]:
    """Return device group -> the largest estimate of a device; empty if the sizes of a model are unknown."""
    if {replica.model for replica in plan.replicas} - dict(plan.shapes).keys():
        return {}
    peaks = plan.forecast.peaks()
    return {
        group.name: max((peaks[d].total for d in group.devices if d in peaks), default=0)
        for group in plan.groups
    }
