"""`BatchNodeRunner`: runs batch nodes on the shards that this worker holds."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from hflow.base.errors import NotYetError, ReturnError, RunError
from hflow.data.batches.batch import Batch
from hflow.data.batches.batch_arguments import bind_batch, sequences_of, unpack_batch
from hflow.data.batches.unpack_returns import metric_tensor
from hflow.planner.plan.routing import rank_order
from hflow.planner.plan.rows import Plan
from hflow.training.interface import ModelBackend, NodeCall, TrainShard
from hflow.types import Sequences, State
from hflow.types.tensor_slices import Block
from hflow.workers.bodies.body_output import body_call
from hflow.workers.bodies.compute_runner import ComputeRunner
from hflow.workers.bodies.seeding import seed_generators
from hflow.workers.interface import NodeProgram, NodeTask, ShardInput
from hflow.workers.storage.sample_store import SampleStore

Metrics = dict[str, float]


class BatchNodeRunner:
    """Reads a node's inputs from the store, runs it by its verb, and stores its outputs.

    `computes` runs bodies per sample or group that are scheduled on a batch. `hosted` is the index of this
    worker, or those of all workers in this process.

    Attributes:
        skipped: samples of the updates that the last node skipped, as their gradient was not finite.
    """

    def __init__(
        self,
        plan: Plan,
        programs: Mapping[str, NodeProgram],
        store: SampleStore,
        backends: Mapping[str, ModelBackend],
        computes: ComputeRunner,
        states: Mapping[str, str],
        seed: int,
        hosted: Sequence[int],
    ) -> None:
        self._seed = seed
        self._hosted = hosted
        self._plan = plan
        self._programs = programs
        self._store = store
        self._backends = backends
        self._computes = computes
        self._states = NodeStates(states)
        self.skipped: set[int] = set()
        self._run_by_verb: Mapping[str, Callable[[NodeProgram, NodeTask], Metrics]] = {
            "infer": self._infer,
            "train": self._train,
            "compute": self._compute,
            "update": self._update,
        }

    def run(self, task: NodeTask) -> Metrics:
        """Run a node and return its metrics."""
        program = self._programs[task.node]
        if program.verb not in self._run_by_verb:
            raise NotYetError(f"{program.verb!r} nodes cannot run on a batch yet")
        self.skipped = set()
        seed_generators(self._seed, task.node, task.step, self._data_rank(task.node))
        with body_call(program.body, task.node, task.step):
            return self._run_by_verb[program.verb](program, task)

    def state_text(self, node: str) -> str | None:
        """Return the JSON of a node's `State`; None if the node has none, or has not run yet."""
        return self._states.text(node)

    def _data_rank(self, node: str) -> int:
        """Return the data index of this worker in a node's replica; its own index if the node has no model.

        Ranks that hold parts of one model work on the same samples, so they must draw the same numbers.
        """
        replicas = self._plan.placement(node).replicas
        if not replicas:
            return self._hosted[0]
        replica = self._plan.replica(replicas[0])
        rank = next(rank for rank, worker in enumerate(replica.workers) if worker in self._hosted)
        return replica.layout.coords(rank_order(replica.role), rank)[0]

    def _infer(self, program: NodeProgram, task: NodeTask) -> Metrics:
        shards = [self._gather(program, _samples(shard)) for shard in task.shards]
        for output in self._backend(program).infer(self._node_call(program), shards):
            self._store.put(program.stream, output)
        return {}

    def _train(self, program: NodeProgram, task: NodeTask) -> Metrics:
        shards = [
            TrainShard(tuple(self._gather(program, samples) for samples in shard.minibatches))
            for shard in task.shards
        ]
        call = dataclasses.replace(self._node_call(program), on_skipped=self.skipped.update)
        return self._backend(program).train(call, shards, task.step)

    def _compute(self, program: NodeProgram, task: NodeTask) -> Metrics:
        samples = task.samples
        if program.level != "batch":
            self._computes.run_on_batch(program.name, samples)
            return {}
        batch = self._gather(program, samples)
        seqs = sequences_of(batch)
        arguments = bind_batch(self._node_call(program), batch, seqs)
        states = {name: self._states.load(program.name) for name, kind in program.provided if kind == "state"}
        result = program.body(**arguments, **states)
        for state in states.values():
            self._states.save(program.name, state)
        columns, metrics = unpack_batch(program.name, self._node_call(program), result, batch, seqs)
        self._store.put(program.stream, batch.select(()).with_columns(columns))
        tensors = {name: metric_tensor(program.name, name, value) for name, value in metrics.items()}
        return {name: reduce_metric(name, value, seqs) for name, value in tensors.items()}

    def _update(self, program: NodeProgram, task: NodeTask) -> Metrics:
        target, source = self._plan.placement(program.name).replicas
        with self._backends[target].on_device(changes=True), self._backends[source].on_device():
            update_weights(program, self._backends[target], self._backends[source])
        return {}

    def _gather(self, program: NodeProgram, samples: tuple[int, ...]) -> Batch:
        return self._store.gather(program.stream, self._plan.rule(program.name).fields, samples)

    def _backend(self, program: NodeProgram) -> ModelBackend:
        return self._backends[self._plan.placement(program.name).replicas[0]]

    def _node_call(self, program: NodeProgram) -> NodeCall:
        """Return the body with everything bound except its data."""
        return NodeCall(
            node=program.name,
            body=program.body,
            reads=program.reads,
            provided=program.provided,
            returns=program.returns,
            metrics=program.metrics,
            knobs=program.knobs,
            options=program.options,
            temperature=self._temperature(program),
            is_first_writer=self._is_first_writer(program),
            first_pass=None if program.first_pass is None else self._node_call(program.first_pass),
            seed=self._seed,
        )

    def _is_first_writer(self, program: NodeProgram) -> bool:
        """Return whether no node changes the node's model before it in the same step."""
        orders = [names for _, names in self._plan.schedule.orders if program.name in names]
        before = {name for names in orders for name in names[: names.index(program.name)]}
        writes = {node.name: node.writes for node in self._plan.schedule.nodes}
        return not any(set(writes[name]) & set(writes[program.name]) for name in before)

    def _temperature(self, program: NodeProgram) -> float:
        """Return the temperature at which the stream was generated; 1 for written and greedy samples."""
        source = self._programs.get(self._plan.graph.stream(program.stream).source)
        temperature = source.options.get("temperature", 1.0) if source else 1.0
        return float(temperature) or 1.0


