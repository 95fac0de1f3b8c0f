"""`BatchNodes`: runs one batch node on the shards that this worker holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from hflow.backends.base import Call, ModelBackend, TrainShard
from hflow.data.batch import Batch
from hflow.data.binding import bind, sequences_of, unpack
from hflow.data.returned import metric_tensor
from hflow.errors import NotYetError
from hflow.plan.ir import Plan
from hflow.types import Sequences
from hflow.workers.base import NodeProgram, NodeTask, ShardInput
from hflow.workers.compute import Computes
from hflow.workers.states import States
from hflow.workers.store import Store
from hflow.workers.updates import update_weights

Metrics = dict[str, float]


class BatchNodes:
    """Inputs out of the store, the verb's action, outputs into the store.

    Args:
        plan: says which fields a node reads and which replica it uses.
        programs: all nodes.
        store: of this worker.
        backends: replica -> its shard on this worker.
        computes: runs per-sample bodies that are scheduled by batch.
    """

    def __init__(
        self,
        plan: Plan,
        programs: Mapping[str, NodeProgram],
        store: Store,
        backends: Mapping[str, ModelBackend],
        computes: Computes,
    ) -> None:
        self._plan = plan
        self._programs = programs
        self._store = store
        self._backends = backends
        self._computes = computes
        self._states = States()
        self._actions: Mapping[str, Callable[[NodeProgram, NodeTask], Metrics]] = {
            "infer": self._infer,
            "train": self._train,
            "compute": self._compute,
            "update": self._update,
        }

    def run(self, task: NodeTask) -> Metrics:
        """Run the node; returns its metrics."""
        program = self._programs[task.node]
        if program.verb not in self._actions:
            raise NotYetError(f"nodes of the verb {program.verb!r} cannot be run yet")
        return self._actions[program.verb](program, task)

    def _infer(self, program: NodeProgram, task: NodeTask) -> Metrics:
        shards = [self._gather(program, _samples(shard)) for shard in task.shards]
        for output in self._backend(program).infer(self.call(program), shards):
            self._store.put(program.stream, output)
        return {}

    def _train(self, program: NodeProgram, task: NodeTask) -> Metrics:
        shards = [
            TrainShard(tuple(self._gather(program, samples) for samples in shard.minibatches))
            for shard in task.shards
        ]
        return self._backend(program).train(self.call(program), shards, task.step)

    def _compute(self, program: NodeProgram, task: NodeTask) -> Metrics:
        samples = task.samples
        if program.level != "batch":
            self._computes.map(program.name, samples)
            return {}
        batch = self._gather(program, samples)
        seqs = sequences_of(batch)
        arguments = bind(self.call(program), batch, seqs)
        states = {name: self._states.of(program.name) for name, kind in program.provided if kind == "state"}
        result = program.body(**arguments, **states)
        for state in states.values():
            self._states.keep(program.name, state)
        columns, metrics = unpack(program.name, self.call(program), result, batch, seqs)
        self._store.put(program.stream, batch.select(()).with_columns(columns))
        numbers = {name: metric_tensor(program.name, name, value) for name, value in metrics.items()}
        return {name: reduce_metric(name, value, seqs) for name, value in numbers.items()}

    def _update(self, program: NodeProgram, task: NodeTask) -> Metrics:
        target, source = self._plan.placement(program.name).replicas
        update_weights(program, self._backends[target], self._backends[source])
        return {}

    def _gather(self, program: NodeProgram, samples: tuple[int, ...]) -> Batch:
        return self._store.gather(program.stream, self._plan.rule(program.name).fields, samples)

    def _backend(self, program: NodeProgram) -> ModelBackend:
        return self._backends[self._plan.placement(program.name).replicas[0]]

    def call(self, program: NodeProgram) -> Call:
        """The body with everything bound but its data."""
        return Call(
            node=program.name,
            body=program.body,
            reads=program.reads,
            provided=program.provided,
            returns=program.returns,
            metrics=program.metrics,
            knobs=program.knobs,
            options=program.options,
            temperature=self._temperature(program),
        )

    def _temperature(self, program: NodeProgram) -> float:
        """That of the generation which made the stream; 1 for written and greedy samples."""
        source = self._programs.get(self._plan.graph.stream(program.stream).source)
        temperature = source.options.get("temperature", 1.0) if source else 1.0
        return float(temperature) or 1.0


def reduce_metric(name: str, value: Tensor, seqs: Sequences) -> float:
    """One number from a metric: its mean over valid entries, or `.max .min .sum` by its suffix.

    Of a metric with an entry for each token, those of learned tokens are valid.
    """
    x = value.double()
    entries = x[seqs.loss_mask] if x.shape == seqs.loss_mask.shape else x.reshape(-1)
    if not len(entries):
        return 0.0
    match name.rpartition(".")[2]:
        case "max":
            return float(entries.max())
        case "min":
            return float(entries.min())
        case "sum":
            return float(entries.sum())
        case _:
            return float(entries.mean())


def merged(tasks: Mapping[int, NodeTask]) -> NodeTask:
    """The tasks of several workers as one, shards in the order of their dp ranks."""
    first = next(iter(tasks.values()))
    shards = sorted((shard for task in tasks.values() for shard in task.shards), key=lambda shard: shard.dp)
    return NodeTask(first.node, first.step, tuple(shards))


def _samples(shard: ShardInput) -> tuple[int, ...]:
    return tuple(sample for minibatch in shard.minibatches for sample in minibatch)
