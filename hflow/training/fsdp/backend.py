"""`TorchModel`: a backend for Hugging Face models in torch, on one rank or sharded by FSDP2."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from typing_extensions import override

from hflow.base.durable_files import WriteFiles
from hflow.base.errors import BackendError
from hflow.data.batches.batch import Batch
from hflow.models.adapter import (
    adapter_weights,
    adapters_off,
    base_buffers,
    set_magnitudes,
    share_parameters,
)
from hflow.models.device import local_device
from hflow.models.dtypes import DTYPES
from hflow.models.expert_balance import ExpertBalance, let_routers_balance, routers_of
from hflow.models.expert_replay import let_routers_replay
from hflow.models.hf_config import family_of
from hflow.models.host_copy import HostCopies
from hflow.models.host_offload import HostOffload
from hflow.models.packed_attention import PACKED, packed_attention
from hflow.models.settings import ModelSettings, RankPosition
from hflow.shapes.architectures import ROUTERS
from hflow.shapes.layout import Layout
from hflow.shapes.model_shape import SCORE_BIAS
from hflow.training.fsdp.build import build_model
from hflow.training.fsdp.held_weights import draw_held_weights, load_held_weights
from hflow.training.fsdp.optimizer import TorchOptimizer, local_shard
from hflow.training.fsdp.packed_model import PackedModel
from hflow.training.fsdp.runner import TorchRunner
from hflow.training.fsdp.sharding import place_model, recompute_layers
from hflow.training.fsdp.shards import TrainedModel, copy_model_shards, load_model_shards
from hflow.training.fsdp.weight_export import (
    blocks_of,
    buffer_blocks,
    copied_sizes,
    copy_model,
    held_blocks,
    named_parameters,
    named_weights,
    reshard,
    tensor_names,
)
from hflow.training.interface import ModelBackend, NodeCall, TrainShard
from hflow.training.loop.inputs import check_sequences
from hflow.training.loop.microbatches import MicrobatchSplitter
from hflow.training.optimizers.interface import NamedWeight
from hflow.types.tensor_slices import Block
from hflow.vision.batches import SequencesWithImages


class TorchModel(ModelBackend):
    """One rank's shard of a Hugging Face model.

    With several ranks, FSDP2 shards the weights over them, or over neighbours among them if the layout has a
    replicate axis, and each rank works on its own samples. Losses, gradients and metrics are the same for any
    number of ranks, as every denominator is global.
    """

    def __init__(
        self, settings: ModelSettings, position: RankPosition, owner: TorchModel | None = None
    ) -> None:
        """Build the model. Every rank reads its part of the checkpoint, or draws its part from the seed.

        Args:
            owner: a model with adapters on the same ranks, whose frozen weights this one uses.

        Raises:
            BackendError: if the settings, the architecture or the checkpoint are unusable.
        """
        self.settings = settings
        group = position.group
        self.group = group if group is not None and group.size() > 1 else None
        self._layout = position.layout if self.group is not None else Layout()
        is_rounded = settings.lora is not None and settings.lora.base is not None  # every rank has all of it
        self._model, head = build_model(
            settings, is_sharded=self.group is not None and not is_rounded, has_base=owner is not None
        )
        self._runner = self._make_runner(head, owner)
        self._optimizer = self._make_optimizer() if settings.trainable else None
        states = tuple if self._optimizer is None else self._optimizer.states
        base = None if owner is None else owner._offload
        self._offload: HostOffload = HostOffload(settings.offload, self._stored_weights, states, base=base)
        self._offload.start()
        self._copies, self._state_copies = HostCopies(), HostCopies()

    def _stored_weights(self) -> list[Tensor]:
        """Return this rank's shard of every weight. Weights that FSDP has gathered are freed first."""
        module = self._runner.module
        reshard(module)
        shards = [local_shard(weight.detach()) for weight in module.parameters()]
        return [*shards, *base_buffers(self._model)]

    def _make_optimizer(self) -> TorchOptimizer:
        """Return the optimizer of the weights that are trained, in the module's order."""
        model, module, kind = self._model, self._runner.module, self.settings.head
        names = {weight: name for name, weight in named_parameters(model, module.head, kind)}
        trained = [
            NamedWeight(weight, tuple(tensor_names(model, names[weight], weight)), weight.dim())
            for weight in module.parameters()
            if weight.requires_grad
        ]

        def rows_of(weight: nn.Parameter, values: Tensor) -> list[Block]:
            return blocks_of(model, names[weight], weight, values)

        return TorchOptimizer(trained, self.settings, self.group, self._layout.replicate, rows_of)

    def _make_runner(self, head: nn.Module, owner: TorchModel | None) -> TorchRunner:
        settings, device = self.settings, local_device(self.settings.device)
        dtype = DTYPES[settings.dtype]
        config = self._model.config
        family = family_of(config)
        module = PackedModel(
            self._model.base_model,
            head,
            settings.head,
            settings.offload_activations,
            None if family is None else SequencesWithImages(family, config.to_dict()),
            joins_tower=self.group is not None,
        )
        module.requires_grad_(settings.trainable)
        if family is not None and settings.freeze == "vision":
            family.encoder.tower(self._model.base_model).requires_grad_(False)
        if settings.lora is not None:
            self._model.requires_grad_(False)
            for weight in adapter_weights(self._model).values():
                weight.requires_grad_(settings.trainable)
        lacks_weights = owner is None and any(weight.is_meta for weight in self._model.parameters())
        layers = _decoder_layers(self._model)
        if settings.compile:
            compile_layers(layers, settings.name)
        else:
            let_routers_replay(layers)
        balance = self._make_balance(layers, device)

        def fill() -> None:
            if owner is not None:
                reshard(owner._runner.module)
                share_parameters(self._model, owner._model)

        place_model(module, layers, device, dtype, self.group, self._layout, fill)
        if settings.activation_checkpointing:
            recompute_layers(layers)
        if lacks_weights and settings.path is not None:
            load_held_weights(Path(settings.path), self._model)
        elif lacks_weights:
            draw_held_weights(settings.seed, self._model)
        if lacks_weights and settings.lora is not None:
            set_magnitudes(self._model)
        if settings.offload == "all" and self.group is None and device.type == "cpu":
            for weight in module.parameters():  # memory of a mapped checkpoint cannot be freed
                weight.data = weight.data.clone()
        splitter = MicrobatchSplitter(settings.tokens_per_microbatch, settings.head, self.group, device)
        return TorchRunner(module, device, dtype, self.group, splitter, settings.zero_stage, balance)

    def _make_balance(self, layers: Iterable[nn.Module], device: torch.device) -> ExpertBalance | None:
        """Return the balance of the experts, which its routers compute; None: they are not balanced."""
        config, family = self.settings.balance, self._model.config.model_type
        if config is None:
            return None
        if family not in ROUTERS:
            raise BackendError(
                f"models.{self.settings.name}.balance is set, but experts are balanced in models of family "
                f"{', '.join(ROUTERS)}, not {family}; remove it"
            )
        let_routers_balance(layers, ROUTERS[family])
        routers = [router for _, router in routers_of(layers, ROUTERS[family])]
        num_experts, per_token = routers[0].weight.shape[0], routers[0].top_k
        biases = {i: getattr(router, SCORE_BIAS) for i, router in enumerate(routers) if config.bias_rate}
        return ExpertBalance(config, len(routers), num_experts, per_token, device, self.group, biases=biases)

    @override
    def infer(self, call: NodeCall, shards: Sequence[Batch]) -> list[Batch]:
        check_sequences(call, self.settings.name, self._model.config.get_text_config(), shards)
        with self.on_device(), translate_compile_errors(self.settings):
            return self._runner.infer(call, shards)

    @override
    def train(self, call: NodeCall, shards: Sequence[TrainShard], step: int) -> dict[str, float]:
        if self._optimizer is None:
            raise BackendError(f"model {self.settings.name!r} is frozen; declare it trainable to train it")
        batches = (minibatch for shard in shards for minibatch in shard.minibatches)
        check_sequences(call, self.settings.name, self._model.config.get_text_config(), batches)
        on_device = self._offload.on_device(training=True, changes=True)
        with on_device, translate_compile_errors(self.settings):
            return self._runner.train(self._optimizer, call, shards, step)

    @property
    @override
    def dtype(self) -> torch.dtype:
        return self._runner.dtype

    @override
    def on_device(self, *, changes: bool = False) -> AbstractContextManager[None]:
        return self._offload.on_device(changes=changes)

    @override
    def weights(self) -> Iterator[tuple[str, Tensor]]:
        runner = self._runner
        with self.on_device():
            yield from named_weights(self._model, runner.module.head, self.settings.head, runner.dtype)

    @override
    def blocks(self) -> Iterator[Block]:
        """Yield this rank's rows of each fp32 weight that training changes, and biases of routers."""
        assert self._offload.has_weights_on_device, "blocks are views of weights on the device"
        module = self._runner.module
        pairs = held_blocks(self._model, module, module.head, self.settings.head)
        return chain((block for _, blocks in pairs for block in blocks), buffer_blocks(self._model))

    @override
    def shared_module(self) -> nn.Module | None:
        """Return the HF model if it is on one rank and computes in fp32, the dtype of its weights."""
        is_whole = self.group is None and self.settings.dtype == "fp32"
        if not is_whole or self.settings.head != "lm":
            return None
        assert self.settings.offload != "all", "an engine cannot share weights that are offloaded"
        model: nn.Module = self._model
        return model

    @override
    def share_weights(self, settings: ModelSettings) -> ModelBackend:
        if settings.lora is None:
            return BaseModel(settings, self)
        with self.on_device():
            return TorchModel(settings, RankPosition(self.group, self._layout), self)

    @override
    def pin_copies(self) -> None:
        device, trained = self._runner.device, self._trained_model()
        sizes = copied_sizes(self._model, trained.module.head, self.settings, self._saved_dtype, self.group)
        self._copies.pin(sizes, device)
        if self.settings.trainable and self.settings.save_optimizer:
            self._state_copies.pin(trained.saved_sizes(), device)

    @property
    def _saved_dtype(self) -> torch.dtype:
        """The dtype of saved weights."""
        # A model that only update nodes change has no sharded checkpoint: it is saved as it is stored.
        return self.dtype if self.settings.trainable else torch.float32

    @override
    def save(self, directory: str) -> WriteFiles:
        head, dtype = self._runner.module.head, self._saved_dtype
        with self.on_device(), self._copies.copying():
            return copy_model(
                self._model, head, self.settings, Path(directory), dtype, self.group, self._copies
            )

    @override
    def save_shards(self, directory: str) -> WriteFiles:
        with self._offload.on_device(training=True), self._state_copies.copying():
            return copy_model_shards(self._trained_model(), Path(directory), self.group, self._state_copies)

    @override
    def load_shards(self, directory: str) -> None:
        with self._offload.on_device(training=True, changes=True):
            load_model_shards(self._trained_model(), Path(directory))

    def _trained_model(self) -> TrainedModel:
        return TrainedModel(self._model, self._runner.module, self.settings.head, self._optimizer)


