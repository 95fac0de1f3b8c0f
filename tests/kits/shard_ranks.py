"""Ranks that train, write sharded checkpoints, and resume from those of other layouts and backends."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest import mock

import megatron_twin_ranks as twin_ranks
import megatron_twins as twins
import shard_cases as cases
import torch
import torch.distributed as dist
import torch_kit as kit

from hflow.training.interface import ModelBackend
from hflow.training.optimizers.interface import StepOptimizer


def exchange(rank: int, path: Path, groups: twin_ranks.Groups) -> None:
    run(cases.EXCHANGES, rank, path, groups)


def exchange_optimizers(rank: int, path: Path, groups: twin_ranks.Groups) -> None:
    run(cases.OF_OPTIMIZERS.values(), rank, path, groups)


def run(exchanges: Iterable[cases.Exchange], rank: int, path: Path, groups: twin_ranks.Groups) -> None:
    for sides, pairs in exchanges:
        for name in {writer: None for writer, _ in pairs}:
            if rank in sides[name].ranks:
                write(sides[name], groups, path)
        dist.barrier()
        for writer, reader in pairs:
            if rank in sides[reader].ranks:
                read(sides[writer], sides[reader], groups, path)
        dist.barrier()


def build(side: cases.Side, groups: twin_ranks.Groups, path: Path) -> ModelBackend:
    """Build a model as it is before any step, and write what this rank's parts of weights consist of."""
    find = StepOptimizer._find_matrices
    with mock.patch.object(StepOptimizer, "_find_matrices", autospec=True, side_effect=find) as spy:
        backend = _build(side, groups, path)
    _, blocks, _ = spy.call_args.args
    division = [list(of(torch.arange(part.numel()).view(part.shape))) for part, of in blocks.items()]
    torch.save(division, path / f"{cases.division(side)}.{dist.get_rank()}.pt")
    return backend


def _build(side: cases.Side, groups: twin_ranks.Groups, path: Path) -> ModelBackend:
    group = groups.get(side.ranks)
    if side.backend == "megatron":
        return twin_ranks.model(side.twin, path, group)
    changes = twins.settings(dataclasses.replace(side.twin, settings={}), path / "checkpoint")
    own = {key: value for key, value in side.twin.settings.items() if key in ("dtype", "optim")}
    return kit.model(side.twin.data, group, replicate=side.twin.replicate, **changes | own)


def train(backend: ModelBackend, side: cases.Side, groups: twin_ranks.Groups, steps: range) -> list[Any]:
    """Return metrics of some steps."""
    call, _ = twins.NODES[side.twin.node]
    d, is_head = 0, True
    if len(side.ranks) > 1:
        group = groups[side.ranks]
        d, is_head = (group.rank(), True) if side.backend == "torch" else twin_ranks.place(side.twin, group)
    shards = twins.shards(side.twin.data, d) if is_head else []
    return [backend.train(call, shards, step) for step in steps]


def write(side: cases.Side, groups: twin_ranks.Groups, path: Path) -> None:
    backend = build(side, groups, path)
    train(backend, side, groups, twins.STEPS[: cases.NUM_WRITTEN])
    backend.save_shards(str(path / cases.written(side)))()


def read(writer: cases.Side, reader: cases.Side, groups: twin_ranks.Groups, path: Path) -> None:
    """Make one more step; write its metrics and the weights after it. In bf16, save what was loaded."""
    backend = build(reader, groups, path)
    backend.load_shards(str(path / cases.written(writer)))
    name = cases.read(writer, reader)
    if reader.twin.dtype == "bf16":
        backend.save_shards(str(path / f"{name} again"))()
        return
    metrics = train(backend, reader, groups, twins.STEPS[cases.NUM_WRITTEN : cases.NUM_WRITTEN + 1])
    weights = {key: tensor.clone() for key, tensor in backend.weights()}
    if dist.get_rank() == reader.ranks[0]:
        torch.save(weights, path / f"{name}.weights.pt")
    if metrics[0]:
        torch.save(metrics[0], path / f"{name}.metrics.pt")
