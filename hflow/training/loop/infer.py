"""The order of an infer node: micro-batches, forward passes, and the fields in the samples' order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

import numpy as np

from hflow.data.batches.batch import Batch, Column
from hflow.data.batches.batch_arguments import bind_batch, unpack_batch
from hflow.data.batches.trajectory_rows import join_trajectories
from hflow.training.interface import NodeCall
from hflow.training.loop.inputs import PackedBatch, body_sequences, cut, prepare_batch
from hflow.training.loop.microbatches import MicrobatchSplitter, Minibatch
from hflow.types import Output, Unit

RunForwards = Callable[[NodeCall, Minibatch], list[Batch]]
"""Runs `num_microbatches` forward passes without gradient, and an infer body on each micro-batch of this
rank; returns the body's fields."""


def run_infer(
    call: NodeCall, shards: Sequence[Batch], splitter: MicrobatchSplitter, run_forwards: RunForwards
) -> list[Batch]:
    """Run an infer node on shards; return a batch of the returned fields for each, in its order.

    Args:
        call: the node's body.
        shards: this rank's samples.
        splitter: splits them into micro-batches. Agrees with the other data indices (a collective).
        run_forwards: runs the forward passes and the body.
    """
    cuts = [cut(call, shard) if len(shard) else shard for shard in shards]
    prepared = [prepare_batch(sequences, splitter.head) for sequences in cuts if len(sequences)]
    merged = Batch.concat(prepared) if prepared else None
    rows = [] if merged is None else splitter.rows(call, merged)
    batches = tuple(merged.take(indices) for indices in rows) if merged is not None else ()
    results = run_forwards(call, Minibatch(batches, splitter.max_over_ranks(len(batches)), {}))
    if not results:
        return [_no_rows(call, shard) for shard in shards]
    order = np.argsort(np.concatenate([np.asarray(indices) for indices in rows]))
    ordered = Batch.concat(results).take(order)
    bounds = pairwise(accumulate(map(len, cuts), initial=0))
    return [
        join_trajectories(ordered.take(np.arange(start, end)), shard)
        for shard, (start, end) in zip(shards, bounds, strict=True)
    ]


def returned_fields(call: NodeCall, packed: PackedBatch, output: Output) -> Batch:
    """Run the body on one micro-batch; return its fields. Metrics of infer bodies are not kept."""
    result = call.body(**bind_batch(call, packed.batch, body_sequences(call, packed), output))
    columns, _ = unpack_batch(call.node, call, result, packed.batch, packed.seqs)
    return Batch(packed.batch.samples, packed.batch.groups, packed.batch.lengths, columns)


def _no_rows(call: NodeCall, shard: Batch) -> Batch:
    columns = {
        name: Column(Unit(unit), [] if Unit(unit).is_object else np.zeros(0, np.float32))
        for name, unit in call.returns
    }
    return Batch(shard.samples, shard.groups, shard.lengths, columns)
