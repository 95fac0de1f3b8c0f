"""A stage's weights as whole tensors under their HF names, gathered a bucket at a time.

A bucket of parameters is sent from its stage to all stages and then gathered over the tensor ranks, and a
bucket of experts over tensor and expert ranks. Every
receiver assembles the same tensors. No rank holds the whole model: besides its shard, a receiver holds one
bucket, or one tensor if that is larger.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby

import torch
import torch.distributed as dist
from torch import Tensor

from hflow.training.megatron.hf_mapping import MappedParameter
from hflow.training.megatron.model import Stage
from hflow.types.tensor_slices import BUCKET_BYTES, Block, box_slices

Named = tuple[str, Tensor]
ByShard = tuple[MappedParameter, ...]
"""One parameter as each tensor rank of a stage holds it, or each tensor rank of each expert index."""
Together = tuple[ByShard, ...]
"""Parameters that hold parts of the same HF tensors: one, or those of all experts of a rank."""


def held_blocks(stage: Stage, values: Mapping[str, Tensor] | None = None) -> Iterator[Block]:
    """Yield the blocks of HF tensors in this rank's parameters, as views of them.

    `values`, parameter name -> tensor of its shape, are used in place of the parameters.
    """
    values = dict(stage.module.named_parameters()) if values is None else values
    for parameter in stage.parameters:
        tensor = values[parameter.name].detach().view(parameter.shape)
        for part in parameter.parts:
            if part.length:
                block = tensor.narrow(part.axis, part.offset, part.length)
                yield Block(part.tensor, part.shape, part.box, block)


def named_weights(
    stage: Stage,
    dtype: torch.dtype | None = None,
    values: Mapping[str, Tensor] | None = None,
    receiver_of: Callable[[str], int] | None = None,
) -> Iterator[Named]:
    """Yield tensors of the model, whole; a collective over the ranks of a data index, or of expert ranks.

    Tied weights have their first name, a scalar head's weights `value_head.*` or `score.weight`. A tensor may
    share storage with the model, so copy what is to be kept.

    Args:
        dtype: the dtype of the tensors but biases of routers, which are fp32; the stage's by default. Weights
            are cast before they are sent.
        values: parameter name -> tensor of its shape, to use in place of the parameters.
        receiver_of: HF name -> the rank of the replica that needs the tensor, to which alone it is yielded;
            None: every rank needs all.
    """
    dtype = stage.dtype if dtype is None else dtype
    values = dict(stage.module.named_parameters()) if values is None else values
    for p in range(stage.parallel.pipe):
        for bucket in _buckets(stage, p, dtype):
            receivers = _receivers(stage, bucket, receiver_of)
            if not receivers:
                continue
            is_receiver = stage.parallel.rank in receivers
            parameters = [versions for together in bucket for versions in together]
            sent = torch.float32 if bucket[0][0][0].is_score_bias else dtype
            gathered = iter(_gather_bucket(stage, p, parameters, values, sent, is_receiver))
            for together in bucket if is_receiver else ():
                for name, tensor in _assemble([(versions, next(gathered)) for versions in together]):
                    if receiver_of is None or receiver_of(name) == stage.parallel.rank:
                        yield name, tensor


def _receivers(
    stage: Stage, bucket: Sequence[Together], receiver_of: Callable[[str], int] | None
) -> set[int]:
    """Return the ranks of this rank's copy of the model that need a tensor of a bucket."""
    copy = set(stage.parallel.ranks_of_copy(of_experts=bucket[0][0][0].is_expert))
    if receiver_of is None:
        return copy
    names = {name for together in bucket for versions in together for name in _tensors(versions)}
    return copy & {receiver_of(name) for name in names}


def _tensors(versions: ByShard) -> frozenset[str]:
    """Return the HF tensors that a parameter has parts of."""
    return frozenset(part.tensor for parameter in versions for part in parameter.parts)


