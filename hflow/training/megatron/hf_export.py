"""Saves a model in HF layout. Every rank writes some of the files, so that none holds the whole model."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from hflow.base.durable_files import WriteFiles
from hflow.base.model_files import FILE_BYTES
from hflow.models.adapter import saved_peft_config, write_adapter
from hflow.models.expert_tensors import file_names, file_tensors
from hflow.models.heads import SCORE, head_prefix, saved_config
from hflow.models.host_copy import HostCopies
from hflow.models.settings import MERGED, ModelSettings
from hflow.shapes.model_shape import is_in_fp32
from hflow.training.fsdp.build import model_without_weights
from hflow.training.hf_files import Copies, FileDivision, check_is_shared
from hflow.training.megatron.hf_mapping import backbone_shapes
from hflow.training.megatron.model import Stage
from hflow.training.megatron.weight_export import named_weights
from hflow.weights.adapters import with_adapter


def copy_model(stage: Stage, settings: ModelSettings, directory: Path, host: HostCopies) -> WriteFiles:
    """Copy the weights in the stage's dtype, and return the function that writes them; a collective.

    Of a model with adapters the first rank writes these, in peft's layout. If the settings say so, the merged
    model is written in a directory beside them.

    Args:
        directory: made if necessary, in a directory that all ranks share.

    Raises:
        BackendError: if this rank does not see the directory in which it will be.
    """
    lora, rank = settings.lora, stage.parallel.group.rank()
    if stage.parallel.group.size() > 1:
        check_is_shared(directory.parent, rank)
    if lora is None:
        return copy_stage(stage, directory, host)
    write_merged: WriteFiles = list
    if lora.save_merged:
        merged = partial(with_adapter, dict(named_weights(stage)), lora.scale)
        write_merged = copy_stage(stage.whole, directory / MERGED, host, changed=merged)
    adapters = {name: host.copy(tensor) for name, tensor in named_weights(stage, receiver_of=lambda name: 0)}
    if rank > 0:
        return write_merged
    config = saved_peft_config(model_without_weights(stage.hf_config, stage.dtype), settings)
    return lambda: [*write_adapter(directory, config, stage.head, adapters), *write_merged()]


def _unchanged(name: str, tensor: Tensor) -> Tensor:
    return tensor


def copy_stage(
    stage: Stage,
    directory: Path,
    host: HostCopies,
    file_bytes: int = FILE_BYTES,
    changed: Callable[[str, Tensor], Tensor] = _unchanged,
) -> WriteFiles:
    """Copy some files of the weights, and return the function that writes them; a collective.

    They have the stage's dtype, but for biases of routers. Each rank copies an equal share of the model. A
    value head has a separate file beside its backbone.

    Args:
        file_bytes: size that files should not exceed.
        changed: returns what is saved in place of a named tensor.
    """
    rank, num_ranks = stage.parallel.group.rank(), stage.parallel.group.size()
    shapes = backbone_shapes(stage.shape)
    if stage.head == "score":
        shapes[SCORE] = (1, stage.shape.hidden)
    num_bytes = {
        name: math.prod(shape) * (torch.float32 if is_in_fp32(name) else stage.dtype).itemsize
        for name, shape in shapes.items()
    }
    files = FileDivision.over_ranks(num_bytes, num_ranks, file_bytes)
    copies: Copies = {}
    head: dict[str, Tensor] = {}
    for name, tensor in named_weights(stage, receiver_of=files.writer):
        if name in files.file_of:
            copies.setdefault(files.file_of[name], {}).update(
                file_tensors(stage.shape.family, {name: host.copy(changed(name, tensor))})
            )
        else:
            head[name.removeprefix(head_prefix(stage.head))] = host.copy(tensor)
    saved_in = {
        file_name: file
        for name, file in files.file_of.items()
        for file_name in file_names(stage.shape.family, name, shapes[name][0])
    }
    config = saved_config(stage.hf_config, stage.head, stage.dtype) if rank == 0 else None
    return partial(files.write, directory, copies, head, config, saved_in)
