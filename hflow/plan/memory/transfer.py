"""Bytes of weights on their way: to an engine that wakes, and into a checkpoint.

Weights are gathered a bucket at a time; no rank but the one that writes a checkpoint, where it has no other
memory than the host's, holds a whole model for it.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Literal

from hflow.plan.memory.items import Items
from hflow.plan.memory.rank import Rank
from hflow.plan.shape import ModelShape, num_parameters, tensors

BUCKET_BYTES = 64 << 20
"""A bucket is closed when it is at least this large (`torch_model/gather.py`, `workers/weights.py`)."""
FP32 = 4


def giving(rank: Rank, how: Literal["shared", "gather", "pull"]) -> Items:
    """What a training rank needs while engines are given its weights."""
    if how == "shared" and rank.width == FP32:
        return Items()
    needed = _gathering(rank, rank.width)
    if how == "pull" and rank.is_first and rank.on_cpu:
        return needed + Items(buckets=2 * largest_bucket(rank.shape, rank.width))
    return needed


def taking(rank: Rank, how: Literal["shared", "gather", "pull"]) -> Items:
    """What an engine's rank needs while it takes weights from other workers: a bucket in host memory."""
    if how != "pull" or not rank.on_cpu:
        return Items()
    return Items(buckets=largest_bucket(rank.shape, rank.width))


def saving(rank: Rank) -> Items:
    """What a rank needs while its model is saved in fp32; on the host the writer collects it whole."""
    needed = _gathering(rank, FP32)
    if not (rank.is_first and rank.on_cpu) or rank.replica.layout.world == 1:
        return needed
    return needed + Items({"whole weights": FP32 * num_parameters(rank.shape)})


def _gathering(rank: Rank, width: int) -> Items:
    """One bucket whole, this rank's part of it twice, gloo's copy, and the tensor that is cut out of it."""
    if rank.replica.layout.world == 1:
        cast = width < FP32 and rank.facts.over_data == "everything"
        return Items(buckets=width * largest_tensor(rank.shape)) if cast else Items()
    bucket = largest_bucket(rank.shape, width)
    parts = bucket // max(rank.data if rank.facts.over_data == "everything" else rank.tensor, 1)
    casts = parts if width < FP32 and rank.facts.over_data == "everything" else 0
    whole = bucket if rank.on_cpu else width * largest_tensor(rank.shape)
    return Items(buckets=bucket + 2 * parts + casts + whole)


@lru_cache
def largest_tensor(shape: ModelShape) -> int:
    """Entries of the largest tensor."""
    return max(spec.numel for spec in tensors(shape))


@lru_cache
def largest_bucket(shape: ModelShape, width: int) -> int:
    """Bytes of the largest bucket, tensors taken in the checkpoint's order."""
    return max(_buckets((width * spec.numel for spec in tensors(shape)), BUCKET_BYTES))


def _buckets(sizes: Iterable[int], least: int) -> list[int]:
    """Sums of neighbours, each closed as soon as it is `least`."""
    sums = [0]
    for size in sizes:
        if sums[-1] >= least:
            sums.append(0)
        sums[-1] += size
    return sums
