"""What hflow adds to each of vLLM's tensor ranks: it receives weights and checks them.

vLLM imports this module in every rank, as its `worker_extension_cls`. Importing it registers the backends
`hflow` and `hflow-adapters` of vLLM's weight transfer.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from types import SimpleNamespace
from typing import Any, NamedTuple

import cloudpickle
from torch import Tensor, nn
from torch.nn.functional import linear, silu
from typing_extensions import override
from vllm.distributed.parallel_state import get_tp_group
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.lora.request import LoRARequest
from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUFp8BlockScaledMMKernel
from vllm.model_executor.layers import utils
from vllm.model_executor.layers.activation import SwigluOAIAndMul
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.layer import MoERunner
from vllm.model_executor.layers.fused_moe.oracle import unquantized
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform
from vllm.v1.worker import gpu_worker

from hflow.base.errors import HflowError
from hflow.engines.vllm.adapters import AdapterSizes, HeldAdapters, add_on_cpu
from hflow.engines.vllm.hf_mapping import (
    checked,
    checkpoint_path,
    family_of,
    held_by_module,
    held_tensors,
    packed_modules,
)
from hflow.engines.vllm.launch_options import SWIGLU
from hflow.engines.vllm.quantized_layers import QuantizedLayers
from hflow.models.expert_tensors import file_tensors
from hflow.models.host_copy import HostCopies
from hflow.models.nf4 import is_rounded, rounded
from hflow.processes.cores import bind_to_socket
from hflow.types.tensor_slices import Block, box_slices
from hflow.weights.adapters import MergedWeights
from hflow.weights.incoming import IncomingWeights
from hflow.weights.loading import HeldBoxes, LoadedWeights, load_verified

TRANSFER_BACKEND = "hflow"
ADAPTER_BACKEND = "hflow-adapters"
_IN_PLACE = ("gpt_oss",)
"""Families whose weights are copied to parameters, as vLLM's loaders do only when it starts."""
_PR_SET_PDEATHSIG = 1


@dataclass
class _InitInfo(WeightTransferInitInfo):
    """Nothing: a channel opens when the first weights arrive."""


@dataclass
class _UpdateInfo(WeightTransferUpdateInfo):
    incoming: bytes
    """The rank's `IncomingWeights`, pickled."""
    scale: float | None = None
    """The factor of adapters' output, if adapters are what comes in."""
    rounds_base: bool = False
    """Whether the trainer's matrices beside adapters are rounded to 4 bits."""


class Outcome(NamedTuple):
    """What a weight update loaded, or the error that it ended with."""

    loaded: LoadedWeights | None = None
    error: HflowError | None = None


