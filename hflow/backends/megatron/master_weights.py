"""fp32 master weights: the range of each parameter that a data rank updates.

Where the model computes in half precision, master weights are stored separately from it: rounded and
gathered, they are the model's weights. Checkpoints are read into them, and their shards are part of sharded
checkpoints, so that no precision is lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hflow.backends.megatron.checkpoint_reader import load_parameters, open_weights
from hflow.backends.megatron.model import Stage
from hflow.backends.settings import ModelSettings


@dataclass(frozen=True)
class MasterWeight:
    """The range of one flattened parameter that a data rank updates."""

    shard: Tensor
    """fp32 `[stop - start]`; the parameter's own storage if that is fp32."""
    start: int
    stop: int


def updated_ranges(stage: Stage, optimizers: Sequence[Any]) -> dict[str, MasterWeight]:
    """Return what this rank updates, by parameter name. Parameters that it does not update are left out.

    Args:
        stage: this rank's.
        optimizers: megatron's distributed optimizers of the stage, which update different parameters.
    """
    ranges = {}
    for optimizer in optimizers:
        fp32_shards = {
            weight: shard
            for weights, shards in zip(optimizer.model_fp32_groups, optimizer.shard_fp32_groups, strict=True)
            for weight, shard in zip(weights, shards, strict=True)
        }
        for name, weight in stage.module.named_parameters():
            shard: Tensor | None = fp32_shards.get(weight, getattr(weight, "main_param", None))
            if shard is not None and weight in optimizer.model_param_gbuf_map:
                span = optimizer._get_model_param_range_map(weight)["param"]
                ranges[name] = MasterWeight(shard, span.start, span.end)
    return ranges


def separate_master_weights(stage: Stage, ranges: dict[str, MasterWeight]) -> dict[str, MasterWeight]:
    """Return the ranges that are stored separately from the model; none where it computes in fp32."""
    half = {n for n, weight in stage.module.named_parameters() if weight.dtype != torch.float32}
    return {name: master for name, master in ranges.items() if name in half}


@torch.no_grad()
def load_master_weights(
    stage: Stage, settings: ModelSettings, master_weights: dict[str, MasterWeight]
) -> None:
    """Read separate master weights from the model's checkpoint, one parameter at a time."""
    if not master_weights:
        return
    with open_weights(settings, stage.dims) as read:
        for parameter in stage.parameters:
            if parameter.name in master_weights:
                master = master_weights[parameter.name]
                whole = torch.empty(parameter.shape, dtype=torch.float32)
                load_parameters([parameter], {parameter.name: whole}, read)
                master.shard.copy_(whole.view(-1)[master.start : master.stop])
