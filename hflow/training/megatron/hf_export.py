"""Saves a model in HF layout. Every rank writes some of the files, so that none holds the whole model."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

from torch import Tensor

from hflow.base.durable_files import WriteFiles
from hflow.base.model_files import FILE_BYTES
from hflow.models.expert_tensors import file_names, file_tensors
from hflow.models.heads import SCORE, head_prefix, saved_config
from hflow.models.host_copy import HostCopies
from hflow.training.hf_files import Copies, FileDivision, check_is_shared
from hflow.training.megatron.hf_mapping import backbone_shapes
from hflow.training.megatron.model import Stage
from hflow.training.megatron.weight_export import named_weights


def copy_stage(stage: Stage, directory: Path, host: HostCopies, file_bytes: int = FILE_BYTES) -> WriteFiles:
    """Copy some files of the weights, and return the function that writes them; a collective.

    They have the stage's dtype. Each rank copies an equal share of the model. A value head has a separate
    file beside its backbone.

    Args:
        stage: this rank's.
        directory: made if necessary, in a directory that all ranks share.
        host: makes the copies, which are complete when `host.copying()` ends.
        file_bytes: size that files should not exceed.

    Raises:
        BackendError: if this rank does not see the directory in which it will be.
    """
    rank, num_ranks = stage.parallel.group.rank(), stage.parallel.group.size()
    if num_ranks > 1:
        check_is_shared(directory.parent, rank)
    shapes = backbone_shapes(stage.shape)
    if stage.head == "score":
        shapes[SCORE] = (1, stage.shape.hidden)
    num_bytes = {name: math.prod(shape) * stage.dtype.itemsize for name, shape in shapes.items()}
    files = FileDivision.over_ranks(num_bytes, num_ranks, file_bytes)
    copies: Copies = {}
    head: dict[str, Tensor] = {}
    for name, tensor in named_weights(stage, receiver_of=files.writer):
        if name in files.file_of:
            copies.setdefault(files.file_of[name], {}).update(file_tensors({name: host.copy(tensor)}))
        else:
            head[name.removeprefix(head_prefix(stage.head))] = host.copy(tensor)
    saved_in = {
        file_name: file
        for name, file in files.file_of.items()
        for file_name in file_names(name, shapes[name][0])
    }
    config = saved_config(stage.hf_config, stage.head, stage.dtype) if rank == 0 else None
    return partial(files.write, directory, copies, head, config, saved_in)
