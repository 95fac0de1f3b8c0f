"""A model's weights under their HF names: whole ones for engines and checkpoints, and this rank's blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from hflow.base.durable_files import WriteFiles
from hflow.models.adapter import adapter_weights, base_tensors, rounding_of, saved_peft_config, write_adapter
from hflow.models.expert_tensors import stacked_views
from hflow.models.heads import head_prefix, saved_config
from hflow.models.host_copy import HostCopies
from hflow.models.settings import MERGED, ModelSettings
from hflow.shapes.model_shape import is_in_fp32
from hflow.training.fsdp.optimizer import local_shard
from hflow.training.fsdp.shard_collectives import gather_in_place, replicate_index, shard_group
from hflow.training.hf_files import Copies, FileDivision, check_is_shared
from hflow.types.tensor_slices import BUCKET_BYTES, Block, Box, numel, whole_box
from hflow.weights.adapters import with_adapter

Named = tuple[str, Tensor]
ReceiverOf = Callable[[str], int]
"""Returns the rank that receives a tensor."""


def named_weights(model: PreTrainedModel, head: nn.Module, kind: str, dtype: torch.dtype) -> Iterator[Named]:
    """Yield every weight that training changes once, whole and in `dtype`; a collective.

    Without adapters these are all, and persistent buffers come with them.

    Tied weights have their first name, and a scalar head's weights `value_head.*` or `score.weight`. Those of
    experts have hflow's names (`models.expert_tensors`). A tensor may share storage with the model, so copy
    what is to be kept.
    """
    whole = gather_tensors(_changing_tensors(model, head, kind), dtype)
    yield from stacked_views(model.config.model_type, whole)


def _changing_tensors(model: PreTrainedModel, head: nn.Module, kind: str) -> list[Named]:
    """Return the tensors of `named_weights`, as this rank stores them."""
    buffers = _changing_buffers(model)  # first, as weights that were gathered are freed by it
    return [*((name, weight.detach()) for name, weight in named_parameters(model, head, kind)), *buffers]


def _changing_buffers(model: PreTrainedModel) -> list[Named]:
    """Return the persistent buffers of a model without adapters, which every rank holds whole."""
    return [] if adapter_weights(model) else _saved_buffers(model)


def _saved_buffers(model: PreTrainedModel) -> list[Named]:
    """Return the buffers that checkpoints of a model have. Weights that FSDP has gathered are resharded."""
    known = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return [(name, x) for name, x in model.state_dict().items() if name not in known]


def buffer_blocks(model: PreTrainedModel) -> Iterator[Block]:
    """Yield the persistent buffers that weight updates change: biases of routers."""
    for name, x in _changing_buffers(model):
        if is_in_fp32(name):
            yield Block(name, tuple(x.shape), whole_box(tuple(x.shape)), x)


def held_blocks(
    model: PreTrainedModel, root: nn.Module, head: nn.Module, kind: str
) -> Iterator[tuple[nn.Parameter, list[Block]]]:
    """Yield every trained weight of which this rank has rows, and those rows as views of the storage.

    After a forward without gradient, FSDP keeps weights whole for the next one. They are resharded first, as
    the whole weights would hide changes of the shards.
    """
    reshard(root)
    for name, weight in named_parameters(model, head, kind):
        if numel(held_box(weight)):
            yield weight, blocks_of(model, name, weight, local_shard(weight.detach()))


def blocks_of(model: PreTrainedModel, name: str, weight: Tensor, values: Tensor) -> list[Block]:
    """Return the blocks of tensors, by hflow's names, in `values`, this rank's rows of a weight."""
    rows, *_ = held_box(weight)
    return [
        Block(tensor, (weight.shape[0], *part.shape[1:]), (rows, *whole_box(tuple(part.shape[1:]))), part)
        for tensor, part in stacked_views(model.config.model_type, [(name, values)])
    ]


def tensor_names(model: PreTrainedModel, name: str, weight: Tensor) -> list[str]:
    """Return hflow's names of the tensors that one weight of a module consists of."""
    whole = torch.empty(weight.shape, device="meta")
    return [tensor for tensor, _ in stacked_views(model.config.model_type, [(name, whole)])]


