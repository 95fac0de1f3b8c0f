"""A model's weights under their HF names: whole ones for engines and checkpoints, and this rank's blocks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from hflow.backends.common.host_copy import host_copy
from hflow.backends.torch_model.heads import head_prefix, save_head, saved_config
from hflow.backends.torch_model.optimizer import local_shard
from hflow.durable_files import WriteFiles
from hflow.types.tensor_slices import Block, Box, numel, whole_box

BUCKET_BYTES = 64 << 20
"""A bucket is gathered once its whole tensors reach this size, which bounds the extra memory."""

Named = tuple[str, Tensor]


def named_weights(model: PreTrainedModel, head: nn.Module, kind: str, dtype: torch.dtype) -> Iterator[Named]:
    """Yield every weight and persistent buffer once, whole and in `dtype`; a collective.

    Tied weights have their first name, and a scalar head's weights `value_head.*` or `score.weight`. A tensor
    may share storage with the model, so copy what is to be kept.
    """
    known = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    buffers = [(name, x) for name, x in model.state_dict().items() if name not in known]
    named = (*model.named_parameters(), *buffers, *_scalar_weights(head, kind))
    yield from gather_tensors(((name, tensor.detach()) for name, tensor in named), dtype)


def held_blocks(
    model: PreTrainedModel, root: nn.Module, head: nn.Module, kind: str
) -> Iterator[tuple[nn.Parameter, Block]]:
    """Yield every weight of which this rank has rows, and those rows as a view of the model's storage.

    After a forward without gradient, FSDP keeps weights whole for the next one. They are resharded first, as
    the whole weights would hide changes of the shards.
    """
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    for name, weight in named_parameters(model, head, kind):
        box = held_box(weight)
        if numel(box):
            yield weight, Block(name, tuple(weight.shape), box, local_shard(weight.detach()))


def named_parameters(model: PreTrainedModel, head: nn.Module, kind: str) -> list[tuple[str, nn.Parameter]]:
    """Return every weight once, with its HF name."""
    return [*model.named_parameters(), *_scalar_weights(head, kind)]


def copy_model(
    model: PreTrainedModel, head: nn.Module, kind: str, directory: Path, is_writer: bool
) -> WriteFiles:
    """Copy the fp32 weights, and return the function that writes them in HF layout; a collective.

    One rank copies and writes. A causal language model loads with `AutoModelForCausalLM.from_pretrained`, a
    score model with `AutoModelForSequenceClassification.from_pretrained`. A value model is saved as its
    backbone in the layout of the former, with its head in a separate file.
    """
    tensors: dict[str, Tensor] = {}
    for name, tensor in named_weights(model, head, kind, torch.float32):
        if is_writer:
            tensors[name] = host_copy(tensor)

    def write() -> list[Path]:
        if not is_writer:
            return []
        directory.mkdir(parents=True, exist_ok=True)
        if kind == "value":
            save_head(directory, _pop_prefixed(tensors, head_prefix(kind)))
        # transformers writes only on rank 0 of the world, which may belong to another model.
        setattr(model, "should_save_on_this_rank", lambda is_main_process: is_main_process)  # noqa: B010
        model.save_pretrained(directory, state_dict=tensors)
        saved_config(model.config, kind).save_pretrained(directory)
        return [path for path in directory.iterdir() if path.is_file()]

    return write


def _scalar_weights(head: nn.Module, kind: str) -> list[tuple[str, nn.Parameter]]:
    return [] if kind == "lm" else [(head_prefix(kind) + name, x) for name, x in head.named_parameters()]


def _pop_prefixed(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Remove the tensors whose names have the prefix; return them without it."""
    names = [name for name in tensors if name.startswith(prefix)]
    return {name.removeprefix(prefix): tensors.pop(name) for name in names}


def gather_tensors(named: Iterable[Named], dtype: torch.dtype) -> Iterator[Named]:
    """Yield every tensor whole, floats in `dtype`; a collective over the ranks that shard them.

    Shards are cast before they are sent, and gathered a bucket at a time. Unsharded tensors are not copied,
    so they may share storage with the model.
    """
    bucket: list[tuple[str, DTensor]] = []
    num_bytes = 0
    for name, tensor in named:
        cast = tensor.to(dtype) if tensor.is_floating_point() else tensor
        if not isinstance(cast, DTensor):
            yield name, cast
            continue
        bucket.append((name, cast))
        num_bytes += cast.numel() * cast.element_size()
        if num_bytes >= BUCKET_BYTES:
            yield from _gather_bucket(bucket)
            bucket, num_bytes = [], 0
    if bucket:
        yield from _gather_bucket(bucket)


def _gather_bucket(bucket: list[tuple[str, DTensor]]) -> Iterator[Named]:
    """All-gather the shards of several tensors at once and yield the whole tensors."""
    group: ProcessGroup = bucket[0][1].device_mesh.get_group()
    num_ranks = group.size()
    sizes = [[_num_held(x, rank, num_ranks) for _, x in bucket] for rank in range(num_ranks)]
    width = max(map(sum, sizes))
    local_entries = torch.cat([x.to_local().reshape(-1) for _, x in bucket])
    padded = local_entries.new_zeros(width)
    padded[: len(local_entries)] = local_entries
    received = padded.new_empty(num_ranks, width)
    dist.all_gather_into_tensor(received.view(-1), padded, group)
    by_rank = [row[: sum(lengths)].split(lengths) for row, lengths in zip(received, sizes, strict=True)]
    for (name, x), pieces in zip(bucket, zip(*by_rank, strict=True), strict=True):
        yield name, torch.cat(pieces).view(x.shape)


def held_box(tensor: Tensor) -> Box:
    """Return the part of a tensor that this rank holds; all of an unsharded tensor."""
    if not isinstance(tensor, DTensor):
        return whole_box(tuple(tensor.shape))
    group: ProcessGroup = tensor.device_mesh.get_group()
    return _rows_of_rank(tensor, group.rank(), group.size())


def _num_held(x: DTensor, rank: int, num_ranks: int) -> int:
    """Return the number of entries of a tensor that a rank holds."""
    return numel(_rows_of_rank(x, rank, num_ranks))


def _rows_of_rank(x: DTensor, rank: int, num_ranks: int) -> Box:
    """Return the part of a tensor that a rank holds: FSDP2 splits the rows into equal blocks."""
    num_rows, *others = x.shape
    block = -(-num_rows // num_ranks)
    span = min(num_rows, rank * block), min(num_rows, (rank + 1) * block)
    return (span, *whole_box(tuple(others)))
