"""Names and shapes of experts' weights.

hflow stacks the matrices of a layer's experts, as plans do: `model.layers.0.mlp.experts.gate_proj.weight`
has the shape `[N, F, D]`. A checkpoint has a tensor for each expert, under names of its family
(`EXPERT_FAMILIES`). The modules of transformers have one parameter for the gates and ups of all experts, and
one for the downs.

Axes: N experts, F rows of an expert, D hidden.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from hflow.shapes.architectures import EXPERT_FAMILIES, ExpertNames
from hflow.shapes.model_shape import B

_STACKED = re.compile(r"(.*\.mlp\.experts)\.(gate|up|down)_proj\.weight")
_FUSED, _DOWN = ".mlp.experts.gate_up_proj", ".mlp.experts.down_proj"
"""Ends of the names in transformers, `[N, 2F, D]` and `[N, D, F]`."""
_FUSED_B = f"{_FUSED}.{B}"
"""End of the name of the second matrices of adapters of gates and ups, `[N, 2F, r]`."""


def file_names(family: str, name: str, num_experts: int) -> list[str]:
    """Return the names in a checkpoint of the tensors that a stack of `num_experts` consists of."""
    names = EXPERT_FAMILIES.get(family)
    if names is None:
        return [name]
    stacked = _STACKED.fullmatch(name)
    if stacked is None:
        return [_in_file(names, name)]
    matrix = {"gate": names.gate, "up": names.up, "down": names.down}[stacked[2]]
    return [f"{_in_file(names, stacked[1])}.{expert}.{matrix}.weight" for expert in range(num_experts)]


def _in_file(names: ExpertNames, path: str) -> str:
    return path.replace(".mlp.", f".{names.mlp}.")


def path_of(family: str, file_path: str) -> str:
    """Return hflow's path of a module, given that of a checkpoint."""
    names = EXPERT_FAMILIES.get(family)
    return file_path if names is None else file_path.replace(f".{names.mlp}.", ".mlp.")


def file_shapes(family: str, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors in a checkpoint, given those of hflow's tensors."""
    return {
        file_name: shape[1:] if is_stacked(name) else shape
        for name, shape in shapes.items()
        for file_name in file_names(family, name, shape[0])
    }


def is_stacked(name: str) -> bool:
    """Return whether a tensor has the weights of all experts of a layer."""
    return _STACKED.fullmatch(name) is not None


def file_tensors(family: str, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors under the names of a checkpoint, stacked ones as views of each expert's part."""
    return {
        file_name: part
        for name, tensor in named.items()
        for file_name, part in zip(
            file_names(family, name, len(tensor)), tensor if is_stacked(name) else [tensor], strict=True
        )
    }


def read_stacked(family: str, stored: Mapping[str, Any], name: str, box: tuple[slice, ...]) -> Tensor:
    """Read a box of hflow's tensor from a checkpoint, of which only that part is read.

    `stored` has the checkpoint's tensors, as slices that are read when they are indexed.
    """
    experts, *others = box
    if not is_stacked(name):
        (file_name,) = file_names(family, name, 1)
        read: Tensor = stored[file_name][box]
        return read
    names = file_names(family, name, experts.stop)[experts.start :]
    return torch.stack([stored[file_name][tuple(others)] for file_name in names])


def stacked_views(family: str, named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a transformers module under hflow's names, as views.

    `named` may be parts of tensors that are whole on all axes but the first.
    """
    for name, tensor in named:
        if family in EXPERT_FAMILIES and name.endswith((_FUSED, _FUSED_B)):
            path, end = name.split("gate_up_proj")
            gate, up = tensor.detach().chunk(2, 1)
            yield f"{path}gate_proj{end or '.weight'}", gate
            yield f"{path}up_proj{end or '.weight'}", up
        elif family in EXPERT_FAMILIES and name.endswith(_DOWN):
            yield f"{name}.weight", tensor
        else:
            yield name, tensor