def reshard(root: nn.Module) -> None:
    """Free weights that FSDP has gathered."""
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def named_parameters(model: PreTrainedModel, head: nn.Module, kind: str) -> list[tuple[str, nn.Parameter]]:
    """Return every weight that training changes once, with its HF name: adapters, if there are any."""
    named = list(adapter_weights(model).items()) or list(model.named_parameters())
    return [*named, *_scalar_weights(head, kind)]


def merged_weights(
    model: PreTrainedModel, head: nn.Module, kind: str, dtype: torch.dtype, scale: float
) -> Iterator[Named]:
    """Yield every weight once, whole and in `dtype`, with its adapter added; a collective."""
    adapters = dict(
        gather_tensors(((n, x.detach()) for n, x in adapter_weights(model).items()), torch.float32)
    )
    for name, tensor in gather_tensors(_all_tensors(model, head, kind), dtype):
        yield name, with_adapter(adapters, scale, name, tensor)


def _all_tensors(model: PreTrainedModel, head: nn.Module, kind: str) -> Iterator[Named]:
    """Yield every weight and buffer but adapters, as this rank stores it."""
    buffers = _saved_buffers(model)
    yield from base_tensors(model)
    yield from buffers
    for name, weight in _scalar_weights(head, kind):
        yield name, weight.detach()


def copy_model(
    model: PreTrainedModel,
    head: nn.Module,
    settings: ModelSettings,
    directory: Path,
    dtype: torch.dtype,
    group: ProcessGroup | None,
    host: HostCopies,
) -> WriteFiles:
    """Copy the weights in `dtype`, and return the function that writes them; a collective.

    Of a model with adapters the first rank writes these, in peft's layout. If the settings say so, the merged
    model is written in a directory beside them.

    Args:
        head: the model's output matrix, or its scalar head.
        directory: made if necessary, in a directory that all ranks share.

    Raises:
        BackendError: if this rank does not see the directory in which it will be.
    """
    kind, lora, rank = settings.head, settings.lora, 0 if group is None else group.rank()
    if group is not None:
        check_is_shared(directory.parent, rank)
    stored = _changing_tensors(model, head, kind)
    if lora is None:
        collect = partial(collect_tensors, stored, dtype, rank, host)
        return _copy_files(model, kind, directory, stored, collect, dtype, group)
    adapters = dict(collect_tensors(stored, dtype, rank, host, lambda name: 0))
    write_merged: WriteFiles = list
    if lora.save_merged:
        base, scale = [(n, x.to("meta")) for n, x in _all_tensors(model, head, kind)], lora.scale

        def merged(receiver_of: ReceiverOf) -> Iterator[Named]:
            for name, tensor in merged_weights(model, head, kind, dtype, scale):
                if receiver_of(name) == rank:
                    yield name, host.copy(tensor)

        write_merged = _copy_files(model, kind, directory / MERGED, base, merged, dtype, group)

    config, rounding = saved_peft_config(model, settings), rounding_of(settings)

    def write() -> list[Path]:
        paths = write_adapter(directory, config, kind, adapters, rounding) if rank == 0 else []
        return [*paths, *write_merged()]

    return write