def merge_tasks(tasks: Mapping[int, NodeTask]) -> NodeTask:
    """Merge one node's tasks for several workers into one, with shards in the order of their dp ranks."""
    first = next(iter(tasks.values()))
    shards = sorted((shard for task in tasks.values() for shard in task.shards), key=lambda shard: shard.dp)
    return NodeTask(first.node, first.step, tuple(shards))


def reduce_metric(name: str, value: Tensor, seqs: Sequences) -> float:
    """Reduce a metric to one number: by `.max`, `.min` or `.sum` at the end of its name, else by its mean.

    A metric of shape [T] is reduced over learned tokens only.
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


def _samples(shard: ShardInput) -> tuple[int, ...]:
    return tuple(sample for minibatch in shard.minibatches for sample in minibatch)


class NodeStates:
    """The `State` of every node on this worker, stored as JSON between two calls of the node.

    A body works on a copy, so what a failed call wrote is lost.
    """

    def __init__(self, texts: Mapping[str, str]) -> None:
        self._texts = dict(texts)

    def text(self, node: str) -> str | None:
        """Return the JSON of a node's state; None before its first call."""
        return self._texts.get(node)

    def load(self, node: str) -> State:
        """Return a copy of a node's state; empty before its first call."""
        return State(json.loads(self._texts.get(node, "{}")))

    def save(self, node: str, state: State) -> None:
        """Replace a node's state.

        Raises:
            RunError: when it is not JSON.
        """
        try:
            self._texts[node] = json.dumps(state, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise RunError(
                f"node {node!r}: its state cannot be saved as JSON: {error}. Keep only finite Python "
                "numbers, texts, lists and dicts in it, such as float(tensor)."
            ) from error


@torch.no_grad()
def update_weights(program: NodeProgram, target: ModelBackend, source: ModelBackend) -> None:
    """Run an update body on every block of weights that this rank holds of two models.

    Each weight of the target is replaced by what the body returns for it and the source's. Both
    replicas hold the same shards on a rank, so nothing is sent, and the result does not depend on the
    number of ranks.

    Raises:
        RunError: when the architectures differ, before anything is changed; or when the body does not return
            a weight, after the weights before that one were changed.
    """
    target_blocks, source_blocks = list(target.blocks()), list(source.blocks())
    _check_same_architecture(program, target_blocks, source_blocks)
    parameter = {kind: name for name, kind in program.provided}
    for target_block, source_block in zip(target_blocks, source_blocks, strict=True):
        weight = target_block.values
        tensors = {parameter["target"]: weight, parameter["source"]: source_block.values}
        result = program.body(**tensors, **program.knobs)
        weight.copy_(_check_weight(program, target_block.tensor, weight, result))


def _check_same_architecture(
    program: NodeProgram, target_blocks: list[Block], source_blocks: list[Block]
) -> None:
    target, source = program.models
    target_shapes = {block.tensor: block.shape for block in target_blocks}
    source_shapes = {block.tensor: block.shape for block in source_blocks}
    for name in [*target_shapes, *source_shapes]:
        target_shape, source_shape = target_shapes.get(name), source_shapes.get(name)
        if target_shape != source_shape:
            raise RunError(
                f"node {program.name!r}: its models differ in {name}: {_describe(target, target_shape)}, "
                f"{_describe(source, source_shape)}. An update node needs two models of one architecture."
            )
    assert [(one.tensor, one.box) for one in target_blocks] == [
        (one.tensor, one.box) for one in source_blocks
    ], "replicas of one layout hold different blocks"


def _describe(model: str, shape: tuple[int, ...] | None) -> str:
    return f"{model!r} does not have it" if shape is None else f"{model!r} has shape {list(shape)}"


def _check_weight(program: NodeProgram, name: str, weight: Tensor, result: object) -> Tensor:
    if isinstance(result, Tensor) and result.shape == weight.shape:
        return result
    got = list(result.shape) if isinstance(result, Tensor) else type(result).__name__
    raise ReturnError(
        f"node {program.name!r}: for {name} the body must return a tensor of shape {list(weight.shape)}, "
        f"not {got}"
    )
