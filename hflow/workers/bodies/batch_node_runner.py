"""`BatchNodeRunner`: runs one batch node on the shards that this worker holds."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from hflow.backends.interface import ModelBackend, NodeCall, TrainShard
from hflow.data.batch import Batch
from hflow.data.batch_arguments import bind, sequences_of, unpack
from hflow.data.unpack_returns import metric_tensor
from hflow.errors import NotYetError, RunError
from hflow.planner.ir import Plan
from hflow.types import Sequences, State
from hflow.types.tensor_slices import Block
from hflow.workers.bodies.compute_runner import ComputeRunner
from hflow.workers.interface import NodeProgram, NodeTask, ShardInput
from hflow.workers.storage.sample_store import SampleStore

# -------------------- `NodeStates`: the memory of nodes, JSON, kept where the node runs from one firing to
# the next.


class NodeStates:
    """The memory of every node on this worker. What a node that fails wrote is forgotten."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}

    def of(self, node: str) -> State:
        """A copy of a node's memory; empty before its first firing."""
        return State(json.loads(self._texts.get(node, "{}")))

    def keep(self, node: str, state: State) -> None:
        """Take what a firing left.

        Raises:
            RunError: when it is not JSON.
        """
        try:
            self._texts[node] = json.dumps(state, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise RunError(
                f"node {node!r}: its state must be JSON, so that it can be saved: {error}; keep plain finite "
                "numbers, texts, lists and dicts, such as float(tensor)"
            ) from error


# -------------------- `update_weights`: an update body on every block of weights that this rank holds of
# two models.


@torch.no_grad()
def update_weights(program: NodeProgram, target: ModelBackend, source: ModelBackend) -> None:
    """Replace each of the target's weights by what the body makes of it and the source's.

    Both replicas hold the same shards on a rank, so nothing is sent, and the result does not depend on how
    many ranks there are.

    Raises:
        RunError: when the models differ, or the body does not return a weight; nothing is changed then
            but, in the second case, the weights before it.
    """
    blocks, others = list(target.blocks()), list(source.blocks())
    _check_alike(program, blocks, others)
    parameter = {kind: name for name, kind in program.provided}
    for block, other in zip(blocks, others, strict=True):
        weight = block.values
        tensors = {parameter["target"]: weight, parameter["source"]: other.values}
        weight.copy_(_checked(program, block.tensor, weight, program.body(**tensors, **program.knobs)))


def _check_alike(program: NodeProgram, blocks: list[Block], others: list[Block]) -> None:
    target, source = program.models
    shapes, found = ({block.tensor: block.shape for block in held} for held in (blocks, others))
    for name in [*shapes, *found]:
        if shapes.get(name) != found.get(name):
            raise RunError(
                f"node {program.name!r}: model {target!r} has {name} {_shape(shapes.get(name))}, but "
                f"{source!r} has it {_shape(found.get(name))}; an update needs two models of one architecture"
            )
    assert [(one.tensor, one.box) for one in blocks] == [(one.tensor, one.box) for one in others], (
        "replicas of one layout hold different blocks"
    )


def _shape(shape: tuple[int, ...] | None) -> str:
    return "not at all" if shape is None else f"of shape {list(shape)}"


def _checked(program: NodeProgram, name: str, weight: Tensor, result: object) -> Tensor:
    if isinstance(result, Tensor) and result.shape == weight.shape:
        return result
    got = list(result.shape) if isinstance(result, Tensor) else type(result).__name__
    raise RunError(
        f"node {program.name!r}: for {name} the body must return a tensor of shape {list(weight.shape)}, "
        f"not {got}"
    )


Metrics = dict[str, float]


class BatchNodeRunner:
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
        store: SampleStore,
        backends: Mapping[str, ModelBackend],
        computes: ComputeRunner,
    ) -> None:
        self._plan = plan
        self._programs = programs
        self._store = store
        self._backends = backends
        self._computes = computes
        self._states = NodeStates()
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

    def call(self, program: NodeProgram) -> NodeCall:
        """The body with everything bound but its data."""
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


def merge_tasks(tasks: Mapping[int, NodeTask]) -> NodeTask:
    """The tasks of several workers as one, shards in the order of their dp ranks."""
    first = next(iter(tasks.values()))
    shards = sorted((shard for task in tasks.values() for shard in task.shards), key=lambda shard: shard.dp)
    return NodeTask(first.node, first.step, tuple(shards))


def _samples(shard: ShardInput) -> tuple[int, ...]:
    return tuple(sample for minibatch in shard.minibatches for sample in minibatch)
