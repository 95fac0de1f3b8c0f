"""Infer nodes: a forward without gradient, the body, and its fields in the samples' order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

import numpy as np

from hflow.backends.common.inputs import PackedBatch, prepare
from hflow.backends.common.microbatches import MicrobatchSplitter, Minibatch
from hflow.backends.interface import NodeCall
from hflow.data.batch import Batch, Column
from hflow.data.batch_arguments import bind, unpack
from hflow.types import Output, Unit

Run = Callable[[Minibatch], list[Batch]]
"""Runs micro-batches, as many as any rank has; returns what the body made of each of this rank's."""


def infer(call: NodeCall, shards: Sequence[Batch], cutting: MicrobatchSplitter, run: Run) -> list[Batch]:
    """Run an infer body over shards; a batch of the returned fields for each, in its own order.

    Args:
        call: the body.
        shards: this rank's samples.
        cutting: how they are cut into micro-batches; agrees with the other dp ranks (a collective).
        run: the forward passes.
    """
    filled = [prepare(shard, cutting.head) for shard in shards if len(shard)]
    merged = Batch.concat(filled) if filled else None
    rows = [] if merged is None else cutting.rows(call, merged)
    batches = tuple(merged.take(these) for these in rows) if merged is not None else ()
    results = run(Minibatch(batches, cutting.most(len(batches)), {}))
    if not results:
        return [_no_rows(call, shard) for shard in shards]
    order = np.argsort(np.concatenate([np.asarray(these) for these in rows]))
    whole = Batch.concat(results).take(order)
    bounds = accumulate((len(shard) for shard in shards), initial=0)
    return [whole.take(np.arange(start, end)) for start, end in pairwise(bounds)]


def returned_fields(call: NodeCall, packed: PackedBatch, output: Output) -> Batch:
    """What the body returns for one micro-batch. Metrics of infer bodies are not kept."""
    result = call.body(**bind(call, packed.batch, packed.seqs, output))
    columns, _ = unpack(call.node, call, result, packed.batch, packed.seqs)
    return Batch(packed.batch.samples, packed.batch.groups, packed.batch.lengths, columns)


def _no_rows(call: NodeCall, shard: Batch) -> Batch:
    columns = {
        name: Column(Unit(unit), [] if unit in (Unit.TEXT, Unit.JSON) else np.zeros(0, np.float32))
        for name, unit in call.returns
    }
    return Batch(shard.samples, shard.groups, shard.lengths, columns)