class HflowWeightTransfer(WeightTransferEngine[_InitInfo, _UpdateInfo]):
    """Loads `IncomingWeights` into the rank's model, layer by layer.

    Attributes:
        outcome: what the last update did. vLLM would pass its error on as a text, so
            `RankExtension.hflow_outcome` returns it.
    """

    init_info_cls = _InitInfo
    update_info_cls = _UpdateInfo

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._held = held_tensors(self.model)
        self._quantized = QuantizedLayers(self.model, self._blocks_of)
        self._is_in_place = family_of(self.model) in _IN_PLACE
        self.outcome = Outcome()

    def init_transfer_engine(self, init_info: _InitInfo) -> None:
        """Do nothing."""

    def start_weight_update(self) -> None:
        """Prepare the model's loaders."""
        self._quantized.start()
        if not self._is_in_place:
            initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive, load and check all weights of a version."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: _UpdateInfo) -> None:
        """Receive, load and check all weights of a version."""
        try:
            incoming = self._weights(cloudpickle.loads(update_info.incoming), update_info)
            loaded = load_verified(incoming, self._load, self._boxes, self._quantized.checksums)
            self._quantized.check()
            self.outcome = Outcome(loaded=loaded)
        except HflowError as error:
            self.outcome = Outcome(error=error)
            self._finish()  # the model is whole again, with undefined weights

    def _weights(self, incoming: IncomingWeights, update_info: _UpdateInfo) -> IncomingWeights:
        """Return the weights of the whole model."""
        return incoming

    def finish_weight_update(self) -> None:
        """Do nothing: `receive_weights` has finished the update, since it checks the result."""

    def shutdown(self) -> None:
        """Do nothing: channels close when the process ends."""

    def _load(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        model: Any = self.model
        pairs, family = checked(weights, self._held), family_of(model)
        if self._is_in_place:
            for name, tensor in pairs:
                held = self._held[name]
                held.values.detach().copy_(tensor[box_slices(held.box)])
            return
        model.load_weights(
            pair for name, tensor in pairs for pair in file_tensors(family, {name: tensor}).items()
        )
        self._finish()

    def _finish(self) -> None:
        """Copy what was loaded into the model's parameters."""
        if self._is_in_place:
            return
        finalize: Any = finalize_layerwise_reload
        finalize(self.model, self.model_config)

    def _blocks_of(self, module: nn.Module, path: str, parameters: Mapping[str, Tensor]) -> Iterator[Block]:
        return held_by_module(
            module, checkpoint_path(self.model, path), parameters, packed_modules(self.model)
        )

    def _boxes(self, name: str) -> HeldBoxes:
        held = self._held.get(name)
        return () if held is None else ((held.box, held.values),)


class AdapterTransfer(HflowWeightTransfer):
    """Adds adapters to the weights that the model was built with, of which it keeps a copy in host memory."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._base: dict[str, Block] = {}
        self._copies, self._is_rounded = HostCopies(), False
        places: set[int] = set()
        with self._copies.copying():
            for name, held in self._held.items():
                if held.values.numel() and held.values.data_ptr() not in places:  # tied tensors are kept once
                    places.add(held.values.data_ptr())
                    self._base[name] = held.block(self._copies.copy(held.values))
        self._target = next(self.model.parameters()).device

    @override
    def _weights(self, incoming: IncomingWeights, update_info: _UpdateInfo) -> IncomingWeights:
        scale = update_info.scale
        assert scale is not None, "adapters come with their scale"
        if update_info.rounds_base and not self._is_rounded:
            for name, held in self._base.items():
                if is_rounded(name, held.shape):
                    held.values.copy_(rounded(held.values))
            self._is_rounded = True
        sum_over_ranks = get_tp_group().all_reduce
        return MergedWeights(incoming, self._base, scale, self._target, sum_over_ranks)


class RankExtension:
    """Methods that vLLM's worker of a rank gets, for `collective_rpc`."""

    rank: int
    weight_transfer_engine: HflowWeightTransfer
    model_runner: Any
    hflow_adapters: dict[str, HeldAdapters]

    def hflow_outcome(self) -> Outcome:
        """Return the result of this rank's last weight update."""
        return self.weight_transfer_engine.outcome

    def hflow_add_adapters(self, adapters: Sequence[tuple[LoRARequest, AdapterSizes]]) -> None:
        """Register adapters that are zero, of one or several models that run with LoRA."""
        self.hflow_adapters = {
            request.lora_name: HeldAdapters(self.model_runner, request, lora) for request, lora in adapters
        }

    def hflow_load_adapters(self, model: str, incoming: Sequence[bytes], scale: float) -> Outcome:
        """Load and check this rank's adapters of a model, from the pickled `IncomingWeights` of all ranks.

        `scale` is alpha / r.
        """
        try:
            return Outcome(self.hflow_adapters[model].load(cloudpickle.loads(incoming[self.rank]), scale))
        except HflowError as error:
            return Outcome(error=error)

    def hflow_expert_layers(self) -> list[int]:
        """Return the numbers of the layers that have experts."""
        modules = self.model_runner.get_model().modules()
        return sorted(module.layer_id for module in modules if isinstance(module, MoERunner))


_SWIGLU: Any = SimpleNamespace(alpha=SWIGLU["swiglu_alpha"], limit=SWIGLU["swiglu_limit"])


def _use_weights_in_place(layer: Any, remove_weight: bool) -> None:
    """Multiply with a layer's parameter itself.

    Replaces vLLM's choice of a kernel on a CPU, whose kernels pack a copy of the weights and delete the
    parameter, so that new weights could neither be written to it nor be compared with it.
    """
    layer.cpu_linear = linear


class _ExpertsInPlace(CPUUnquantizedExperts):
    """Multiplies with the parameters of experts themselves, for the same reason."""

    @staticmethod
    def is_supported_config(*arguments: Any) -> tuple[bool, str | None]:
        """Return that any sizes will do."""
        return True, None

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Leave them as they are."""

    def apply(
        self,
        output: Tensor,
        hidden_states: Tensor,
        w1: Tensor,
        w2: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        activation: MoEActivation,
        *_: Any,
        **__: Any,
    ) -> None:
        """Add up what the chosen K experts of N make of each token, `[T, D]`, into `output`, `[T, D]`.

        `w1`, `[N, 2F, D]`, are gates and ups, and `w2`, `[N, D, F]`, downs. Weights and numbers of the
        experts are `[T, K]`.
        """
        assert activation in (MoEActivation.SILU, MoEActivation.SWIGLUOAI)
        output.zero_()
        for expert in topk_ids.unique().tolist():
            tokens, places = (topk_ids == expert).nonzero(as_tuple=True)
            first, second = (None if x is None else x[expert] for x in (self.w1_bias, self.w2_bias))
            gates_and_ups = linear(hidden_states[tokens], w1[expert], first)
            if activation == MoEActivation.SILU:
                gates, ups = gates_and_ups.chunk(2, dim=-1)
                activated = silu(gates) * ups
            else:
                activated = SwigluOAIAndMul.forward_native(_SWIGLU, gates_and_ups)
            rows = linear(activated, w2[expert], second)
            weights = topk_weights[tokens, places, None].to(rows.dtype)
            output.index_add_(0, tokens, rows * weights)


def _with_bias_in_fp32(apply: Any) -> Any:
    """Return the product of vLLM's FP8 kernel on CPUs, which takes no bias in another precision."""

    @wraps(apply)
    def apply_weights(self: Any, layer: Any, x: Tensor, bias: Tensor | None = None, **options: Any) -> Any:
        return apply(self, layer, x, None if bias is None else bias.float(), **options)

    return apply_weights


def _with_axis_of_heads(forward_cpu: Any) -> Any:
    """Return vLLM's rotary embedding on CPUs, whose kernel takes heads for positions if they have an axis."""

    @wraps(forward_cpu)
    def forward(self: Any, positions: Tensor, query: Tensor, key: Tensor | None = None) -> Any:
        rotate = forward_cpu if query.ndim < 3 else type(self).forward_native
        return rotate(self, positions, query, key)

    return forward


def _beside_its_gpu(init_device: Any) -> Any:
    """Return vLLM's start of a rank on its GPU, before which the process is bound to the cores beside it."""

    @wraps(init_device)
    def init(self: Any) -> None:
        bind_to_socket(self.local_rank)
        init_device(self)

    return init


def _prepare_process() -> None:
    if multiprocessing.parent_process() is not None:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # end with the engine's process
    if current_platform.is_cuda():
        gpu_worker.Worker.init_device = _beside_its_gpu(gpu_worker.Worker.init_device)
    if current_platform.is_cpu():
        utils.dispatch_cpu_unquantized_gemm = _use_weights_in_place
        PunicaWrapperCPU.add_lora_linear = add_on_cpu
        RotaryEmbedding.forward_cpu = _with_axis_of_heads(RotaryEmbedding.forward_cpu)
        unquantized.backend_to_kernel_cls = lambda backend: [_ExpertsInPlace]
        CPUFp8BlockScaledMMKernel.apply_weights = _with_bias_in_fp32(CPUFp8BlockScaledMMKernel.apply_weights)
    if TRANSFER_BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(TRANSFER_BACKEND, HflowWeightTransfer)
        WeightTransferEngineFactory.register_engine(ADAPTER_BACKEND, AdapterTransfer)


_prepare_process()
