"""The order of an infer node: micro-batches, forward passes, and the fields in the samples' order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt

from hflow.data.batches.batch import Batch, Column
from hflow.data.batches.batch_arguments import bind_batch, get_column, unpack_batch
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

    The splitter agrees with the other data indices, a collective. `run_forwards` runs forward passes and
    body.
    """
    chosen = [_chosen_rows(call, shard) for shard in shards]
    wholes, shards = shards, [shard.take(rows) for shard, rows in zip(shards, chosen, strict=True)]
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
    found = [
        join_trajectories(ordered.take(np.arange(start, end)), shard)
        for shard, (start, end) in zip(shards, bounds, strict=True)
    ]
    if (mask := call.options.get("mask")) is None:
        return found
    return [_widened(*parts, mask) for parts in zip(found, wholes, chosen, strict=True)]


def _chosen_rows(call: NodeCall, shard: Batch) -> npt.NDArray[np.int64]:
    """Return the rows to compute: those of `mask=`, or one whose result is dropped if there are none."""
    mask = call.options.get("mask")
    if mask is None:
        return np.arange(len(shard))
    rows = np.flatnonzero(get_column(shard, mask).values)
    return rows if len(rows) else np.arange(min(len(shard), 1))


def _widened(found: Batch, whole: Batch, rows: npt.NDArray[np.int64], mask: str) -> Batch:
    """Return the fields of all rows: NaN, -1 or False, by dtype, where `mask` is false."""
    chosen = np.asarray(get_column(whole, mask).values, dtype=bool)
    found = found.take(np.flatnonzero(chosen[rows]))
    columns = {}
    for name, column in found.columns.items():
        values, at = np.asarray(column.values), chosen
        if column.unit is Unit.TOKEN:
            at = np.repeat(chosen, whole.lengths)
        empty = {"f": np.nan, "b": False}.get(values.dtype.kind, -1)
        filled = np.full((len(at), *values.shape[1:]), empty, values.dtype)
        filled[at] = values
        columns[name] = Column(column.unit, filled)
    return Batch(whole.samples, whole.groups, whole.lengths, columns)


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
