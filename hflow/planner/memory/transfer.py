"""Memory of weight transfers: from a trainer to engines, and into a checkpoint.

Weights that engines pull are sliced out of what each rank holds. Otherwise they are gathered one bucket at a
time. Only the rank that writes a checkpoint on a CPU holds a whole model.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import lru_cache
from itertools import accumulate
from typing import Literal

from hflow.planner.forecast import MemoryCategory
from hflow.planner.memory.items import Items, item
from hflow.planner.memory.rank import FP32_BYTES, Rank
from hflow.planner.model_shape import ModelShape, num_parameters, tensors

BUCKET_BYTES = 64 << 20
"""A bucket is closed when it has at least this size (`torch_model/weight_export.py`,
`weights/buckets.py`). Where the data axis does not shard weights, a tensor rank's part of it has."""
FILE_BYTES = 2 << 30
"""Maximum size of a checkpoint's file, unless one tensor is larger (`megatron/hf_export.py`). The writer
collects a whole file where the data axis does not shard weights."""


def send_weights(rank: Rank, how: Literal["shared", "gather", "pull"]) -> Items:
    """Return what a training rank needs while engines receive its weights."""
    if how == "shared" and rank.width == FP32_BYTES:
        return Items()
    return _slice_buckets(rank) if how == "pull" else _gather_bucket(rank, rank.width)


def published_weights(rank: Rank, transports: Collection[str], *, is_waking: bool) -> Items:
    """Return what a training rank holds of a version that is published.

    `collective` keeps packed slices on the device until engines take them, and `ipc` while they wake.
    `shared` keeps its segments for the next version, in the memory of the host: on a CPU the device's.

    Args:
        rank: of a training replica.
        transports: those of its routes.
        is_waking: whether engines load the weights in this phase.
    """
    on_device = "collective" in transports or ("ipc" in transports and is_waking)
    if not on_device and not ("shared" in transports and rank.on_cpu):
        return Items()
    share = num_parameters(rank.shape) // rank.replica.layout.world
    return item(MemoryCategory.BUFFERS, rank.width * share, "published weights")


def receive_weights(rank: Rank, how: Literal["shared", "gather", "pull"]) -> Items:
    """Return what an engine's rank needs while it receives weights: one tensor in host memory.

    Until then, buckets are in Ray's object store, which is host memory that the plan does not count.
    """
    if how != "pull" or not rank.on_cpu:
        return Items()
    return item(MemoryCategory.BUFFERS, rank.width * largest_tensor(rank.shape), "buckets")


def save_checkpoint(rank: Rank) -> Items:
    """Return what a rank needs while its model is saved in fp32. On a CPU, the writer's files count too."""
    bucket = _gather_bucket(rank, FP32_BYTES)
    if not (rank.is_first and rank.on_cpu) or rank.replica.layout.world == 1:
        return bucket
    model_bytes = FP32_BYTES * num_parameters(rank.shape)
    if not _shards_weights(rank):
        file_bytes = min(model_bytes, max(FILE_BYTES, FP32_BYTES * largest_tensor(rank.shape)))
        return bucket + item(MemoryCategory.WEIGHTS, file_bytes, "whole weights")
    # The peak is at one of the last buckets, with all earlier tensors collected. The copy of gloo is freed
    # before a bucket is split into tensors.
    sizes = _buckets((FP32_BYTES * spec.numel for spec in tensors(rank.shape)), BUCKET_BYTES)
    collected = accumulate(sizes)
    peak = max(sum_ + size + 2 * (size // rank.data) for sum_, size in zip(collected, sizes, strict=True))
    weights = item(MemoryCategory.WEIGHTS, model_bytes, "whole weights")
    return weights + item(MemoryCategory.BUFFERS, peak - model_bytes, "buckets")


def _slice_buckets(rank: Rank) -> Items:
    """Return a bucket of this rank's slices in host memory, with copies where they are not views.

    FSDP casts fp32 shards, and Megatron splits its fused matrices.
    """
    num_parts = rank.data if _shards_weights(rank) else rank.tensor
    sizes = [rank.width * -(-spec.numel // num_parts) for spec in tensors(rank.shape)]
    copies = rank.width < FP32_BYTES or not _shards_weights(rank)
    if rank.on_cpu:
        num_bytes = (2 if copies else 1) * max(_buckets(sizes, BUCKET_BYTES))
    else:
        num_bytes = max(sizes) if copies else 0
    return item(MemoryCategory.BUFFERS, num_bytes, "buckets")


def _gather_bucket(rank: Rank, width: int) -> Items:
    """Return a whole bucket, this rank's part of it twice, and a copy of gloo or the tensor sliced out of it.

    FSDP casts its shards first. A single rank casts one tensor at a time.
    """
    casts = width < FP32_BYTES and _shards_weights(rank)
    if rank.replica.layout.world == 1:
        num_bytes = width * largest_tensor(rank.shape) if casts else 0
    else:
        num_parts = rank.data if _shards_weights(rank) else rank.tensor
        minimum = BUCKET_BYTES * (1 if _shards_weights(rank) else num_parts)
        bucket = largest_bucket(rank.shape, width, minimum)
        copy = bucket if rank.on_cpu else width * largest_tensor(rank.shape)
        num_bytes = bucket + (3 if casts else 2) * (bucket // num_parts) + copy
    return item(MemoryCategory.BUFFERS, num_bytes, "buckets")


def _shards_weights(rank: Rank) -> bool:
    """Return whether the data axis shards the weights."""
    return rank.traits.sharded_over_data == "everything"


@lru_cache
def largest_tensor(shape: ModelShape) -> int:
    """Return the elements of the largest tensor."""
    return max(spec.numel for spec in tensors(shape))


@lru_cache
def largest_bucket(shape: ModelShape, width: int, minimum: int = BUCKET_BYTES) -> int:
    """Return the bytes of the largest bucket of tensors in the checkpoint's order."""
    return max(_buckets((width * spec.numel for spec in tensors(shape)), minimum))


def _buckets(sizes: Iterable[int], minimum: int) -> list[int]:
    """Return the sizes of buckets of neighbouring tensors, each closed when it has the minimum size."""
    sums = [0]
    for size in sizes:
        if sums[-1] >= minimum:
            sums.append(0)
        sums[-1] += size
    return sums
