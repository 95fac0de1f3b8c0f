"""Infer nodes on a whole or an FSDP-sharded model."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hflow.backends.base import Call
from hflow.backends.common import inference
from hflow.backends.common.cutting import Minibatch
from hflow.backends.torch_model.runner import Runner
from hflow.data.batch import Batch


@torch.no_grad()
def infer(runner: Runner, call: Call, shards: Sequence[Batch]) -> list[Batch]:
    """Run an infer body over shards; a batch of the returned fields for each, in its own order."""

    def run(minibatch: Minibatch) -> list[Batch]:
        results = [
            runner.forward(
                batch, call, lambda packed, output: inference.returned_fields(call, packed, output)
            )
            for batch in minibatch.microbatches
        ]
        for _ in range(minibatch.num_microbatches - len(minibatch.microbatches)):
            runner.idle()
        return results

    runner.module.eval()
    return inference.infer(call, shards, runner.cutting, run)