def _buckets(stage: Stage, p: int, dtype: torch.dtype) -> Iterator[list[Together]]:
    """Yield the parameters of a pipeline stage in buckets, without copies of another stage's parameters.

    Experts have buckets of their own, and so have biases of routers.
    """
    parallel = stage.parallel
    by_rank = [
        stage.parameters_at(parallel.shard_position_of(p, e, t))
        for e in range(parallel.expert)
        for t in range(parallel.tensor)
    ]
    by_shard = (
        of_all if of_all[0].is_expert else of_all[: parallel.tensor] for of_all in zip(*by_rank, strict=True)
    )
    originals = (versions for versions in by_shard if not all(row.is_copy for row in versions))
    bucket: list[Together] = []
    num_bytes = 0
    for _, rows in groupby(originals, _tensors):
        together = tuple(rows)
        size = sum(math.prod(versions[0].shape) for versions in together) * dtype.itemsize
        is_other_kind = bucket and _kind(bucket[0]) != _kind(together)
        if bucket and (is_other_kind or num_bytes + size > BUCKET_BYTES):
            yield bucket
            bucket, num_bytes = [], 0
        bucket.append(together)
        num_bytes += size
    if bucket:
        yield bucket


def _kind(together: Together) -> tuple[bool, bool]:
    row = together[0][0]
    return row.is_expert, row.is_score_bias


def _gather_bucket(
    stage: Stage,
    p: int,
    bucket: Sequence[ByShard],
    values: Mapping[str, Tensor],
    dtype: torch.dtype,
    is_receiver: bool,
) -> list[Tensor]:
    """Return for each parameter of stage `p` in the bucket its shards, `[shards, *shape]`.

    The bucket is sent in pieces, so that only receivers hold more than a piece. Empty on other ranks.
    """
    parallel, shapes = stage.parallel, [versions[0].shape for versions in bucket]
    lengths = [math.prod(shape) for shape in shapes]
    total, piece_size = sum(lengths), BUCKET_BYTES // dtype.itemsize
    local_tensors = (
        [values[versions[0].name].detach().reshape(-1) for versions in bucket] if parallel.p == p else []
    )
    group = parallel.groups.tp_ep if bucket[0][0].is_expert else parallel.groups.tp
    num_shards = group.size()
    if num_shards * parallel.pipe == 1:
        return [flat.to(dtype).view(1, *shape) for flat, shape in zip(local_tensors, shapes, strict=True)]
    flat = (
        local_tensors[0] if len(local_tensors) == 1 else torch.cat(local_tensors) if local_tensors else None
    )
    received = torch.empty(num_shards, total if is_receiver else 0, dtype=dtype, device=stage.device)
    for start in range(0, total, piece_size):
        stop = min(start + piece_size, total)
        pieces = received[:, start:stop] if is_receiver else received.new_empty(num_shards, stop - start)
        my_piece = pieces[group.rank()]
        if flat is not None:
            my_piece.copy_(flat[start:stop])
        if parallel.pipe > 1:
            dist.broadcast(my_piece, group=parallel.groups.pp, group_src=p)
        if num_shards > 1:
            dist.all_gather(list(pieces), my_piece, group=group)
    if not is_receiver:
        return []
    shards = received.split(lengths, dim=1)
    return [x.unflatten(1, shape) for x, shape in zip(shards, shapes, strict=True)]


def _assemble(together: Sequence[tuple[ByShard, Tensor]]) -> Iterator[Named]:
    """Yield the HF tensors that parameters consist of, each given with its shards `[shards, *shape]`."""
    if len(together) == 1:
        ((versions, shards),) = together
        (first, *others) = versions[0].parts
        if not others and first.shape == versions[0].shape:
            yield first.tensor, shards[0]
            return
        if _are_consecutive_rows(versions):
            yield first.tensor, shards.flatten(0, 1)[: first.shape[0]]
            return
    whole: dict[str, Tensor] = {}
    for versions, shards in together:
        for parameter, shard in zip(versions, shards, strict=True):
            for part in parameter.parts:
                if part.tensor not in whole:
                    whole[part.tensor] = shard.new_empty(part.shape)
                block = shard.narrow(part.axis, part.offset, part.length)
                whole[part.tensor][box_slices(part.box)] = block
    yield from whole.items()


def _are_consecutive_rows(versions: ByShard) -> bool:
    """Return whether the ranks' rows, concatenated, are the HF tensor, with any padding at the end."""
    size = versions[0].shape[0]
    return all(
        len(parameter.parts) == 1
        and (part := parameter.parts[0]).axis == 0
        and part.experts is None
        and part.span[0] == min(t * size, part.shape[0])
        for t, parameter in enumerate(versions)
    )
