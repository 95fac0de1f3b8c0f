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

from hflow.backends.common.adapter import adapter_weights, base_name, save_adapter
from hflow.backends.common.host_copy import host_copy
from hflow.backends.interface import MERGED, ModelSettings
from hflow.backends.torch_model.heads import head_prefix, save_head, saved_config
from hflow.backends.torch_model.optimizer import local_shard
from hflow.durable_files import WriteFiles
from hflow.types.tensor_slices import Block, Box, numel, whole_box
from hflow.weights.adapters import A, B, merge

BUCKET_BYTES = 64 << 20
"""A bucket is gathered once its whole tensors reach this size, which bounds the extra memory."""

Named = tuple[str, Tensor]


def named_weights(model: PreTrainedModel, head: nn.Module, kind: str, dtype: torch.dtype) -> Iterator[Named]:
    """Yield every weight that training changes once, whole and in `dtype`; a collective.

    Without adapters these are all, and persistent buffers come with them.

    Tied weights have their first name, and a scalar head's weights `value_head.*` or `score.weight`. A tensor
    may share storage with the model, so copy what is to be kept.
    """
    known = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    buffers = [(name, x) for name, x in model.state_dict().items() if name not in known]
    trained = named_parameters(model, head, kind)
    named = trained if adapter_weights(model) else (*trained, *buffers)
    yield from gather_tensors(((name, tensor.detach()) for name, tensor in named), dtype)


def held_blocks(
    model: PreTrainedModel, root: nn.Module, head: nn.Module, kind: str
) -> Iterator[tuple[nn.Parameter, Block]]:
    """Yield every trained weight of which this rank has rows, and those rows as a view of the storage.

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
    """Return every weight that training changes once, with its HF name: adapters, if there are any."""
    named = list(adapter_weights(model).items()) or list(model.named_parameters())
    return [*named, *_scalar_weights(head, kind)]


def merged_weights(
    model: PreTrainedModel, head: nn.Module, kind: str, dtype: torch.dtype, scale: float
) -> Iterator[Named]:
    """Yield every weight once, whole and in `dtype`, with its adapter added; a collective."""
    adapters = dict(gather_tensors(_detached(adapter_weights(model).items()), torch.float32))
    base = ((base_name(name), x) for name, x in model.named_parameters() if ".lora_" not in name)
    for name, tensor in gather_tensors(_detached((*base, *_scalar_weights(head, kind))), dtype):
        path = name.removesuffix("weight")
        if path + A in adapters:
            tensor = merge(tensor, adapters[path + A], adapters[path + B], scale)
        yield name, tensor


def _detached(named: Iterable[Named]) -> Iterator[Named]:
    return ((name, tensor.detach()) for name, tensor in named)


def copy_model(
    model: PreTrainedModel,
    head: nn.Module,
    settings: ModelSettings,
    directory: Path,
    dtype: torch.dtype,
    is_writer: bool,
) -> WriteFiles:
    """Copy the weights in `dtype`, and return the function that writes them; a collective.

    One rank copies and writes. Of a model with adapters these are written, in peft's layout, and if the
    settings say so, the merged model in a directory beside them.
    """

    def copies(named: Iterable[Named]) -> dict[str, Tensor]:
        return {name: host_copy(tensor) for name, tensor in named if is_writer}

    kind, lora = settings.head, settings.lora
    trained, merged = copies(named_weights(model, head, kind, dtype)), None
    if lora is not None and lora.save_merged:
        merged = copies(merged_weights(model, head, kind, dtype, lora.scale))

    def write() -> list[Path]:
        if not is_writer:
            return []
        if lora is None:
            return _write_model(directory, model, kind, trained, dtype)
        directory.mkdir(parents=True, exist_ok=True)
        if kind == "value":
            save_head(directory, _pop_prefixed(trained, head_prefix(kind)))
        save_adapter(directory, model, settings, trained)
        paths = [path for path in directory.iterdir() if path.is_file()]
        if merged is not None:
            paths += _write_model(directory / MERGED, model, kind, merged, dtype)
        return paths

    return write


def _write_model(
    directory: Path, model: PreTrainedModel, kind: str, tensors: dict[str, Tensor], dtype: torch.dtype
) -> list[Path]:
    """Write a model in HF layout, and return the paths.

    A causal language model loads with `AutoModelForCausalLM.from_pretrained`, a score model with
    `AutoModelForSequenceClassification.from_pretrained`. A value model is saved as its backbone in the layout
    of the former, with its head in a separate file.
    """
    directory.mkdir(parents=True, exist_ok=True)
    if kind == "value":
        save_head(directory, _pop_prefixed(tensors, head_prefix(kind)))
    # transformers writes only on rank 0 of the world, which may belong to another model.
    setattr(model, "should_save_on_this_rank", lambda is_main_process: is_main_process)  # noqa: B010
    model.save_pretrained(directory, state_dict=tensors)
    saved_config(model.config, kind, dtype).save_pretrained(directory)
    return [path for path in directory.iterdir() if path.is_file()]


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
