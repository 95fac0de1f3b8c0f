"""Infer nodes: a forward without gradient, the body, and its fields in the samples' order."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np
import torch

from hflow.backends.base import Call
from hflow.backends.torch_model.inputs import Packed, prepare
from hflow.backends.torch_model.runner import Runner
from hflow.data.batch import Batch, Column
from hflow.data.binding import bind, unpack
from hflow.types import Output, Unit


@torch.no_grad()
def infer(runner: Runner, call: Call, shards: Sequence[Batch]) -> list[Batch]:
    """Run an infer body over shards; a batch of the returned fields for each, in its own order."""
    runner.module.eval()
    filled = [prepare(shard, runner.module.kind) for shard in shards if len(shard)]
    merged = Batch.concat(filled) if filled else None
    rows = [] if merged is None else runner.cutting.rows(call, merged)
    num_microbatches = runner.cutting.most(len(rows))
    results = [
        runner.forward(merged.take(these), call, lambda packed, output: _fields(call, packed, output))
        for these in rows
        if merged is not None
    ]
    for _ in range(num_microbatches - len(rows)):
        runner.idle()
    if not results:
        return [_no_rows(call, shard) for shard in shards]
    order = np.argsort(np.concatenate([np.asarray(these) for these in rows]))
    whole = Batch.concat(results).take(order)
    bounds = accumulate((len(shard) for shard in shards), initial=0)
    return [whole.take(np.arange(start, end)) for start, end in pairwise(bounds)]


def _fields(call: Call, packed: Packed, output: Output) -> Batch:
    """What the body returns for one micro-batch. Metrics of infer bodies are not kept."""
    result = call.body(**bind(call, packed.batch, packed.seqs, output))
    columns, _ = unpack(call.node, call, result, packed.batch, packed.seqs)
    return Batch(packed.batch.samples, packed.batch.groups, packed.batch.lengths, columns)


def _no_rows(call: Call, shard: Batch) -> Batch:
    columns = {
        name: Column(Unit(unit), [] if unit in (Unit.TEXT, Unit.JSON) else np.zeros(0, np.float32))
        for name, unit in call.returns
    }
    return Batch(shard.samples, shard.groups, shard.lengths, columns)
