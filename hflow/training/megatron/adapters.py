"""Low-rank adapters of megatron's linear layers, divided over tensor ranks as the matrices beside them.

Megatron computes q, k and v, or gate and up, as one matrix. Each HF matrix has an adapter of its own all the
same, as with peft, so that results and files are those of the torch backend.

Only the r numbers of a token between the two matrices are exchanged. Where tensor ranks divide the outputs of
a layer, each has all of A and its rows of B; where they divide the inputs, each has its columns of A and all
of B. With sequence parallelism, a matrix that all ranks have computes a part of the tokens on each of them,
and its gradients are summed with those of norms.

Axes: U tokens, those of this rank with sequence parallelism; I inputs and O outputs of a layer on this rank;
r rank of the adapters; n adapters of the layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.functional import linear

from hflow.training.megatron.hf_mapping import AdaptedLinear
from hflow.training.megatron.layers import sum_gradient


class LinearAdapters(nn.Module):
    """The adapters of a linear layer, which computes one or several HF matrices."""

    def __init__(
        self,
        of: AdaptedLinear,
        scale: float,
        config: TransformerConfig,
        tp_group: ProcessGroup,
        copies: ProcessGroup | None,
    ) -> None:
        """Allocate weights without initialising them.

        Args:
            of: the layer.
            scale: the factor of the adapters' output.
            config: of the model.
            tp_group: the tensor ranks.
            copies: the tensor ranks that hold the same key-value head; None if each head is on one of them.
        """
        super().__init__()
        self.scale, self.tp_group, self.copies = scale, tp_group, copies
        self.outputs, self.num_blocks, self.divides_inputs = of.outputs, of.num_blocks, of.divides_inputs
        self.sequence_parallel = config.sequence_parallel
        self.is_on = True
        for row in of.parameters:
            name, (part,) = row.name.rpartition(".")[2], row.parts
            weight: Any = nn.Parameter(torch.empty(row.shape, dtype=config.params_dtype))
            if name.endswith("_A") == of.divides_inputs:  # tensor ranks divide it
                set_tensor_model_parallel_attributes(weight, True, part.axis, 1)
                weight.shared = row.is_copy  # excludes it from gradient norms
            else:
                weight.sequence_parallel = config.sequence_parallel
            self.register_parameter(name, weight)

    def forward(self, x: Tensor) -> Tensor:
        """Compute what is added to the layer's output, `[U, 1, I]` -> `[U, 1, O]`."""
        modules = [module for module, _ in self.outputs if f"{module}_A" in self._parameters]
        low = linear(x, torch.cat([self.get_parameter(f"{module}_A") for module in modules]))
        low = self._exchange(low * self.scale)
        parts = dict(zip(modules, low.chunk(len(modules), dim=-1), strict=True))
        outputs = [
            linear(parts[module], self._output_matrix(module))
            if module in parts
            else low.new_zeros(*low.shape[:-1], size)
            for module, size in self.outputs
        ]
        if len(outputs) == 1:
            return outputs[0]
        blocks = [output.unflatten(-1, (self.num_blocks, -1)) for output in outputs]
        return torch.cat(blocks, dim=-1).flatten(-2)

    def _exchange(self, low: Tensor) -> Tensor:
        """Return the numbers between the matrices, `[U, 1, n r]`, of the tokens that the second ones need.

        Gradients go the other way.
        """
        if self.divides_inputs:
            exchange = (
                reduce_scatter_to_sequence_parallel_region
                if self.sequence_parallel
                else reduce_from_tensor_model_parallel_region
            )
        else:
            exchange = (
                gather_from_sequence_parallel_region
                if self.sequence_parallel
                else copy_to_tensor_model_parallel_region
            )
        exchanged: Tensor = exchange(low, group=self.tp_group)
        return exchanged

    def _output_matrix(self, module: str) -> Tensor:
        """Return B of an adapter, whose gradient is summed over the ranks that have the same rows."""
        weight = self.get_parameter(f"{module}_B")
        if self.copies is None or module not in ("k_proj", "v_proj"):
            return weight
        return sum_gradient(weight, self.copies)


def add_adapters(stage: nn.Module, linears: Iterable[AdaptedLinear], scale: float) -> None:
    """Add adapters without values to the layers of a stage, whose outputs they change from now on.

    Args:
        stage: megatron's module of a stage.
        linears: the layers.
        scale: the factor of the adapters' output.
    """
    for of in linears:
        layer: Any = stage.get_submodule(of.name)
        copies = getattr(layer, "copies", None)
        layer.adapters = LinearAdapters(of, scale, stage.config, layer.tp_group, copies)
        layer.register_forward_hook(_add_output)


def _add_output(layer: Any, args: tuple[Tensor, ...], result: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
    """Return a layer's result, an output and a bias still to add, with the adapters' output added."""
    output, bias = result
    adapters: LinearAdapters = layer.adapters
    if not adapters.is_on:
        return output, bias
    if adapters.divides_inputs:  # the output may be a view, which cannot be changed
        return output + adapters(args[0]), bias
    return output.add_(adapters(args[0])), bias


@contextmanager
def adapters_off(stage: nn.Module) -> Iterator[None]:
    """Let a stage compute without its adapters."""
    adapters = [module for module in stage.modules() if isinstance(module, LinearAdapters)]
    for module in adapters:
        module.is_on = False
    try:
        yield
    finally:
        for module in adapters:
            module.is_on = True
