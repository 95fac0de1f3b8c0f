"""A model's weights under their HF names, whole, one after the other; and its checkpoint."""

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

from hflow.backends.torch_model.heads import save_head
from hflow.backends.torch_model.optimizer import local
from hflow.types.tensor_slices import Block, Box, numel, whole

# -------------------- Gathers sharded weights a bucket at a time: one collective for many tensors.


BUCKET_BYTES = 64 << 20
"""A bucket is gathered when its whole tensors are at least this large; this bounds the extra memory."""

Named = tuple[str, Tensor]


def whole_tensors(named: Iterable[Named], dtype: torch.dtype) -> Iterator[Named]:
    """Yield every tensor whole, floats in `dtype`; a collective over the ranks that shard them.

    Floats are cast before they travel. Tensors that are not sharded pass through, and may share
    storage with the model.
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
            yield from _gather(bucket)
            bucket, num_bytes = [], 0
    if bucket:
        yield from _gather(bucket)


def _gather(bucket: list[tuple[str, DTensor]]) -> Iterator[Named]:
    """One all-gather of what every rank holds of these tensors, and the whole tensors cut out of it."""
    group: ProcessGroup = bucket[0][1].device_mesh.get_group()
    num_ranks = group.size()
    held = [[_num_held(x, rank, num_ranks) for _, x in bucket] for rank in range(num_ranks)]
    width = max(map(sum, held))
    mine = torch.cat([x.to_local().reshape(-1) for _, x in bucket])
    sent = mine.new_zeros(width)
    sent[: len(mine)] = mine
    received = sent.new_empty(num_ranks, width)
    dist.all_gather_into_tensor(received.view(-1), sent, group)
    parts = [row[: sum(sizes)].split(sizes) for row, sizes in zip(received, held, strict=True)]
    for (name, x), pieces in zip(bucket, zip(*parts, strict=True), strict=True):
        yield name, torch.cat(pieces).view(x.shape)


def held_box(tensor: Tensor) -> Box:
    """The part of a tensor that this rank holds: all of one that is not sharded."""
    if not isinstance(tensor, DTensor):
        return whole(tuple(tensor.shape))
    group: ProcessGroup = tensor.device_mesh.get_group()
    return _rows(tensor, group.rank(), group.size())


def _num_held(x: DTensor, rank: int, num_ranks: int) -> int:
    """Entries of a tensor that a rank holds."""
    return numel(_rows(x, rank, num_ranks))


def _rows(x: DTensor, rank: int, num_ranks: int) -> Box:
    """What a rank holds of a tensor: FSDP2 cuts the first axis into equal blocks of rows."""
    num_rows, *others = x.shape
    block = -(-num_rows // num_ranks)
    edges = min(num_rows, rank * block), min(num_rows, (rank + 1) * block)
    return (edges, *whole(tuple(others)))


def named_weights(
    model: PreTrainedModel, head: nn.Module, kind: str, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """Yield every weight and persistent buffer once, gathered (a collective), in `dtype`.

    Tied weights come under their first name; a scalar head's as `value_head.*` or `score_head.*`.
    What is yielded may share storage with the model: copy what is to be kept.
    """
    known = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    buffers = [(name, x) for name, x in model.state_dict().items() if name not in known]
    named = (*model.named_parameters(), *buffers, *_scalar_weights(head, kind))
    yield from whole_tensors(((name, tensor.detach()) for name, tensor in named), dtype)


def held_blocks(
    model: PreTrainedModel, root: nn.Module, head: nn.Module, kind: str
) -> Iterator[tuple[nn.Parameter, Block]]:
    """Yield every weight of which this rank holds something, and that; the storage is the model's.

    FSDP leaves weights whole after a forward without gradient, for the next one. They are given up
    first, as they would outlive a change of the shards.
    """
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    for name, weight in named_parameters(model, head, kind):
        box = held_box(weight)
        if numel(box):
            yield weight, Block(name, tuple(weight.shape), box, local(weight.detach()))


def named_parameters(model: PreTrainedModel, head: nn.Module, kind: str) -> list[tuple[str, nn.Parameter]]:
    """Every weight once, by its HF name."""
    return [*model.named_parameters(), *_scalar_weights(head, kind)]


def _scalar_weights(head: nn.Module, kind: str) -> list[tuple[str, nn.Parameter]]:
    return [] if kind == "lm" else [(scalar_prefix(kind) + name, x) for name, x in head.named_parameters()]


def save(model: PreTrainedModel, head: nn.Module, kind: str, directory: Path, is_writer: bool) -> None:
    """Write the fp32 weights in HF layout; a collective, of which one rank writes.

    A causal language model loads with `AutoModelForCausalLM.from_pretrained`; a value or score
    model is its backbone in the same layout, with its head in a file of its own.
    """
    tensors: dict[str, Tensor] = {}
    for name, tensor in named_weights(model, head, kind, torch.float32):
        if is_writer:
            tensors[name] = tensor.cpu()
    if not is_writer:
        return
    directory.mkdir(parents=True, exist_ok=True)
    if kind != "lm":
        save_head(directory, kind, _take_prefixed(tensors, scalar_prefix(kind)))
    # transformers would write on rank 0 of the world only, which another model may have.
    setattr(model, "should_save_on_this_rank", lambda is_main_process: is_main_process)  # noqa: B010
    model.save_pretrained(directory, state_dict=tensors)


def scalar_prefix(kind: str) -> str:
    """What the names of a scalar head's weights begin with."""
    return f"{kind}_head."


def _take_prefixed(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Remove the tensors whose names begin with `prefix`, and return them without it."""
    names = [name for name in tensors if name.startswith(prefix)]
    return {name.removeprefix(prefix): tensors.pop(name) for name in names}