def _copy_files(
    model: PreTrainedModel,
    kind: str,
    directory: Path,
    stored: Sequence[Named],
    collect: Callable[[ReceiverOf], Iterable[Named]],
    dtype: torch.dtype,
    group: ProcessGroup | None,
) -> WriteFiles:
    """Copy some files of a model in HF layout, and return the function that writes them; a collective.

    A causal language model loads with `AutoModelForCausalLM.from_pretrained`, a score model with
    `AutoModelForSequenceClassification.from_pretrained`. A value model is saved as its backbone in the layout
    of the former, with its head in a separate file.

    `stored` are all tensors, which give names and shapes. `collect` yields those that this rank writes,
    whole, in `dtype` and in host memory.
    """
    rank, num_ranks = (0, 1) if group is None else (group.rank(), group.size())
    prefix = head_prefix(kind) if kind == "value" else None
    whole = _whole_tensors(model, kind, stored, dtype)
    files, saved_in = _divide_into_files(model, whole, num_ranks)
    copies: Copies = {}
    head: dict[str, Tensor] = {}
    for name, tensor in collect(files.writer):
        if name in whole:
            copies.setdefault(files.file_of[name], {})[name] = tensor
        elif prefix is not None and name.startswith(prefix):
            head[name.removeprefix(prefix)] = tensor

    def write() -> list[Path]:
        for file, tensors in copies.items():
            converted = revert_weight_conversion(model, tensors)
            copies[file] = {name: x.contiguous() for name, x in converted.items()}
        config = saved_config(model.config, kind, dtype) if rank == 0 else None
        return files.write(directory, copies, head, config, saved_in)

    return write


def copied_sizes(
    model: PreTrainedModel,
    head: nn.Module,
    settings: ModelSettings,
    dtype: torch.dtype,
    group: ProcessGroup | None,
) -> list[int]:
    """Return the bytes of each tensor that `copy_model` copies on this rank, but for a merged model."""
    rank, num_ranks = (0, 1) if group is None else (group.rank(), group.size())
    stored = _changing_tensors(model, head, settings.head)
    if settings.lora is not None:
        return [dtype.itemsize * x.numel() for _, x in stored] if rank == 0 else []
    whole = _whole_tensors(model, settings.head, stored, dtype)
    files, _ = _divide_into_files(model, whole, num_ranks)
    return [x.nbytes for name, x in whole.items() if files.writer(name) == rank]


def _whole_tensors(
    model: PreTrainedModel, kind: str, stored: Sequence[Named], dtype: torch.dtype
) -> dict[str, Tensor]:
    """Return the tensors of a model's files but a value head's, whole and on the meta device."""
    prefix = head_prefix(kind) if kind == "value" else None
    ignored = set(model._keys_to_ignore_on_save or ())
    return {
        name: torch.empty(x.shape, dtype=_dtype_of(name, x, dtype), device="meta")
        for name, x in stored
        if name not in ignored and (prefix is None or not name.startswith(prefix))
    }


def _divide_into_files(
    model: PreTrainedModel, whole: Mapping[str, Tensor], num_ranks: int
) -> tuple[FileDivision, dict[str, str]]:
    """Return the files of a model's tensors, and the file of each tensor by the name that it is saved with.

    transformers renames, divides and merges tensors of some families. If it merges tensors of different
    files, there is one file, which the first rank writes. The tensors of `whole` are on the meta device.
    """
    num_bytes = {name: x.nbytes for name, x in whole.items()}
    files = FileDivision.over_ranks(num_bytes, num_ranks)
    saved_in, shapes = {}, {}
    for file in files.writer_of:
        tensors = {name: x for name, x in whole.items() if files.file_of[name] == file}
        for name, x in revert_weight_conversion(model, tensors).items():
            saved_in[name], shapes[name] = file, x.shape
    if shapes != {name: x.shape for name, x in revert_weight_conversion(model, dict(whole)).items()}:
        files = FileDivision.over_ranks(num_bytes, 1, sum(num_bytes.values()))
        saved_in = {}
    return files, saved_in


def _scalar_weights(head: nn.Module, kind: str) -> list[tuple[str, nn.Parameter]]:
    return [] if kind == "lm" else [(head_prefix(kind) + name, x) for name, x in head.named_parameters()]


def gather_tensors(named: Iterable[Named], dtype: torch.dtype) -> Iterator[Named]:
    """Yield every tensor whole, floats in `dtype`; a collective over the ranks that shard them.

    Shards are cast before they are sent, and gathered a bucket at a time. Unsharded tensors are not copied,
    so they may share storage with the model.
    """
    bucket: list[tuple[str, DTensor]] = []
    num_bytes = 0
    for name, tensor in named:
        cast = tensor.to(_dtype_of(name, tensor, dtype))
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


