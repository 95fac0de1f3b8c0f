"""Everything that `RunState` holds, assembled from a schedule."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hflow.graph.ir import Level
from hflow.planner.ir import Schedule, ScheduledNode
from hflow.runtime.state.device_state import DeviceOrder, Engine
from hflow.runtime.state.evaluation import Evaluation
from hflow.runtime.state.groups import Emit
from hflow.runtime.state.progress import Progress
from hflow.runtime.state.rollout import Rollout
from hflow.runtime.state.stream_state import StreamState
from hflow.runtime.state.streaming_inference import StreamingReplicas
from hflow.runtime.state.weight_version import WeightCopy


@dataclass(frozen=True, eq=False)
class StateParts:
    """The parts of a run's state. The parts change, the set of parts does not."""

    schedule: Schedule
    emit: Emit
    progress: Progress
    rollout: Rollout
    evaluations: dict[str, Evaluation]
    """Side streams by name."""
    devices: tuple[DeviceOrder, ...]
    engines: dict[str, Engine]
    device_of: dict[str, DeviceOrder]
    """engine -> the group that it shares with batch nodes; separate engines are not in it."""
    engines_of: dict[str, tuple[Engine, ...]]
    """stream -> the engines that its source uses."""
    shared_by: dict[str, tuple[DeviceOrder, ...]]
    """stream -> groups shared with batch nodes on which its engines take turns."""
    trained_nodes: tuple[str, ...]
    """Batch nodes of the trained stream."""
    batch_needs: dict[str, tuple[ScheduledNode, ...]]
    """batch node -> batch nodes that come before it in the same step."""
    streams: tuple[StreamState, ...]
    """The trained stream, then side streams."""
    stations: StreamingReplicas
    """Devices on which models work on what arrives."""

    @property
    def has_side_nodes(self) -> bool:
        """Whether side streams have batch nodes, so that the final cycle is reported too."""
        return len(self.trained_nodes) < len(self.batch_needs)

    def engine_version(self, stream: str) -> int:
        """The version of the weights that a stream is generated with; -1 where there is no engine."""
        return min((engine.version for engine in self.engines_of[stream]), default=-1)

    def readers_of(self, model: str) -> list[Engine]:
        """Engines that are given a model's weights."""
        return [engine for engine in self.engines.values() if model in engine.models]


def assemble(schedule: Schedule, emit: Emit) -> StateParts:
    """Build the state that precedes `Started`."""
    progress = Progress(schedule)
    trained, *side = schedule.streams
    stations = StreamingReplicas(schedule, emit)
    rollout = Rollout(trained, schedule, progress, stations.pass_on)
    models = _models_by_replica(schedule, progress)
    copies = {name: WeightCopy() for name in models}
    evaluations = {
        s.name: Evaluation(
            s,
            schedule.nodes,
            _union(models[r] for r in s.replicas),
            tuple(copies[r] for r in s.replicas),
            progress,
            stations.pass_on,
        )
        for s in side
    }
    engines = _engines(schedule, models, copies, evaluations)
    devices = _devices(schedule, engines)
    engines_of = {s.name: tuple(engines[name] for name in s.replicas) for s in schedule.streams}
    batch = {node.name: node for node in schedule.nodes if node.level is Level.BATCH}
    return StateParts(
        schedule=schedule,
        emit=emit,
        progress=progress,
        rollout=rollout,
        evaluations=evaluations,
        devices=devices,
        engines=engines,
        device_of={engine.name: device for device in devices for engine in device.engines},
        engines_of=engines_of,
        shared_by={
            name: tuple(d for d in devices if not set(used).isdisjoint(d.engines))
            for name, used in engines_of.items()
        },
        trained_nodes=tuple(node.name for node in batch.values() if node.stream == trained.name),
        batch_needs={
            node.name: tuple(batch[need] for need in node.needs if need in batch) for node in batch.values()
        },
        streams=(rollout, *evaluations.values()),
        stations=stations,
    )


def _union(parts: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for part in parts for name in part))


def _models_by_replica(schedule: Schedule, progress: Progress) -> dict[str, tuple[str, ...]]:
    """Replica -> trained models of all streams that use it: the versions that it is given are theirs."""
    names = _union(stream.replicas for stream in schedule.streams)
    return {
        name: progress.trained_models(_union(s.models for s in schedule.streams if name in s.replicas))
        for name in names
    }


def _engines(
    schedule: Schedule,
    models: dict[str, tuple[str, ...]],
    copies: dict[str, WeightCopy],
    evaluations: dict[str, Evaluation],
) -> dict[str, Engine]:
    trained, *side = schedule.streams
    apart = dict(schedule.publishers)
    return {
        name: Engine(
            name,
            models=models[name],
            serves_rollout=name in trained.replicas,
            evaluations=tuple(evaluations[s.name] for s in side if name in s.replicas),
            is_separate=name in apart,
            copy=copies[name],
        )
        for name in models
    }


def _devices(schedule: Schedule, engines: dict[str, Engine]) -> tuple[DeviceOrder, ...]:
    """The ordered groups; a batch node without a group is a group of its own."""
    nodes = {node.name: node for node in schedule.nodes}
    shared = dict(schedule.shared)
    ordered = [
        DeviceOrder(
            group,
            nodes=tuple(nodes[name] for name in names),
            engines=tuple(engines[name] for name in shared.get(group, ()) if name in engines),
        )
        for group, names in schedule.orders
    ]
    placed = {name for _, names in schedule.orders for name in names}
    alone = [n for n in schedule.nodes if n.level is Level.BATCH and n.name not in placed]
    return (*ordered, *(DeviceOrder(node.name, nodes=(node,)) for node in alone))
