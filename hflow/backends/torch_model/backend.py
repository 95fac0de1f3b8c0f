"""`TorchModel`: an HF model that infers and trains on packed shards, on one rank or many."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from hflow.backends.common import infer as inference
from hflow.backends.common import train as training
from hflow.backends.common.checks import check_sequences
from hflow.backends.common.loss import Loss
from hflow.backends.common.microbatches import MicrobatchSplitter, Minibatch
from hflow.backends.device import local_device
from hflow.backends.interface import ModelBackend, ModelSettings, NodeCall, RankPosition, TrainShard
from hflow.backends.torch_model import shards
from hflow.backends.torch_model import weight_export as weights
from hflow.backends.torch_model.build import DTYPES, build
from hflow.backends.torch_model.fsdp import place
from hflow.backends.torch_model.optimizer import TorchOptimizer
from hflow.backends.torch_model.packed_model import PackedModel
from hflow.backends.torch_model.runner import TorchRunner
from hflow.data.batch import Batch
from hflow.errors import BackendError
from hflow.types.tensor_slices import Block

# -------------------- Infer nodes on a whole or an FSDP-sharded model.


@torch.no_grad()
def infer(runner: TorchRunner, call: NodeCall, shards: Sequence[Batch]) -> list[Batch]:
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


# -------------------- Train nodes on a whole or an FSDP-sharded model.


def train(
    runner: TorchRunner, optimizer: TorchOptimizer, call: NodeCall, shards: Sequence[TrainShard], step: int
) -> dict[str, float]:
    """Run every minibatch of every epoch; return metrics over the step, the same on all ranks.

    Raises:
        RunError, RecipeError: as `common.training.train`.
    """

    def accumulate(loss: Loss, minibatch: Minibatch, record: training.StepRecord) -> None:
        for batch in minibatch.microbatches:
            share = runner.forward(
                batch, loss.call, lambda packed, output: loss.share(packed, output, record.meter)
            )
            torch.autograd.backward(share)
            record.loss += share.detach()
        for _ in range(minibatch.num_microbatches - len(minibatch.microbatches)):
            torch.autograd.backward(runner.idle())

    minibatches = runner.cutting.minibatches(call, shards)
    runner.module.train()
    return training.train(call, step, minibatches, accumulate, optimizer, runner.group).finish(runner.group)


class TorchModel(ModelBackend):
    """One replica's shard of an HF model.

    With a process group of several ranks the weights are sharded over it (FSDP2) and each rank
    works on its own dp shards; otherwise this process works on all of them. Losses, gradients and
    metrics are the same in all cases, as every denominator is global.
    """

    def __init__(self, settings: ModelSettings, position: RankPosition) -> None:
        """Build the model; every rank reads the checkpoint or draws the same weights.

        Raises:
            BackendError: when the settings, the architecture or the checkpoint do not fit.
        """
        self.settings = settings
        self.group = position.group if position.group is not None and position.group.size() > 1 else None
        self._model, head = build(settings)
        self._runner = self._placed(head)
        self._optimizer = (
            TorchOptimizer(self._runner.module.parameters(), settings.optim, self.group)
            if settings.trainable
            else None
        )

    def _placed(self, head: nn.Module) -> TorchRunner:
        settings, device = self.settings, local_device(self.settings.device)
        dtype = DTYPES[settings.dtype]
        module = PackedModel(self._model.base_model, head, settings.head)
        module.requires_grad_(settings.trainable)
        if settings.activation_checkpointing:
            self._model.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
        place(module, _decoder_layers(self._model), device, dtype, self.group)
        cutting = MicrobatchSplitter(settings.tokens_per_microbatch, settings.head, self.group, device)
        return TorchRunner(module, device, dtype, self.group, cutting)

    def infer(self, call: NodeCall, shards: Sequence[Batch]) -> list[Batch]:
        """Run a no-grad forward and the body; return a batch of the returned fields per shard.

        Raises:
            BackendError: for a sequence that is too long for the model, or holds unknown tokens.
        """
        check_sequences(self.settings.name, self._model.config, shards)
        return infer(self._runner, call, shards)

    def train(self, call: NodeCall, shards: Sequence[TrainShard], step: int) -> dict[str, float]:
        """Run all minibatches and epochs of one step; return globally averaged metrics.

        Besides the body's: `loss` and `grad_norm` (means over the updates), `lr` (of the last one)
        and `num_tokens` (learned tokens of the batch).

        Raises:
            BackendError: when the model is frozen, or as `infer`.
        """
        if self._optimizer is None:
            raise BackendError(f"model {self.settings.name!r} is frozen; declare it trainable to train it")
        batches = (minibatch for shard in shards for minibatch in shard.minibatches)
        check_sequences(self.settings.name, self._model.config, batches)
        return train(self._runner, self._optimizer, call, shards, step)

    @property
    def dtype(self) -> torch.dtype:
        """What the model computes in."""
        return self._runner.dtype

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield HF-named full tensors one by one, in the model's dtype; a collective."""
        runner = self._runner
        return weights.named_weights(self._model, runner.module.head, self.settings.head, runner.dtype)

    def blocks(self) -> Iterator[Block]:
        """Yield the rows of each fp32 weight that this rank holds; not a collective."""
        module = self._runner.module
        pairs = weights.held_blocks(self._model, module, module.head, self.settings.head)
        return (block for _, block in pairs)

    def shared_module(self) -> nn.Module | None:
        """The HF model, where it is whole and computes in the precision of its fp32 weights."""
        is_whole = self.group is None and self.settings.dtype == "fp32"
        return self._model if is_whole and self.settings.head == "lm" else None

    def save(self, directory: str) -> None:
        """Write the model in HF layout (`config.json`, safetensors); a collective."""
        is_writer = self.group is None or dist.get_rank(self.group) == 0
        head, kind = self._runner.module.head, self.settings.head
        weights.save(self._model, head, kind, Path(directory), is_writer)
        if self.group is not None:
            dist.barrier(self.group)

    def save_shards(self, directory: str) -> None:
        """Write what is trained of the model, each rank its rows; a collective."""
        shards.save(self._trained(), Path(directory), self.group)

    def load_shards(self, directory: str) -> None:
        """Take weights and moments from what any layout or backend wrote; each rank reads its rows."""
        shards.load(self._trained(), Path(directory))

    def _trained(self) -> shards.TrainedModel:
        module = self._runner.module
        return shards.TrainedModel(self._model, module, self.settings.head, self._optimizer)


def _decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The blocks that HF says must not be split."""
    names = set(model._no_split_modules or ())
    return [module for module in model.base_model.modules() if type(module).__name__ in names]
