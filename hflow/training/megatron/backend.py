"""`MegatronModel`: a backend that splits a model over data, tensor and pipeline ranks by megatron-core."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from torch import Tensor
from typing_extensions import override

from hflow.base.durable_files import WriteFiles
from hflow.base.errors import BackendError
from hflow.config.schema import Offload
from hflow.data.batches.batch import Batch
from hflow.models.adapter import adapters_off
from hflow.models.expert_balance import ExpertBalance
from hflow.models.host_copy import HostCopies
from hflow.models.host_offload import HostOffload
from hflow.models.settings import ModelSettings, RankPosition
from hflow.shapes.model_shape import expert_layers
from hflow.training.interface import ModelBackend, NodeCall, TrainShard
from hflow.training.loop.inputs import check_sequences, check_temperature
from hflow.training.loop.microbatches import MicrobatchSplitter
from hflow.training.megatron.experts import routers_of
from hflow.training.megatron.hf_export import copy_model
from hflow.training.megatron.model import Stage, build_stage
from hflow.training.megatron.optimizer import MegatronOptimizer
from hflow.training.megatron.parallel_state import ParallelState
from hflow.training.megatron.runner import MegatronRunner
from hflow.training.megatron.schedule import PipelineSchedule
from hflow.training.megatron.shards import copy_stage_shards, load_stage_shards
from hflow.training.megatron.weight_export import held_blocks, named_weights
from hflow.types.tensor_slices import Block


class MegatronModel(ModelBackend):
    """One rank's shard of a model.

    Heads (tensor rank 0 on the last stage, one for each data index) receive shards and return outputs and
    metrics; the other ranks make the same calls without shards. Results do not depend on the layout, as every
    denominator is global.
    """

    def __init__(
        self, settings: ModelSettings, position: RankPosition, owner: MegatronModel | None = None
    ) -> None:
        """Build this rank's part of the model; a collective over the position's group.

        Args:
            owner: a model with adapters on the same ranks, whose frozen weights this one uses.

        Raises:
            BackendError: if the settings, the architecture, the layout or the checkpoint are unusable.
        """
        self.settings = settings
        base = None if owner is None else owner._stage
        self._stage: Stage = build_stage(settings, ParallelState.of(position), base)
        stage = self._stage
        self._optimizer = MegatronOptimizer(stage, settings) if settings.trainable else None
        schedule = _make_schedule(stage, self._optimizer, settings.offload_activations)
        splitter, balance = _make_splitter(stage, settings), _make_balance(stage, settings)
        self._runner = MegatronRunner(stage, schedule, splitter, balance)
        self._offload: HostOffload = _make_offload(
            stage, self._optimizer, settings.offload, None if owner is None else owner._offload
        )
        self._offload.start()
        self._copies, self._state_copies = HostCopies(), HostCopies()

    @override
    def infer(self, call: NodeCall, shards: Sequence[Batch]) -> list[Batch]:
        check_temperature(call)
        check_sequences(call, self.settings.name, self._stage.hf_config, shards)
        with self.on_device():
            return self._runner.infer(call, shards)

    @override
    def train(self, call: NodeCall, shards: Sequence[TrainShard], step: int) -> dict[str, float]:
        if self._optimizer is None:
            raise BackendError(f"model {self.settings.name!r} is frozen; declare it trainable to train it")
        check_temperature(call)
        batches = (minibatch for shard in shards for minibatch in shard.minibatches)
        check_sequences(call, self.settings.name, self._stage.hf_config, batches)
        with self._offload.on_device(training=True, changes=True):
            metrics = self._runner.train(self._optimizer, call, shards, step)
            self._optimizer.finish_gather()
        return metrics

    @property
    @override
    def dtype(self) -> torch.dtype:
        return self._stage.dtype

    @override
    def on_device(self, *, changes: bool = False) -> AbstractContextManager[None]:
        return self._offload.on_device(changes=changes)

    @override
    def weights(self) -> Iterator[tuple[str, Tensor]]:
        with self.on_device():
            yield from named_weights(self._stage)

    @override
    def blocks(self) -> Iterator[Block]:
        """Yield the blocks of each parameter of this rank, copies included."""
        assert self._offload.has_weights_on_device, "blocks are views of weights on the device"
        return held_blocks(self._stage)

    @override
    def share_weights(self, settings: ModelSettings) -> ModelBackend:
        if settings.lora is None:
            return MegatronBase(settings, self)
        parallel = self._stage.parallel
        with self.on_device():
            return MegatronModel(settings, RankPosition(parallel.group, parallel.layout), self)

    @override
    def save(self, directory: str) -> WriteFiles:
        with self.on_device(), self._copies.copying():
            return copy_model(self._stage, self.settings, Path(directory), self._copies)

    @override
    def save_shards(self, directory: str) -> WriteFiles:
        with self._offload.on_device(training=True), self._state_copies.copying():
            return copy_stage_shards(self._stage, self._optimizer, Path(directory), self._state_copies)

    @override
    def load_shards(self, directory: str) -> None:
        with self._offload.on_device(training=True, changes=True):
            load_stage_shards(self._stage, self._optimizer, Path(directory))


class MegatronBase(MegatronModel):
    """The weights of another `MegatronModel` with its adapters turned off: a frozen model."""

    def __init__(self, settings: ModelSettings, trained: MegatronModel) -> None:
        """Use the weights and the ranks of `trained`, a model with adapters, for a frozen model."""
        self.settings, self._optimizer, self._offload = settings, None, trained._offload
        self._stage = stage = trained._stage
        self._runner = MegatronRunner(
            stage, _make_schedule(stage, None, offload_activations=False), _make_splitter(stage, settings)
        )

    @override
    def infer(self, call: NodeCall, shards: Sequence[Batch]) -> list[Batch]:
        with adapters_off(self._stage.module):
            return super().infer(call, shards)


def _make_splitter(stage: Stage, settings: ModelSettings) -> MicrobatchSplitter:
    heads = stage.parallel.groups.dp if stage.parallel.data > 1 else None
    return MicrobatchSplitter(settings.tokens_per_microbatch, settings.head, heads, stage.device)


def _make_balance(stage: Stage, settings: ModelSettings) -> ExpertBalance | None:
    config, shape, parallel = settings.balance, stage.shape, stage.parallel
    if config is None:
        return None
    assert shape.experts is not None, "a plan balances experts only where there are some"
    num_layers = expert_layers(shape, 0, shape.num_layers)
    sizes = num_layers, shape.experts.num, shape.experts.per_token
    whole = parallel.group if parallel.group.size() > 1 else None
    stage_ranks = parallel.groups.tp_cp if parallel.groups.tp_cp.size() > 1 else None
    biases = {x.layer: x.score_bias for x in routers_of(stage.module) if x.score_bias is not None}
    return ExpertBalance(config, *sizes, stage.device, whole, stage_ranks, biases if config.bias_rate else {})


def _make_schedule(
    stage: Stage, optimizer: MegatronOptimizer | None, offload_activations: bool
) -> PipelineSchedule:
    if optimizer is None:
        return PipelineSchedule(stage, stage.module, offload_activations, _do_nothing)
    return PipelineSchedule(stage, optimizer.module, offload_activations, optimizer.finish_gather)


def _do_nothing() -> None:
    """A frozen model gathers no weights."""


def _make_offload(
    stage: Stage, optimizer: MegatronOptimizer | None, offload: Offload, base: HostOffload | None
) -> HostOffload:
    def weights() -> list[Tensor]:
        return [weight.detach() for weight in stage.module.parameters()]

    if optimizer is None:
        return HostOffload(offload, weights, base=base)
    return HostOffload(offload, weights, optimizer.states, optimizer.gradients, base)
