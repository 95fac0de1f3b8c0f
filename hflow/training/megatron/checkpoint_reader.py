"""Reads blocks of a model's weights from a safetensors checkpoint, or from a model drawn from a seed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hflow.models.adapter import adapter_weights, add_adapter
from hflow.models.drawn_weights import drawn_weights
from hflow.models.dtypes import DTYPES
from hflow.models.expert_tensors import file_shapes, read_stacked, stacked_views
from hflow.models.heads import SCORE, head_prefix
from hflow.models.hf_config import read_config
from hflow.models.settings import ModelSettings
from hflow.models.weight_files import check_tensors, open_weight_files
from hflow.shapes.model_shape import ModelShape, is_in_fp32
from hflow.training.fsdp.build import model_without_weights, scalar_head
from hflow.training.megatron.hf_mapping import MappedParameter, TensorPart, backbone_shapes
from hflow.types.tensor_slices import box_slices

ReadBlock = Callable[[TensorPart], Tensor]
"""Returns a block of an HF tensor."""


@contextmanager
def open_weights(
    settings: ModelSettings, shape: ModelShape, parameters: Iterable[MappedParameter] = ()
) -> Iterator[ReadBlock]:
    """Open a model's weights; yield a function that reads blocks of them.

    Only the requested blocks of a checkpoint are read. Without a checkpoint, every rank draws the weights
    that the torch backend draws, one tensor at a time, and keeps the blocks of its parameters. Adapters are
    drawn as the torch backend draws them, all on every rank.

    Args:
        parameters: the parameters whose blocks will be read; a checkpoint has any block.

    Raises:
        BackendError: if the checkpoint has no readable weights, or those of another model.
    """
    parameters = tuple(parameters)
    new_tensors = {**_head_tensors(settings, shape), **_drawn_adapters(settings, parameters)}
    with ExitStack() as files:
        if settings.path is None:
            drawn = _draw_blocks(settings, [part for row in parameters for part in row.parts])
        else:
            tensors = open_weight_files(Path(settings.path), files)
            _check(Path(settings.path), tensors, shape)

        def read(part: TensorPart) -> Tensor:
            if part.tensor in new_tensors:
                return new_tensors[part.tensor][box_slices(part.box)]
            if settings.path is None:
                return drawn[part]
            return read_stacked(shape.family, tensors, part.tensor, box_slices(part.box))

        yield read


def _draw_blocks(settings: ModelSettings, parts: Sequence[TensorPart]) -> dict[TensorPart, Tensor]:
    """Return blocks of a model with random weights, copied so that only they have memory.

    Biases of routers are 0.
    """
    wanted: dict[str, list[TensorPart]] = {}
    for part in parts:
        wanted.setdefault(part.tensor, []).append(part)
    config = read_config(settings)
    drawn = stacked_views(config.model_type, drawn_weights(config, settings.seed))
    blocks = {part: torch.zeros(part.shape) for part in parts if is_in_fp32(part.tensor)}
    for name, tensor in drawn:
        blocks |= {part: tensor[box_slices(part.box)].clone() for part in wanted.get(name, ())}
    return blocks


@torch.no_grad()
def load_parameters(
    parameters: Iterable[MappedParameter], tensors: Mapping[str, Tensor], read: ReadBlock
) -> None:
    """Set parameters, given by name, to their blocks of the checkpoint; padding becomes 0."""
    for parameter in parameters:
        target = tensors[parameter.name].view(parameter.shape)
        if parameter.has_padding:
            target.zero_()
        for part in parameter.parts:
            if part.length:
                target.narrow(part.axis, part.offset, part.length).copy_(read(part))


def _head_tensors(settings: ModelSettings, shape: ModelShape) -> dict[str, Tensor]:
    """Return the weights of a scalar head under their exported names."""
    if settings.head == "lm":
        return {}
    head = scalar_head(settings, shape.hidden)
    return {head_prefix(settings.head) + name: x for name, x in head.state_dict().items()}


def _drawn_adapters(settings: ModelSettings, parameters: Iterable[MappedParameter]) -> dict[str, Tensor]:
    """Return all new adapters of a model by name; empty if no parameter has one."""
    if not any(".lora_" in part.tensor for row in parameters for part in row.parts):
        return {}
    config = read_config(settings)
    model = model_without_weights(config, DTYPES[settings.dtype])
    add_adapter(model, settings)
    drawn = ((name, weight.detach()) for name, weight in adapter_weights(model).items())
    return dict(stacked_views(config.model_type, drawn))


def _check(path: Path, tensors: Mapping[str, Any], shape: ModelShape) -> None:
    """Check that a checkpoint has exactly the model's tensors. An unused output matrix may be there."""
    expected = {name: list(size) for name, size in file_shapes(shape.family, backbone_shapes(shape)).items()}
    stored = {name: slice_.get_shape() for name, slice_ in tensors.items()}
    unknown = {name for name in stored.keys() - expected.keys() if not _is_ignored(name, shape)}
    misshapen = {name for name in stored.keys() & expected.keys() if stored[name] != expected[name]}
    check_tensors(path, expected.keys() - stored.keys(), unknown, misshapen)


def _is_ignored(name: str, shape: ModelShape) -> bool:
    """Return whether a checkpoint may have this tensor although the model does not use it."""
    has_output = shape.head == "lm" and not shape.is_tied
    has_score = shape.head != "lm" and name == SCORE
    return has_score or (name == "lm_head.weight" and not has_output) or name.endswith(".rotary_emb.inv_freq")
