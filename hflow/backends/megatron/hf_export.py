"""Writes a stage's model in HF layout, tensor by tensor: no rank holds the whole model."""

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

# -------------------- Writes a safetensors file tensor by tensor; the library's own writer wants all of
# them at once.
# The format: the header's length (8 bytes, little-endian), a JSON header that says where each tensor lies
# behind it, then the tensors, without gaps.


def write_fp32(
    path: Path, shapes: Mapping[str, tuple[int, ...]], tensors: Iterable[tuple[str, Tensor]]
) -> None:
    """Write fp32 tensors as they come, in any order.

    Args:
        path: of the file.
        shapes: of exactly the tensors that will come, by name.
        tensors: each is let go before the next is asked for.
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
        begin = file.tell()
        for name, tensor in tensors:
            assert tuple(tensor.shape) == shapes[name], f"{name} has another shape than was said"
            file.seek(begin + header[name]["data_offsets"][0])
            file.write(tensor.float().cpu().contiguous().numpy().data)
            missing.remove(name)
    assert not missing, f"{path} lacks {sorted(missing)}"


FILE_BYTES = 2 << 30
"""A file is closed before it would become larger than this."""

_MODELS: Any = AutoModelForCausalLM
_DTYPE = torch.float32


def save(
    stage: Stage,
    directory: Path,
    values: Mapping[str, Tensor] | None = None,
    file_bytes: int = FILE_BYTES,
) -> None:
    """Write the weights in fp32, as the torch backend does; a collective, of which rank 0 writes.

    A scalar head gets a file of its own beside its backbone.

    Args:
        stage: this rank's.
        directory: made if it is not there.
        values: as of `named_weights`.
        file_bytes: the most that a file holds, unless a single tensor is larger.
    """
    if stage.parallel.d == 0:
        is_writer = stage.parallel.group.rank() == 0
        weights = named_weights(stage, _DTYPE, values, is_taker=is_writer)
        if is_writer:
            directory.mkdir(parents=True, exist_ok=True)
            _write(stage, directory, weights, file_bytes)
            _describe(stage.hf_config).save_pretrained(directory)
        else:
            assert not list(weights)
    dist.barrier(stage.parallel.group)


def _write(stage: Stage, directory: Path, weights: Iterable[Named], file_bytes: int) -> None:
    shapes = backbone_shapes(stage.dims)
    files = _files({name: math.prod(shape) * _DTYPE.itemsize for name, shape in shapes.items()}, file_bytes)
    for file, named in groupby(weights, key=lambda pair: files.get(pair[0])):
        if file is None:
            prefix = scalar_prefix(stage.head)
            save_head(directory, stage.head, {n.removeprefix(prefix): x.cpu().contiguous() for n, x in named})
        else:
            inside = {name: shape for name, shape in shapes.items() if files[name] == file}
            write_fp32(directory / file, inside, named)
    if len(set(files.values())) > 1:
        total = sum(math.prod(shape) for shape in shapes.values()) * _DTYPE.itemsize
        index = {"metadata": {"total_size": total}, "weight_map": files}
        (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _files(num_bytes: Mapping[str, int], file_bytes: int) -> dict[str, str]:
    """The file of each tensor: they are filled in order."""
    numbers = list(_fill(num_bytes.values(), file_bytes))
    if not any(numbers):
        return dict.fromkeys(num_bytes, SINGLE)
    count = numbers[-1] + 1
    return {
        name: f"model-{number + 1:05d}-of-{count:05d}.safetensors"
        for name, number in zip(num_bytes, numbers, strict=True)
    }


def _fill(num_bytes: Iterable[int], file_bytes: int) -> Iterator[int]:
    """The number of the file that each size goes into."""
    number, filled = 0, 0
    for size in num_bytes:
        if filled and filled + size > file_bytes:
            number, filled = number + 1, 0
        filled += size
        yield number


def _describe(config: PreTrainedConfig) -> PreTrainedConfig:
    """The configuration as `transformers` saves it with these weights."""
    described = copy.deepcopy(config)
    described.architectures = [_MODELS._model_mapping[type(config)].__name__]
    described.dtype = _DTYPE
    return described