class BaseModel(TorchModel):
    """The weights of another `TorchModel` with its adapters turned off: a frozen model."""

    def __init__(self, settings: ModelSettings, trained: TorchModel) -> None:
        """Use the weights and the ranks of `trained`, a model with adapters, for a frozen model."""
        self.settings, self.group = settings, trained.group
        self._model, self._optimizer, self._offload = trained._model, None, trained._offload
        device = trained._runner.device
        splitter = MicrobatchSplitter(settings.tokens_per_microbatch, settings.head, self.group, device)
        self._runner = replace(trained._runner, splitter=splitter, requested={})

    @override
    def infer(self, call: NodeCall, shards: Sequence[Batch]) -> list[Batch]:
        with adapters_off(self._model):
            return super().infer(call, shards)


def _decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Return the modules that HF marks as not to be split, and the blocks of a tower."""
    family = family_of(model.config)
    if family is not None:
        language_model: Any = family.encoder.language_model(model.base_model)
        return [*family.encoder.blocks(model.base_model), *language_model.layers]
    names = set(model._no_split_modules or ())
    return [module for module in model.base_model.modules() if type(module).__name__ in names]


def compile_layers(layers: Iterable[nn.Module], name: str) -> None:
    """Compile the forward of layers, for packed sequences. They are compiled when they run first.

    This makes fewer and larger kernels, after some tens of seconds of compilation: the operations between the
    matrix products of a layer (norms, activations, rotary embeddings, residuals) are fused. Attention stays
    as it is, as its sequences differ from one micro-batch to the next; the number of tokens is symbolic, so
    that none of them is compiled for.

    All layers of a kind share their code. Hooks, such as those of FSDP, run outside it.

    Raises:
        BackendError: if there is no C++ compiler, which torch's and triton's code needs.
    """
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise BackendError(
            f"models.{name}.compile needs a C++ compiler, and there is no {compiler!r}: install g++, or "
            "remove the key"
        )
    # Beyond its limit of versions of a layer, torch would run it as it is, with a line in the log.
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    AttentionInterface.register(PACKED, torch.compiler.disable(packed_attention))
    for layer in layers:
        compiled = torch.compile(layer.forward, dynamic=True)
        layer.forward = partial(_run_layer, layer.forward, compiled)


@contextmanager
def translate_compile_errors(settings: ModelSettings) -> Iterator[None]:
    """Raise what the compiler says of a model's layers, which it compiles when they run first, in one line.

    Raises:
        BackendError: if a layer cannot be compiled, or would be compiled again too often.
    """
    if not settings.compile:
        yield
        return
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

    try:
        yield
    except (TorchDynamoException, FailOnRecompileLimitHit) as error:
        first = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise BackendError(
            f"models.{settings.name}.compile: a layer could not be compiled ({first.strip()}); set "
            f"models.{settings.name}.compile=false"
        ) from error


def _run_layer(eager: Callable[..., Any], compiled: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run the compiled forward on packed sequences; an engine that shares the layer runs its own way."""
    return (compiled if "packed_layout" in kwargs else eager)(*args, **kwargs)
