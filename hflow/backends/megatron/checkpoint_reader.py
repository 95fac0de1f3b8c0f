"""Where a model's weights come from: blocks of a safetensors checkpoint, or of a model drawn from a seed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hflow.backends.common.checks import refuse_tensors
from hflow.backends.interface import ModelSettings
from hflow.backends.megatron.hf_mapping import MappedParameter, TensorPart, backbone_shapes
from hflow.backends.megatron.model_dims import ModelDims
from hflow.backends.torch_model import weight_export as weights
from hflow.backends.torch_model.build import build, scalar_head
from hflow.errors import BackendError

Read = Callable[[TensorPart], Tensor]
"""Makes a block of a checkpoint tensor."""

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


@contextmanager
def open_weights(settings: ModelSettings, dims: ModelDims) -> Iterator[Read]:
    """Read blocks of a model's weights: of a checkpoint only what is asked for, file by file.

    Without a checkpoint the whole model is drawn on every rank, the same one that the torch backend draws.

    Raises:
        BackendError: when the checkpoint has no readable weights, or others than the model's.
    """
    if settings.path is None:
        model, head = build(settings)
        drawn = dict(weights.named_weights(model, head, settings.head, model.dtype))
        yield lambda part: _block(drawn[part.tensor], part)
        return
    path = Path(settings.path)
    small = _head_tensors(settings, dims)
    with ExitStack() as files:
        tensors = _open(path, files)
        _check(path, tensors, dims)

        def read(part: TensorPart) -> Tensor:
            if part.tensor in small:
                return _block(small[part.tensor], part)
            return _block(tensors[part.tensor], part)

        yield read


@torch.no_grad()
def fill(rows: Iterable[MappedParameter], tensors: Mapping[str, Tensor], read: Read) -> None:
    """Set parameters, by name, to their blocks of the checkpoint; padding becomes 0."""
    for row in rows:
        target = tensors[row.name]
        if row.has_padding:
            target.zero_()
        for part in row.parts:
            if part.length:
                target.narrow(part.axis, part.at, part.length).copy_(read(part))


def _head_tensors(settings: ModelSettings, dims: ModelDims) -> dict[str, Tensor]:
    """The weights of a scalar head, by the names that they have in exports."""
    if settings.head == "lm":
        return {}
    head = scalar_head(settings, dims.hidden)
    return {weights.scalar_prefix(settings.head) + name: x for name, x in head.state_dict().items()}


def _open(path: Path, files: ExitStack) -> dict[str, Any]:
    """Every tensor of a checkpoint as a slice that reads when it is indexed."""
    try:
        names = [SINGLE]
        if not (path / SINGLE).is_file() and (path / INDEX).is_file():
            index = json.loads((path / INDEX).read_text())
            names = sorted(set(index["weight_map"].values()))
        tensors: dict[str, Any] = {}
        for name in names:
            file = files.enter_context(safe_open(path / name, framework="pt"))
            tensors |= {tensor: file.get_slice(tensor) for tensor in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, ValueError, LookupError) as error:
        raise BackendError(f"{path} has no readable weights: {str(error).splitlines()[0]}") from None
    return tensors


def _check(path: Path, tensors: Mapping[str, Any], dims: ModelDims) -> None:
    """A checkpoint must hold exactly the model's tensors; an output matrix that has no use is passed over."""
    wanted = {name: list(shape) for name, shape in backbone_shapes(dims).items()}
    found = {name: slice_.get_shape() for name, slice_ in tensors.items()}
    unknown = {name for name in found.keys() - wanted.keys() if not _is_spare(name, dims)}
    misshapen = {name for name in found.keys() & wanted.keys() if found[name] != wanted[name]}
    refuse_tensors(path, wanted.keys() - found.keys(), unknown, misshapen)


def _is_spare(name: str, dims: ModelDims) -> bool:
    """Whether a tensor may be there though the model does not have it."""
    has_output = dims.head == "lm" and not dims.is_tied
    return (name == "lm_head.weight" and not has_output) or name.endswith(".rotary_emb.inv_freq")


def _block(tensor: Any, part: TensorPart) -> Tensor:
    block: Tensor = tensor[tuple(slice(*span) for span in part.box)]
    return block
