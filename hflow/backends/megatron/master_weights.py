"""The fp32 weights that are stepped: of each of its stage's parameters a data rank has a range.

Where the model computes in half precision they are apart from it: rounded and gathered they are the model's.
Checkpoints are read into them and written from them, so that nothing is lost on the way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hflow.backends.interface import ModelSettings
from hflow.backends.megatron.checkpoint_reader import fill, open_weights
from hflow.backends.megatron.model import Stage


@dataclass(frozen=True)
class MasterWeight:
    """The range that a data rank steps of one parameter, flattened."""

    shard: Tensor
    """fp32 `[stop - start]`: the parameter's own storage where that is in fp32."""
    start: int
    stop: int


def ranges_of(stage: Stage, optimizer: Any) -> dict[str, MasterWeight]:
    """What this rank steps, by parameter name; a parameter of which it steps nothing is not there.

    Args:
        stage: this rank's.
        optimizer: megatron's distributed optimizer of it.
    """
    own = {
        weight: shard
        for weights, shards in zip(optimizer.model_fp32_groups, optimizer.shard_fp32_groups, strict=True)
        for weight, shard in zip(weights, shards, strict=True)
    }
    found = {}
    for name, weight in stage.module.named_parameters():
        shard: Tensor | None = own.get(weight, getattr(weight, "main_param", None))
        if shard is not None:
            span = optimizer._get_model_param_range_map(weight)["param"]
            found[name] = MasterWeight(shard, span.start, span.end)
    return found


def separate_master_weights(stage: Stage, ranges: dict[str, MasterWeight]) -> dict[str, MasterWeight]:
    """Those of the ranges that are apart from the model; none where it computes in fp32."""
    halves = {n for n, weight in stage.module.named_parameters() if weight.dtype != torch.float32}
    return {name: master for name, master in ranges.items() if name in halves}


@torch.no_grad()
def load(stage: Stage, settings: ModelSettings, masters: dict[str, MasterWeight]) -> None:
    """Read them from the model's checkpoint, which the model has rounded; one parameter at a time."""
    if not masters:
        return
    with open_weights(settings, stage.dims) as read:
        for row in stage.parameters:
            if row.name in masters:
                master, whole = masters[row.name], torch.empty(row.shape, dtype=torch.float32)
                fill([row], {row.name: whole}, read)
                master.shard.copy_(whole.view(-1)[master.start : master.stop])


def gather(stage: Stage, masters: dict[str, MasterWeight]) -> dict[str, Tensor]:
    """Every parameter of the stage in fp32, by name; a collective over data parallelism.

    As large as the stage itself, twice over where that computes in half precision.
    """
    weights = {name: weight.detach() for name, weight in stage.module.named_parameters()}
    halves = {name: weight for name, weight in weights.items() if weight.dtype != torch.float32}
    flat = torch.zeros(sum(x.numel() for x in halves.values()), device=stage.device)
    parts = dict(zip(halves, flat.split([x.numel() for x in halves.values()]), strict=True))
    for name, master in masters.items():
        parts[name][master.start : master.stop] = master.shard
    if stage.parallel.data > 1 and len(flat):
        dist.all_reduce(flat, group=stage.parallel.groups.dp)
    return weights | {name: part.view(weights[name].shape) for name, part in parts.items()}
