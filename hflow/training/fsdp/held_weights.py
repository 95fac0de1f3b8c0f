"""Fills the part of a model's weights that a rank holds, from a checkpoint or by drawing them from a seed.

Thus no rank needs memory for the whole model.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import torch
from transformers import PreTrainedModel

from hflow.models.adapter import base_parameters
from hflow.models.drawn_weights import drawn_weights
from hflow.models.expert_tensors import file_shapes, read_stacked, stacked_views
from hflow.models.heads import SCORE
from hflow.models.weight_files import open_weight_files
from hflow.training.fsdp.optimizer import local_shard
from hflow.training.fsdp.weight_export import blocks_of, held_box
from hflow.types.tensor_slices import box_slices, numel

OUTPUT = "lm_head.weight"
"""The output matrix of a language model, which a scalar head does not use."""


def holds_parameters_of(path: Path, model: PreTrainedModel, head: str) -> bool:
    """Return whether `load_held_weights` can read a model's parameters from a checkpoint that has no others.

    Each must be there under its own name and shape, or as the tensors of single experts. Other checkpoints
    may be right, too: transformers renames and merges tensors of some families, and explains what is wrong.

    `model` is a causal language model with its output matrix, which only a model with the head `lm` needs.
    """
    names = {name for name, _ in model.named_parameters()}
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)} - names
    buffers = model.state_dict().keys() - names - tied
    whole = stacked_views(model.config.model_type, model.named_parameters())
    shapes = file_shapes(model.config.model_type, {name: tuple(tensor.shape) for name, tensor in whole})
    expected = {name: list(shape) for name, shape in shapes.items()}
    with ExitStack() as files:
        stored = {name: opened.get_shape() for name, opened in open_weight_files(path, files).items()}
    output = set() if head == "lm" else {OUTPUT}
    unused = tied if head == "lm" else {*tied, OUTPUT, SCORE}
    has_one_dtype = model.dtype == torch.float32 or not model._keep_in_fp32_modules_strict
    return (
        not buffers
        and has_one_dtype
        and expected.keys() - stored.keys() <= output
        and stored.keys() - expected.keys() <= unused
        and all(stored[name] == expected[name] for name in expected.keys() & stored.keys())
    )


def load_held_weights(path: Path, model: PreTrainedModel) -> None:
    """Fill this rank's part of each parameter of a model but adapters from a checkpoint; not a collective."""
    with ExitStack() as files, torch.no_grad():
        stored, family = open_weight_files(path, files), model.config.model_type
        for name, weight in base_parameters(model).items():
            if numel(held_box(weight)):
                for block in blocks_of(model, name, weight, local_shard(weight.detach())):
                    block.values.copy_(read_stacked(family, stored, block.tensor, box_slices(block.box)))


def draw_held_weights(seed: int, model: PreTrainedModel) -> None:
    """Fill this rank's part of each parameter of a model but adapters with random weights; not a collective.

    The weights are those that a process draws which has the whole model.
    """
    parameters = base_parameters(model)
    with torch.no_grad():
        for name, values in drawn_weights(model.config, seed):
            if name in parameters and numel(box := held_box(parameters[name])):
                local_shard(parameters[name].detach()).copy_(values[box_slices(box)])
