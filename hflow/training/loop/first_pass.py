"""The first pass of a train node: a function of the whole minibatch, whose result the loss reads.

The model runs without gradient over all micro-batches of all ranks. Its output is gathered with the fields
that the function reads, in the order of sample ids. So every rank calls the function with the same tokens in
the same order, however the minibatch is divided.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from hflow.data.batches.batch import Batch, Column
from hflow.data.batches.batch_arguments import FRAMEWORK_READ, bind_batch, sequences_of, unpack_batch
from hflow.models.seeds import seed_words, uniforms
from hflow.training.interface import FIRST_PASS_STREAM, NodeCall
from hflow.training.loop.infer import RunForwards
from hflow.training.loop.microbatches import Minibatch
from hflow.training.loop.prox import UpdateProgress
from hflow.types import Output, Unit

RANDOM = "random"
"""The field of random numbers; all others of `FIRST_PASS_STREAM` are those of the model's output."""
_MASK = "loss_mask"


@dataclass(frozen=True)
class FirstPassRunner:
    """Runs first passes on one rank."""

    run_forwards: RunForwards
    """A collective."""
    group: ProcessGroup | None
    """One rank for each data index, this one among them; None for one."""
    device: torch.device
    runs_body: bool = True
    """Whether this rank computes losses: not before the last pipeline stage."""

    def __call__(self, call: NodeCall, minibatch: Minibatch, progress: UpdateProgress) -> Minibatch:
        """Return the minibatch with the result of the first pass, if the node has one. A collective.

        Raises:
            RunError: if the function returns a wrong shape.
        """
        first = call.first_pass
        if first is None:
            return minibatch
        outputs = self.run_forwards(_output_call(call, first), minibatch) if _output_names(first) else []
        if not self.runs_body:
            return minibatch
        own = [_inputs(first, batch) for batch in minibatch.microbatches]
        if outputs:
            pairs = zip(own, outputs, strict=True)
            own = [inputs.with_columns(output.columns) for inputs, output in pairs]
        whole = _by_sample(self._gather(Batch.concat(own) if own else None))
        if _reads_random(first):
            whole = whole.with_columns({_column(RANDOM): _random_numbers(call.seed, progress, whole)})
        with torch.no_grad():
            seqs = sequences_of(whole, self.device)
            result = first.body(**bind_batch(first, whole, seqs))
        columns, _ = unpack_batch(call.node, first, result, whole, seqs)
        found = whole.select(()).with_columns({_column(name): column for name, column in columns.items()})
        return replace(
            minibatch,
            microbatches=tuple(
                batch.with_columns(found.take(_rows_of(batch, whole)).columns)
                for batch in minibatch.microbatches
            ),
        )

    def _gather(self, own: Batch | None) -> Batch:
        """Return the samples of all ranks. A rank may have none."""
        by_rank: list[Any] = [own]
        if self.group is not None and self.group.size() > 1:
            by_rank = [None] * self.group.size()
            dist.all_gather_object(by_rank, own, group=self.group)
        return Batch.concat([batch for batch in by_rank if batch is not None])


def _column(name: str) -> str:
    return f"{FIRST_PASS_STREAM}/{name}"


def _output_names(first: NodeCall) -> list[str]:
    names = [read.field for read in first.reads if read.stream == FIRST_PASS_STREAM]
    return [name for name in names if name != RANDOM]


def _reads_random(first: NodeCall) -> bool:
    return any(read.stream == FIRST_PASS_STREAM and read.field == RANDOM for read in first.reads)


def _output_call(call: NodeCall, first: NodeCall) -> NodeCall:
    """Return an infer call that returns the fields of the model's output that a first pass reads.

    Its forward pass is that of the node: it reads what the framework needs.
    """
    names = _output_names(first)

    def fields(out: Output) -> Any:
        values = tuple(getattr(out, name) for name in names)
        return values if len(values) > 1 else values[0]

    return replace(
        first,
        node=f"{first.node}.{FIRST_PASS_STREAM}",
        body=fields,
        reads=tuple(read for read in call.reads if read.parameter.startswith(FRAMEWORK_READ)),
        provided=(("out", "output"),),
        returns=tuple((_column(name), Unit.TOKEN.value) for name in names),
        knobs={},
    )


def _inputs(first: NodeCall, batch: Batch) -> Batch:
    """Return the columns of a micro-batch that a first pass reads."""
    fields = [read for read in first.reads if read.stream != FIRST_PASS_STREAM]
    names = {name for read in fields for name in (f"{read.stream}/{read.field}", read.field)}
    return batch.select(sorted((names & batch.columns.keys()) | {_MASK}))


def _by_sample(batch: Batch) -> Batch:
    return batch.take(np.argsort(batch.samples, kind="stable"))


def _rows_of(batch: Batch, whole: Batch) -> npt.NDArray[np.int64]:
    """Return the rows of a micro-batch's samples in the whole minibatch, which is sorted by them."""
    return np.searchsorted(whole.samples, batch.samples)


def _random_numbers(seed: int, progress: UpdateProgress, whole: Batch) -> Column:
    """Return a number in [0, 1) for each token, by the run's seed, the update, sample and position."""
    update = seed_words([seed ^ (progress.step << 20) ^ progress.update])
    samples = seed_words([int(sample) for sample in whole.samples]) ^ update
    positions = np.arange(whole.num_tokens) - np.repeat(whole.offsets[:-1], whole.lengths)
    return Column(Unit.TOKEN, uniforms(np.repeat(samples, whole.lengths), positions))
