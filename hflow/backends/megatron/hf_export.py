"""Saves a model in HF layout. Ranks take turns in writing files, so that none holds the whole model."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor
from transformers.utils import CONFIG_NAME

from hflow.backends.common.host_copy import host_copy
from hflow.backends.common.weight_files import INDEX, SINGLE
from hflow.backends.megatron.hf_mapping import backbone_shapes
from hflow.backends.megatron.model import Stage
from hflow.backends.megatron.weight_export import named_weights
from hflow.backends.torch_model.heads import SCORE, head_file, head_prefix, save_head, saved_config
from hflow.durable_files import WriteFiles

FILE_BYTES = 2 << 30
"""Maximum size of a file, unless a single tensor is larger."""


def copy_stage(stage: Stage, directory: Path, file_bytes: int = FILE_BYTES) -> WriteFiles:
    """Copy some files of the weights, and return the function that writes them; a collective.

    They have the stage's dtype. The files are those of the torch backend. All ranks take turns, so each holds
    its share of the model. A value head has a separate file beside its backbone.

    Args:
        stage: this rank's.
        directory: made if necessary.
        file_bytes: maximum size of a file, unless a single tensor is larger.
    """
    shapes = backbone_shapes(stage.dims)
    if stage.head == "score":
        shapes[SCORE] = (1, stage.dims.hidden)
    num_bytes = {name: math.prod(shape) * stage.dtype.itemsize for name, shape in shapes.items()}
    file_of = _assign_files(num_bytes, file_bytes)
    writers = {name: number % stage.parallel.group.size() for number, name in enumerate(_unique(file_of))}
    copies: dict[str, dict[str, Tensor]] = {}
    head: dict[str, Tensor] = {}
    receiver_of = {name: writers[file] for name, file in file_of.items()}
    for name, tensor in named_weights(stage, receiver_of=lambda name: receiver_of.get(name, 0)):
        if name in file_of:
            copies.setdefault(file_of[name], {})[name] = host_copy(tensor)
        else:
            head[name.removeprefix(head_prefix(stage.head))] = host_copy(tensor)

    def write() -> list[Path]:
        directory.mkdir(parents=True, exist_ok=True)
        paths = [directory / name for name in copies]
        while copies:  # a file's copy is freed when it is written
            name = next(iter(copies))
            save_file(copies.pop(name), directory / name, metadata={"format": "pt"})
        if head:
            save_head(directory, head)
            paths.append(head_file(directory))
        return [*paths, *_write_descriptions(stage, directory, num_bytes, file_of)]

    return write


def _write_descriptions(
    stage: Stage, directory: Path, num_bytes: Mapping[str, int], file_of: Mapping[str, str]
) -> list[Path]:
    """Write the config, and the index if there are several files, on rank 0. Return their paths."""
    if stage.parallel.group.rank() != 0:
        return []
    saved_config(stage.hf_config, stage.head, stage.dtype).save_pretrained(directory)
    paths = [directory / CONFIG_NAME]
    if len(_unique(file_of)) > 1:
        index = {"metadata": {"total_size": sum(num_bytes.values())}, "weight_map": file_of}
        paths.append(directory / INDEX)
        paths[-1].write_text(json.dumps(index, indent=2) + "\n")
    return paths


def _unique(file_of: Mapping[str, str]) -> list[str]:
    """Return the names of the files in order."""
    return list(dict.fromkeys(file_of.values()))


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