def _dtype_of(name: str, tensor: Tensor, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which a tensor is sent and saved: `dtype`, but for integers and biases of scores.

    transformers keeps these in fp32 in models of any dtype, as their steps are small.
    """
    return dtype if tensor.is_floating_point() and not is_in_fp32(name) else tensor.dtype


def collect_tensors(
    named: Iterable[Named], dtype: torch.dtype, rank: int, host: HostCopies, receiver_of: ReceiverOf
) -> Iterator[Named]:
    """Yield tensors whole, in host memory and floats in `dtype`, each on one rank; a collective.

    A tensor is gathered in pieces, so that a rank holds no more than `BUCKET_BYTES` beside the whole.

    Args:
        receiver_of: returns the rank to which alone a tensor is yielded.
    """
    for name, tensor in named:
        wanted = _dtype_of(name, tensor, dtype)
        if isinstance(tensor, DTensor):
            whole = _gather_pieces(tensor, wanted, receiver_of(name), host)
            if whole is not None:
                yield name, whole
        elif receiver_of(name) == rank:
            yield name, host.copy(tensor, wanted)


def _gather_pieces(x: DTensor, dtype: torch.dtype, receiver: int, host: HostCopies) -> Tensor | None:
    """Return a whole tensor in host memory on one rank, and None on the others.

    With a replicate axis, only the ranks that shard the tensor together with the receiver send.
    """
    group, (index, _) = shard_group(x), replicate_index(x)
    num_ranks, rank = group.size(), group.rank()
    holder, receiver = divmod(receiver, num_ranks)
    if holder != index:
        return None
    is_receiver = rank == receiver
    sizes = [_num_held(x, rank, num_ranks) for rank in range(num_ranks)]
    starts = [sum(sizes[:rank]) for rank in range(num_ranks)]
    width = max(1, BUCKET_BYTES // dtype.itemsize // num_ranks)
    local = x.to_local().reshape(-1)
    whole = host.empty(x.shape, dtype, local.device) if is_receiver else None
    for first in range(0, max(sizes), width):
        length = min(width, max(sizes) - first)
        pieces = local.new_zeros(num_ranks, length, dtype=dtype)
        held = local[first : first + length]
        pieces[group.rank(), : len(held)] = held
        # On all ranks: for a gather on one of them NCCL would connect every pair of ranks.
        gather_in_place(pieces.view(-1), group)
        if whole is None:
            continue
        entries = whole.view(-1)
        for start, size, part in zip(starts, sizes, pieces, strict=True):
            stop = min(first + length, size)
            if stop > first:
                entries[start + first : start + stop].copy_(part[: stop - first], non_blocking=True)
    return whole


def _gather_bucket(bucket: list[tuple[str, DTensor]]) -> Iterator[Named]:
    """All-gather the shards of several tensors at once and yield the whole tensors."""
    group = shard_group(bucket[0][1])
    num_ranks = group.size()
    sizes = [[_num_held(x, rank, num_ranks) for _, x in bucket] for rank in range(num_ranks)]
    received = bucket[0][1].to_local().new_empty(num_ranks, max(map(sum, sizes)))
    rank = group.rank()
    mine = received[rank, : sum(sizes[rank])].split(sizes[rank])
    torch._foreach_copy_(mine, [x.to_local().reshape(-1) for _, x in bucket])
    gather_in_place(received.view(-1), group)
    by_rank = [row[: sum(lengths)].split(lengths) for row, lengths in zip(received, sizes, strict=True)]
    for (name, x), pieces in zip(bucket, zip(*by_rank, strict=True), strict=True):
        yield name, torch.cat(pieces).view(x.shape)


def held_box(tensor: Tensor) -> Box:
    """Return the part of a tensor that this rank holds; all of an unsharded tensor."""
    if not isinstance(tensor, DTensor):
        return whole_box(tuple(tensor.shape))
    group = shard_group(tensor)
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
