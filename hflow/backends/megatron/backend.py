"""`MegatronModel`: a model divided over data, tensor and pipeline ranks by megatron-core."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from hflow.backends.common import infer as inference
from hflow.backends.common import train as training
from hflow.backends.common.checks import check_sequences, check_temperature
from hflow.backends.common.inputs import PackedBatch, PackedTokens
from hflow.backends.common.loss import Loss
from hflow.backends.common.microbatches import MicrobatchSplitter, Minibatch
from hflow.backends.interface import ModelBackend, ModelSettings, NodeCall, RankPosition, TrainShard
from hflow.backends.megatron import shards
from hflow.backends.megatron.hf_export import save
from hflow.backends.megatron.master_weights import gather
from hflow.backends.megatron.model import build
from hflow.backends.megatron.optimizer import MegatronOptimizer
from hflow.backends.megatron.parallel_state import ParallelState
from hflow.backends.megatron.runner import MegatronRunner
from hflow.backends.megatron.schedule import PipelineSchedule
from hflow.backends.megatron.weight_export import held_blocks, named_weights
from hflow.data.batch import Batch
from hflow.errors import BackendError
from hflow.types.tensor_slices import Block

# -------------------- Infer nodes on a replica of data, tensor and pipeline ranks.


def infer(runner: MegatronRunner, call: NodeCall, shards: Sequence[Batch]) -> list[Batch]:
    """Run an infer body over shards; on heads, a batch of the returned fields for each."""

    def finish(tokens: PackedTokens, hidden: Tensor) -> Batch | None:
        if not isinstance(tokens, PackedBatch):
            return None
        return inference.returned_fields(call, tokens, runner.output(call, tokens, hidden))

    def run(mine: Minibatch | None) -> list[Batch]:
        (minibatch,) = runner.received(None if mine is None else [mine])
        results = runner.schedule.forward(runner.microbatches(minibatch), finish)
        return [result for result in results if result is not None]

    runner.stage.module.eval()
    if runner.stage.parallel.is_head:
        return inference.infer(call, shards, runner.cutting, run)
    run(None)
    return []


# -------------------- Train nodes on a replica of data, tensor and pipeline ranks.


def train(
    runner: MegatronRunner,
    optimizer: MegatronOptimizer,
    call: NodeCall,
    shards: Sequence[TrainShard],
    step: int,
) -> dict[str, float]:
    """Run every minibatch of every epoch; return metrics over the step, on heads.

    Raises:
        RunError, RecipeError: as `common.training.train`.
    """

    def accumulate(loss: Loss, minibatch: Minibatch, record: training.StepRecord) -> None:
        def share(tokens: PackedTokens, hidden: Tensor) -> Tensor:
            if not isinstance(tokens, PackedBatch):
                return hidden[:0].sum()
            part = loss.share(tokens, runner.output(call, tokens, hidden), record.meter)
            record.loss += part.detach()
            return part

        optimizer.forget()
        runner.schedule.backward(runner.microbatches(minibatch), share)

    parallel = runner.stage.parallel
    mine = runner.cutting.minibatches(call, shards) if parallel.is_head else None
    minibatches = runner.received(mine)
    runner.stage.module.train()
    record = training.train(call, step, minibatches, accumulate, optimizer, parallel.group)
    return record.finish(runner.cutting.group) if parallel.is_head else {}


class MegatronModel(ModelBackend):
    """One rank of a replica.

    The head of each data index, its tensor rank 0 on the last stage, is given the shards and returns the
    outputs and metrics; the other ranks are given no shards and return nothing. All ranks of a replica make
    the same calls. Results do not depend on the layout, as every denominator is global.
    """

    def __init__(self, settings: ModelSettings, position: RankPosition) -> None:
        """Build this rank's part of the model; a collective over the position's group.

        Raises:
            BackendError: when the settings, the architecture, the layout or the checkpoint do not fit.
        """
        self.settings = settings
        self._stage = stage = build(settings, ParallelState.of(position))
        self._optimizer = MegatronOptimizer(stage, settings) if settings.trainable else None
        module = stage.module if self._optimizer is None else self._optimizer.module
        heads = stage.parallel.groups.dp if stage.parallel.data > 1 else None
        cutting = MicrobatchSplitter(settings.tokens_per_microbatch, settings.head, heads, stage.device)
        self._runner = MegatronRunner(stage, PipelineSchedule(stage, module), cutting)

    def infer(self, call: NodeCall, shards: Sequence[Batch]) -> list[Batch]:
        """Run a no-grad forward and the body; on heads, a batch of the returned fields per shard.

        Raises:
            BackendError: for a sequence that is too long for the model, or holds unknown tokens.
            RunError: when the policy's temperature is 0, under which nothing has a log-prob.
        """
        check_temperature(call)
        check_sequences(self.settings.name, self._stage.hf_config, shards)
        return infer(self._runner, call, shards)

    def train(self, call: NodeCall, shards: Sequence[TrainShard], step: int) -> dict[str, float]:
        """Run all minibatches and epochs of one step; on heads, globally averaged metrics.

        Besides the body's: `loss` and `grad_norm` (means over the updates), `lr` (of the last one)
        and `num_tokens` (learned tokens of the batch).

        Raises:
            BackendError: when the model is frozen, or as `infer`.
            RunError: as `infer`, or when the gradient is not finite.
        """
        if self._optimizer is None:
            raise BackendError(f"model {self.settings.name!r} is frozen; declare it trainable to train it")
        check_temperature(call)
        batches = (minibatch for shard in shards for minibatch in shard.minibatches)
        check_sequences(self.settings.name, self._stage.hf_config, batches)
        return train(self._runner, self._optimizer, call, shards, step)

    @property
    def dtype(self) -> torch.dtype:
        """What the model computes in."""
        return self._stage.dtype

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield HF-named full tensors one by one, in the model's dtype, on every rank; a collective."""
        return named_weights(self._stage)

    def blocks(self) -> Iterator[Block]:
        """Yield the blocks of each parameter of this rank, copies too; not a collective."""
        return held_blocks(self._stage)

    def save(self, directory: str) -> None:
        """Write the fp32 weights in HF layout (`config.json`, safetensors); a collective."""
        values = None
        if self._optimizer is not None and self._stage.dtype != torch.float32:
            values = gather(self._stage, self._optimizer.master_weights)
        save(self._stage, Path(directory), values)

    def save_shards(self, directory: str) -> None:
        """Write what is trained of the model, each rank the ranges that it steps; a collective."""
        shards.save(self._stage, self._optimizer, Path(directory))

    def load_shards(self, directory: str) -> None:
        """Take weights and moments from what any layout or backend wrote; each rank reads its part."""
        shards.load(self._stage, self._optimizer, Path(directory))
