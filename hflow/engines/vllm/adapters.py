"""Adapters beside the weights of a rank: vLLM's own LoRA, whose buffers new adapters are written to in place.

The adapters of each model have a slot in these buffers, and a request names its model. Projections of
queries, keys and values are one layer with an adapter for each; tensor ranks hold slices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from vllm.lora.layers import BaseLayerWithLoRA
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.lora.request import LoRARequest

from hflow.engines.vllm.hf_mapping import checked, checkpoint_path, held_by_module, packed_modules
from hflow.engines.vllm.quantized_layers import loaded_parameters
from hflow.shapes.model_shape import A, B
from hflow.types.tensor_slices import Block, box_slices
from hflow.weights.adapters import ScaledAdapters
from hflow.weights.incoming import IncomingWeights
from hflow.weights.loading import HeldBoxes, LoadedWeights, load_verified


class AdapterSizes(NamedTuple):
    """The adapters of a model."""

    r: int
    """The rank of each."""
    targets: tuple[str, ...]
    """The modules of the checkpoint that have some."""


def adapter_request(model: str, slot: int) -> LoRARequest:
    """Return the name of a model's adapters in requests. vLLM would read its path only if it were unknown."""
    return LoRARequest(model, slot + 1, model)


class HeldAdapters:
    """A model's adapters on a rank, which are zero until others are loaded.

    Args:
        model_runner: vLLM's, of a model that it runs with LoRA.
        lora: the model's adapters. vLLM's buffers may have a larger rank and further modules, which are zero.

    Raises:
        BackendError: if the model has a layer whose place in the checkpoint is unknown.
    """

    def __init__(self, model_runner: Any, request: LoRARequest, lora: AdapterSizes) -> None:
        manager = model_runner.lora_manager._adapter_manager
        model_runner.lora_manager.add_dummy_lora(request, rank=1)
        manager.activate_adapter(request.lora_int_id)  # sets all its buffers to 0
        slot = manager.lora_index_to_id.index(request.lora_int_id)
        self._held = held_adapters(model_runner.get_model(), slot, lora)

    def load(self, incoming: IncomingWeights, scale: float) -> LoadedWeights:
        """Write new adapters into the buffers, and check that these hold them.

        The factor of the adapters, alpha / r, is in vLLM's matrix B.

        Raises:
            BackendError: if names or shapes differ from the model's.
            RunError: if the buffers then hold others than were sent.
        """
        return load_verified(ScaledAdapters(incoming, scale), self._load, self._boxes)

    @torch.inference_mode()
    def _load(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        for name, tensor in checked(weights, self._held):
            held = self._held[name]
            held.values.copy_(tensor[box_slices(held.box)])

    def _boxes(self, name: str) -> HeldBoxes:
        held = self._held.get(name)
        return () if held is None else ((held.box, held.values),)


def held_adapters(model: nn.Module, slot: int, lora: AdapterSizes) -> dict[str, Block]:
    """Return a rank's part of the matrices of the adapters at the place `slot` in vLLM's buffers."""
    r, targets = lora
    packed = packed_modules(model)
    held: dict[str, Block] = {}
    for path, module in model.named_modules():
        if not isinstance(module, BaseLayerWithLoRA):
            continue
        layer: Any = module
        weight = {"weight": loaded_parameters(layer.base_layer)["weight"]}
        parts = held_by_module(layer.base_layer, checkpoint_path(model, path), weight, packed)
        buffers = zip(layer.lora_a_stacked, layer.lora_b_stacked, strict=True)
        for part, (a, b) in zip(parts, buffers, strict=True):
            name, (rows, columns), (num_rows, num_columns) = part.tensor, part.box, part.shape
            path_of_part = name.removesuffix("weight")
            if name.split(".")[-2] in targets:
                num_held = rows[1] - rows[0]
                for block in (
                    Block(path_of_part + A, (r, num_columns), ((0, r), columns), a[slot, 0, :r]),
                    Block(path_of_part + B, (num_rows, r), (rows, (0, r)), b[slot, 0, :num_held, :r]),
                ):
                    held[block.tensor] = block
    return held


def add_on_cpu(
    wrapper: PunicaWrapperCPU,
    y: Tensor,
    x: Tensor,
    lora_a_stacked: Sequence[Tensor],
    lora_b_stacked: Sequence[Tensor],
    scale: float,
    output_slices: Sequence[int],
    **__: Any,
) -> None:
    """Add the output of adapters to that of a layer, by two products for the tokens of each model.

    Replaces vLLM's, which on a CPU copies both matrices once for each token, as each could have another
    adapter.

    Args:
        y: `[T, O]`, the output of the layer's parts side by side.
        x: `[T, I]`.
        lora_a_stacked: the matrices A of each part, `[slots, 1, r, I]`.
        lora_b_stacked: the matrices B of each part, `[slots, 1, O of the part, r]`.
        output_slices: the size O of each part.
    """
    slots = wrapper.token_lora_indices[: len(x)]
    for slot in slots.unique().tolist():
        if slot < 0:  # a model without adapters
            continue
        rows = (slots == slot).nonzero().flatten()
        is_only = len(rows) == len(x)
        of_model = x if is_only else x[rows]
        for part, a, b in zip(
            y.split(list(output_slices), dim=-1), lora_a_stacked, lora_b_stacked, strict=True
        ):
            if is_only:
                part.addmm_(of_model @ a[slot, 0].T, b[slot, 0].T, alpha=scale)
            else:
                part.index_add_(0, rows, (of_model @ a[slot, 0].T) @ b[slot, 0].T, alpha=scale)
