"""`StateParts`: everything that `RunState` holds, assembled from a schedule.

Invariant: the parts change, but which parts there are, and who refers to whom, does not.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hflow.graph.ir import Level
from hflow.planner.plan.rows import Schedule, ScheduledNode, ScheduledStream
from hflow.runtime.state.device_state import DeviceTurns, EngineState
from hflow.runtime.state.evaluation import Evaluation
from hflow.runtime.state.groups import Emit
from hflow.runtime.state.progress import RunProgress
from hflow.runtime.state.rules import EngineWeights
from hflow.runtime.state.stream_state import StreamState
from hflow.runtime.state.streaming_inference import StreamingReplicas
from hflow.runtime.state.trained_stream import TrainedStream


@dataclass(frozen=True, eq=False)
class StateParts:
    """The parts of a run's state."""

    schedule: Schedule
    emit: Emit
    progress: RunProgress
    trained: TrainedStream
    evaluations: dict[str, Evaluation]
    """Side streams by name."""
    devices: tuple[DeviceTurns, ...]
    engines: dict[str, EngineState]
    devices_of_engine: dict[str, tuple[DeviceTurns, ...]]
    """Engine -> the device groups that it shares with batch nodes. Separate engines are not in it."""
    devices_of_node: dict[str, tuple[DeviceTurns, ...]]
    """Batch node -> the device groups that it runs on, all at once."""
    engines_of: dict[str, tuple[EngineState, ...]]
    """Stream -> the engines that its source uses."""
    shared_devices: dict[str, tuple[DeviceTurns, ...]]
    """Stream -> the device groups that its engines share with batch nodes."""
    trained_nodes: tuple[str, ...]
    """Batch nodes of the trained stream."""
    batch_needs: dict[str, tuple[ScheduledNode, ...]]
    """Batch node -> the batch nodes that must be done before it in the same step."""
    streams: tuple[StreamState, ...]
    """The trained stream, then side streams."""
    save_nodes: tuple[ScheduledNode, ...]
    """Batch nodes that save a model."""
    streaming: StreamingReplicas
    """Devices on which models work on arriving samples."""

    @property
    def has_side_nodes(self) -> bool:
        """Whether side streams have batch nodes, so that the final cycle is reported too."""
        return len(self.trained_nodes) < len(self.batch_needs)

    def engine_version(self, stream: str) -> int:
        """Return the version of the weights that generate a stream; -1 without an engine."""
        return min((engine.version for engine in self.engines_of[stream]), default=-1)

    def engines_with(self, model: str) -> list[EngineState]:
        """Return the engines that receive a model's weights."""
        return [engine for engine in self.engines.values() if model in engine.models]


def assemble(schedule: Schedule, emit: Emit) -> StateParts:
    """Build the state before `Started`."""
    progress = RunProgress(schedule)
    streams = _streams(schedule)
    trained_stream, *side_streams = streams
    streaming = StreamingReplicas(schedule, emit)
    emit_or_queue = streaming.emit_or_queue if streaming.queues else emit
    trained = TrainedStream(trained_stream, schedule, progress, emit_or_queue)
    models = _models_of_replicas(schedule, progress)
    weights = {replica: EngineWeights() for replica in models}
    evaluations = {
        stream.name: Evaluation(
            stream,
            schedule.nodes,
            _union(models[replica] for replica in stream.replicas),
            tuple(weights[replica] for replica in stream.replicas),
            progress,
            emit_or_queue,
        )
        for stream in side_streams
    }
    engines = _engines(streams, schedule, models, weights, evaluations)
    devices = _devices(schedule, engines)
    engines_of = {s.name: tuple(engines[name] for name in s.replicas) for s in streams}
    batch_nodes = {node.name: node for node in schedule.nodes if node.level is Level.BATCH}
    return StateParts(
        schedule=schedule,
        emit=emit,
        progress=progress,
        trained=trained,
        evaluations=evaluations,
        devices=devices,
        engines=engines,
        devices_of_engine={
            name: shared
            for name, engine in engines.items()
            if (shared := tuple(device for device in devices if engine in device.engines))
        },
        devices_of_node={
            name: tuple(device for device in devices if node in device.nodes)
            for name, node in batch_nodes.items()
        },
        engines_of=engines_of,
        shared_devices={
            name: tuple(d for d in devices if not set(used).isdisjoint(d.engines))
            for name, used in engines_of.items()
        },
        trained_nodes=tuple(node.name for node in batch_nodes.values() if node.stream == trained_stream.name),
        batch_needs={
            node.name: tuple(batch_nodes[need] for need in node.needs if need in batch_nodes)
            for node in batch_nodes.values()
        },
        streams=(trained, *evaluations.values()),
        save_nodes=tuple(node for node in batch_nodes.values() if node.saves),
        streaming=streaming,
    )


def _streams(schedule: Schedule) -> tuple[ScheduledStream, ...]:
    """Return the trained stream, then side streams. A run without steps gets one that opens no group."""
    if schedule.num_steps:
        return schedule.streams
    return (ScheduledStream("", "", group_size=1, batch=1, replicas=(), models=()), *schedule.streams)


def _union(parts: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for part in parts for name in part))


def _models_of_replicas(schedule: Schedule, progress: RunProgress) -> dict[str, tuple[str, ...]]:
    """Return, for each generation replica, the trained models of all streams that use it."""
    replicas = _union(stream.replicas for stream in schedule.streams)
    return {
        name: progress.trained_models(_union(s.models for s in schedule.streams if name in s.replicas))
        for name in replicas
    }


def _engines(
    streams: tuple[ScheduledStream, ...],
    schedule: Schedule,
    models: dict[str, tuple[str, ...]],
    weights: dict[str, EngineWeights],
    evaluations: dict[str, Evaluation],
) -> dict[str, EngineState]:
    trained_stream, *side_streams = streams
    separate = dict(schedule.publishers)
    return {
        name: EngineState(
            name,
            models=models[name],
            serves_trained_stream=name in trained_stream.replicas,
            evaluations=tuple(evaluations[s.name] for s in side_streams if name in s.replicas),
            is_separate=name in separate,
            weights=weights[name],
        )
        for name in models
    }


def _devices(schedule: Schedule, engines: dict[str, EngineState]) -> tuple[DeviceTurns, ...]:
    """Return the device groups in order. A batch node without a group gets a group of its own."""
    nodes = {node.name: node for node in schedule.nodes}
    engines_of_group = dict(schedule.shared)
    ordered = [
        DeviceTurns(
            group,
            nodes=tuple(nodes[name] for name in names),
            engines=tuple(engines[name] for name in engines_of_group.get(group, ()) if name in engines),
        )
        for group, names in schedule.orders
    ]
    in_groups = {name for _, names in schedule.orders for name in names}
    ungrouped = [n for n in schedule.nodes if n.level is Level.BATCH and n.name not in in_groups]
    return (*ordered, *(DeviceTurns(node.name, nodes=(node,)) for node in ungrouped))
