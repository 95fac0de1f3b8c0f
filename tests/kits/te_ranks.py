"""Results of four real ranks (gloo) whose layers are those of the stand-in for Transformer Engine."""

from __future__ import annotations

from pathlib import Path

import megatron_kit as kit
import megatron_ranks
import megatron_twin_ranks as twin_ranks
import megatron_twins as twins
import shard_ranks
import te_cases as cases
import torch.distributed as dist
import transformer_engine
from megatron.core.tensor_parallel import layers

from hflow.training.megatron import optimizer as megatron_optimizer
from hflow.training.megatron import weight_export as weights

assert Path(transformer_engine.__file__).is_relative_to(cases.STAND_IN)


def run(rank: int, path: Path) -> None:
    twin_ranks.run(rank, path, act)


def act(rank: int, path: Path, groups: twin_ranks.Groups) -> None:
    weights.BUCKET_BYTES = 10_000
    for turn in kit.ROUNDS:
        for ranks, case in turn:
            if rank in ranks:
                megatron_ranks.compute(cases.with_te(case), groups[ranks], path)
    megatron_optimizer.BUCKET_PARAMETERS = twins.BUCKET_PARAMETERS
    for number, turn in enumerate([*cases.ROUNDS, *cases.FP8_ROUNDS]):
        layers._grad_accum_fusion_available = number % 2 == 1
        with twin_ranks.late_gathers(number % 3 == 0):
            twin_ranks.train_turn(rank, path, groups, turn)
    layers._grad_accum_fusion_available = False
    for name in {writer: None for writer, _ in cases.PAIRS}:
        if rank in cases.SIDES[name].ranks:
            shard_ranks.write(cases.SIDES[name], groups, path)
    dist.barrier()
    for writer, reader in cases.PAIRS:
        if rank in cases.SIDES[reader].ranks:
            shard_ranks.read(cases.SIDES[writer], cases.SIDES[reader], groups, path)
    dist.barrier()
