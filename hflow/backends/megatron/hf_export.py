"""Writes a model in HF layout tensor by tensor, so that no rank holds the whole model."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig

from hflow.backends.megatron.checkpoint_reader import INDEX, SINGLE
from hflow.backends.megatron.hf_mapping import backbone_shapes
from hflow.backends.megatron.model import Stage
from hflow.backends.megatron.weight_export import Named, named_weights
from hflow.backends.torch_model.heads import save_head
from hflow.backends.torch_model.weight_export import scalar_prefix

FILE_BYTES = 2 << 30
"""Maximum size of a file, unless a single tensor is larger."""

_MODELS: Any = AutoModelForCausalLM
_DTYPE = torch.float32


def save_stage(
    stage: Stage,
    directory: Path,
    values: Mapping[str, Tensor] | None = None,
    file_bytes: int = FILE_BYTES,
) -> None:
    """Write the weights in fp32, as the torch backend does; a collective in which rank 0 writes.

    A scalar head has a separate file beside its backbone.

    Args:
        stage: this rank's.
        directory: made if necessary.
        values: as in `named_weights`.
        file_bytes: maximum size of a file, unless a single tensor is larger.
    """
    if stage.parallel.d == 0:
        is_writer = stage.parallel.group.rank() == 0
        weights = named_weights(stage, _DTYPE, values, is_receiver=is_writer)
        if is_writer:
            directory.mkdir(parents=True, exist_ok=True)
            _write_weights(stage, directory, weights, file_bytes)
            _saved_config(stage.hf_config).save_pretrained(directory)
        else:
            assert not list(weights)
    dist.barrier(stage.parallel.group)


def write_fp32(
    path: Path, shapes: Mapping[str, tuple[int, ...]], tensors: Iterable[tuple[str, Tensor]]
) -> None:
    """Write fp32 tensors to a safetensors file one at a time; the library's writer needs all of them at once.

    The format: the header's length (8 bytes, little-endian), a JSON header with each tensor's offsets in the
    data section, and the data section without gaps.

    Args:
        path: of the file.
        shapes: name -> shape of exactly the tensors that follow.
        tensors: in any order. Each is released before the next is requested.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    missing = set(shapes)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        data_start = file.tell()
        for name, tensor in tensors:
            assert tuple(tensor.shape) == shapes[name], f"{name} has an unexpected shape"
            file.seek(data_start + header[name]["data_offsets"][0])
            file.write(tensor.float().cpu().contiguous().numpy().data)
            missing.remove(name)
    assert not missing, f"{path} lacks {sorted(missing)}"


def _write_weights(stage: Stage, directory: Path, weights: Iterable[Named], file_bytes: int) -> None:
    shapes = backbone_shapes(stage.dims)
    num_bytes = {name: math.prod(shape) * _DTYPE.itemsize for name, shape in shapes.items()}
    files = _assign_files(num_bytes, file_bytes)
    for file, named in groupby(weights, key=lambda pair: files.get(pair[0])):
        if file is None:
            prefix = scalar_prefix(stage.head)
            save_head(directory, stage.head, {n.removeprefix(prefix): x.cpu().contiguous() for n, x in named})
        else:
            file_shapes = {name: shape for name, shape in shapes.items() if files[name] == file}
            write_fp32(directory / file, file_shapes, named)
    if len(set(files.values())) > 1:
        index = {"metadata": {"total_size": sum(num_bytes.values())}, "weight_map": files}
        (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _assign_files(num_bytes: Mapping[str, int], file_bytes: int) -> dict[str, str]:
    """Return the file of each tensor; files are filled in order."""
    numbers = list(_file_numbers(num_bytes.values(), file_bytes))
    if not any(numbers):
        return dict.fromkeys(num_bytes, SINGLE)
    count = numbers[-1] + 1
    return {
        name: f"model-{number + 1:05d}-of-{count:05d}.safetensors"
        for name, number in zip(num_bytes, numbers, strict=True)
    }


def _file_numbers(num_bytes: Iterable[int], file_bytes: int) -> Iterator[int]:
    """Yield the number of the file for each size."""
    number, filled = 0, 0
    for size in num_bytes:
        if filled and filled + size > file_bytes:
            number, filled = number + 1, 0
        filled += size
        yield number


def _saved_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the config as `transformers` saves it with these weights."""
    saved = copy.deepcopy(config)
    saved.architectures = [_MODELS._model_mapping[type(config)].__name__]
    saved.dtype = _DTYPE
    return saved
