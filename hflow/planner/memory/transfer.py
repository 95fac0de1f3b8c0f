"""Bytes of weights on their way: to an engine that wakes, and into a checkpoint.

Weights that are pulled are cut out of what each rank holds, others are gathered a bucket at a time. No rank
but the one that writes a checkpoint, where it has no other memory than the host's, holds a whole model.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from itertools import accumulate
from typing import Literal

from hflow.planner.memory.byte_counts import Items
from hflow.planner.memory.rank import Rank
from hflow.planner.model_shape import ModelShape, num_parameters, tensors

BUCKET_BYTES = 64 << 20
"""A bucket is closed when it is at least this large (`torch_model/weight_export.py`,
`workers/weights/buckets.py`); with megatron, when a tensor rank's part of it is."""
FILE_BYTES = 2 << 30
"""What megatron's writer collects at most, unless a tensor is larger (`megatron/save.py`)."""
FP32 = 4


def giving(rank: Rank, how: Literal["shared", "gather", "pull"]) -> Items:
    """What a training rank needs while engines are given its weights."""
    if how == "shared" and rank.width == FP32:
        return Items()
    return _cutting(rank) if how == "pull" else _gathering(rank, rank.width)


def taking(rank: Rank, how: Literal["shared", "gather", "pull"]) -> Items:
    """What an engine's rank needs while it takes weights from other workers: a tensor in host memory.

    Buckets lie in the object store until they are put together: host memory that the plan does not count.
    """
    if how != "pull" or not rank.on_cpu:
        return Items()
    return Items(buckets=rank.width * largest_tensor(rank.shape))


def saving(rank: Rank) -> Items:
    """What a rank needs while its model is saved in fp32; on the host the writer collects it."""
    needed = _gathering(rank, FP32)
    if not (rank.is_first and rank.on_cpu) or rank.replica.layout.world == 1:
        return needed
    whole = FP32 * num_parameters(rank.shape)
    if not _shards_all(rank):
        return needed + Items(
            {"whole weights": min(whole, max(FILE_BYTES, FP32 * largest_tensor(rank.shape)))}
        )
    # The last buckets are gathered when most is collected; gloo's copy is gone when a bucket is cut up.
    sizes = _buckets((FP32 * spec.numel for spec in tensors(rank.shape)), BUCKET_BYTES)
    collected = accumulate(sizes)
    peak = max(sum_ + size + 2 * (size // rank.data) for sum_, size in zip(collected, sizes, strict=True))
    return Items({"whole weights": whole, "buckets": peak - whole})


def _cutting(rank: Rank) -> Items:
    """A bucket of this rank's slices in host memory, beside copies where they are not views of its weights.

    torch casts fp32 shards; megatron's fused matrices are taken apart.
    """
    num_parts = rank.data if _shards_all(rank) else rank.tensor
    sizes = [rank.width * -(-spec.numel // num_parts) for spec in tensors(rank.shape)]
    copies = rank.width < FP32 or not _shards_all(rank)
    if rank.on_cpu:
        return Items(buckets=(2 if copies else 1) * max(_buckets(sizes, BUCKET_BYTES)))
    return Items(buckets=max(sizes)) if copies else Items()


def _gathering(rank: Rank, width: int) -> Items:
    """One bucket whole, this rank's part of it twice, gloo's copy or the tensor that is cut out of it.

    torch casts its shards first; alone, it casts tensor by tensor.
    """
    casts = width < FP32 and _shards_all(rank)
    if rank.replica.layout.world == 1:
        return Items(buckets=width * largest_tensor(rank.shape)) if casts else Items()
    num_parts = rank.data if _shards_all(rank) else rank.tensor
    bucket = largest_bucket(rank.shape, width, BUCKET_BYTES * (1 if _shards_all(rank) else num_parts))
    cut = bucket if rank.on_cpu else width * largest_tensor(rank.shape)
    return Items(buckets=bucket + (3 if casts else 2) * (bucket // num_parts) + cut)


def _shards_all(rank: Rank) -> bool:
    return rank.traits.sharded_over_data == "everything"


@lru_cache
def largest_tensor(shape: ModelShape) -> int:
    """Entries of the largest tensor."""
    return max(spec.numel for spec in tensors(shape))


@lru_cache
def largest_bucket(shape: ModelShape, width: int, least: int = BUCKET_BYTES) -> int:
    """Bytes of the largest bucket, tensors taken in the checkpoint's order."""
    return max(_buckets((width * spec.numel for spec in tensors(shape)), least))


def _buckets(sizes: Iterable[int], least: int) -> list[int]:
    """Sums of neighbours, each closed as soon as it is `least`."""
    sums = [0]
    for size in sizes:
        if sums[-1] >= least:
            sums.append(0)
        sums[-1] += size
    return sums
