"""Infer nodes on a replica of data, tensor and pipeline ranks."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from hflow.backends.base import Call
from hflow.backends.common import inference
from hflow.backends.common.cutting import Minibatch
from hflow.backends.common.inputs import Packed, Tokens
from hflow.backends.megatron.runner import Runner
from hflow.data.batch import Batch


def infer(runner: Runner, call: Call, shards: Sequence[Batch]) -> list[Batch]:
    """Run an infer body over shards; on heads, a batch of the returned fields for each."""

    def finish(tokens: Tokens, hidden: Tensor) -> Batch | None:
        if not isinstance(tokens, Packed):
            return None
        return inference.returned_fields(call, tokens, runner.output(call, tokens, hidden))

    def run(mine: Minibatch | None) -> list[Batch]:
        (minibatch,) = runner.received(None if mine is None else [mine])
        results = runner.schedule.forward(runner.microbatches(minibatch), finish)
        return [result for result in results if result is not None]

    runner.stage.module.eval()
    if runner.stage.grid.is_head:
        return inference.infer(call, shards, runner.cutting, run)
    run(None)
    return []
