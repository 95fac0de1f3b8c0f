"""Memory of weight transfers: from a trainer to engines, and into a checkpoint.

Weights that engines pull are sliced out of what each rank holds. Otherwise they are gathered one bucket at a
time. A checkpoint is copied to the memory of the host, which is the device's on a CPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache

from hflow.base.model_files import MIN_FILE_BYTES
from hflow.config.schema import ModelConfig
from hflow.planner.forecast.memory.parts import Items, item, largest
from hflow.planner.forecast.memory.rank import FP32_BYTES, Rank, num_in_matrices
from hflow.planner.plan.channels import channel_traits
from hflow.planner.plan.forecast import MemoryCategory
from hflow.planner.plan.optimizers import states_of
from hflow.planner.plan.rows import WeightRoute
from hflow.planner.weights.sharding import num_publishers, num_slices
from hflow.shapes.model_shape import ModelShape, num_parameters, tensors
from hflow.types.tensor_slices import BUCKET_BYTES, MAX_BUCKETS

COMPARE_BYTES = 1 + 8
"""Bytes per entry of a bucket that is compared with an earlier one (`weights/delta.py`): a mask, and at most
one place in `int64`."""
RECEIVED_LAST = "weights received last"
SAVED_WEIGHTS = "copy of the weights"
SAVED_STATE = "copy of the optimizer's state"


def send_weights(rank: Rank, route: WeightRoute) -> Items:
    """Return the items of a training rank while engines receive its weights."""
    if route.how == "shared" and rank.width == FP32_BYTES:
        return Items()
    if route.how != "pull":
        handed = handed_over_buckets(rank) if route.hands_over else Items()
        return _gather_bucket(rank, rank.width, rank.trained_shape) + handed
    return _slice_buckets(rank) + (_changes(rank) if route.delta else Items())


def published_weights(rank: Rank, routes: Iterable[tuple[WeightRoute, int]], *, is_loading: bool) -> Items:
    """Return the items of published versions on a training rank.

    A channel for one device (`ipc`) keeps what the engine on this device needs of what is here until all
    engines of the replica have loaded theirs, before any of them allocates its cache. Other channels with
    buckets on the device keep packed slices until engines take them. Those with buckets in the memory of the
    host, which is the device's on a CPU, keep the memory for the next version.

    With `delta` the slices that were sent last are kept too, to find what changes; as many changes may be
    waiting for engines, since they are sent as long as they are smaller than the slices. Each route has the
    number of ranks that receive on it. `is_loading`: engines load in this phase.
    """
    publishers = num_publishers(rank.traits, rank.replica.layout)
    share = rank.width * (num_parameters(rank.trained_shape) // publishers)
    items = Items()
    for route, num_receivers in routes:
        if route.how != "pull":
            continue
        own = round(route.held_bytes / num_receivers) if route.held_bytes else share
        num_bytes = 0
        for name in (route.transport, route.near):
            channel = channel_traits(name)
            is_here = channel.buckets == "device" or (channel.buckets == "host" and rank.on_cpu)
            if is_here and (is_loading or not channel.needs_one_device):
                num_bytes += own if name == route.near or channel.needs_one_device else share
        if num_bytes:
            items += item(MemoryCategory.BUFFERS, num_bytes, "published weights")
        if route.delta:
            items += item(MemoryCategory.BUFFERS, share, "weights sent last")
    return items


def received_weights(rank: Rank, route: WeightRoute) -> Items:
    """Return the items of the last version that an engine's rank keeps, to which `delta` applies changes.

    It is in the memory of the host, unless the transport leaves buckets on the device.
    """
    if rank.on_cpu or channel_traits(route.transport).buckets == "device":
        return _received_last(rank, route)
    return Items()


def received_on_host(rank: Rank, route: WeightRoute) -> Items:
    """Return the same for an engine on a GPU whose transport leaves buckets in the memory of the host."""
    is_on_device = channel_traits(route.transport).buckets == "device"
    return Items() if is_on_device else _received_last(rank, route)


def _received_last(rank: Rank, route: WeightRoute) -> Items:
    if not route.delta:
        return Items()
    is_whole = rank.config.lora is not None  # ranks have one matrix of each adapter whole
    num = rank.trained.total if is_whole else num_parameters(rank.trained_shape) // rank.tensor
    return item(MemoryCategory.BUFFERS, rank.width * num, RECEIVED_LAST)


def handed_over_buckets(rank: Rank) -> Items:
    """Return the items of the buckets that a worker hands over; the engine copies as many."""
    return item(MemoryCategory.BUFFERS, _buckets_ahead(rank.trained_shape, rank.width), "buckets handed over")


def receive_weights(rank: Rank, route: WeightRoute, num_senders: int) -> Items:
    """Return the items of an engine's rank while it receives weights, without what its engine adds.

    On a CPU that is one tensor. Until then, buckets are where their transport keeps them (`memory/host.py`).
    On a GPU it is a bucket of each sender, the next one of each that the rank passes on to other engines, and
    what is received ahead of the loading. `ipc` opens the buckets of the devices' trainers where they are.
    What a worker hands over is copied. `num_senders` ranks each have a part of every tensor.
    """
    if route.hands_over:
        return handed_over_buckets(rank)
    if route.how != "pull":
        return Items()
    if rank.on_cpu:
        arriving = rank.shape if rank.replica.merges_adapters else rank.trained_shape
        return item(MemoryCategory.BUFFERS, rank.width * largest_tensor(arriving), "buckets")
    if channel_traits(route.transport).needs_one_device:
        return Items()
    bucket = largest_bucket(rank.trained_shape, rank.width, num_parts=num_senders)
    ahead = min(BUCKET_BYTES, rank.width * num_parameters(rank.trained_shape))
    num_engines = rank.replica.layout.data
    is_passed_on = channel_traits(route.transport).broadcasts and min(num_engines, num_senders) > 1
    num_relayed = -(-num_senders // num_engines) if is_passed_on else 0
    return item(MemoryCategory.BUFFERS, (num_senders + num_relayed) * bucket + ahead, "buckets")


def save_checkpoint(rank: Rank) -> Items:
    """Return the items of a rank while trained weights are gathered and copied to the host.

    It is saved in the compute dtype; a model that only update nodes change, in fp32. On a CPU the copies
    count too. States that are quantised are saved in fp32, one weight's after the other.
    """
    width, is_merged = _saved_width(rank), _saves_merged(rank)
    if is_merged or not _shards_weights(rank):
        bucket = _gather_bucket(rank, width, rank.shape if is_merged else rank.trained_shape)
    else:
        bucket = _collected_pieces(rank, width)
    moment = largest([bucket, _dequantized_states(rank)])
    return moment + checkpoint_copies(rank) if rank.on_cpu else moment


def _dequantized_states(rank: Rank) -> Items:
    """Return the states of the largest weight that a rank dequantises to save them."""
    if rank.replica.role != "train" or not rank.config.save_optimizer:
        return Items()
    quantized = (state for state in states_of(rank.config.optim, True) if state.num_bytes < state.saved_bytes)
    num_bytes = sum(state.saved_bytes for state in quantized) * rank.largest_converted
    return item(MemoryCategory.OPTIMIZER, num_bytes, "dequantised states")


def saved_state_bytes(config: ModelConfig, shape: ModelShape) -> int:
    """Return the bytes of a sharded checkpoint of a shape (`training/sharded_checkpoint.py`)."""
    matrices = num_in_matrices(shape)
    others = num_parameters(shape) - matrices
    return _saved_entry(config, True) * matrices + _saved_entry(config, False) * others


def _saved_entry(config: ModelConfig, is_matrix: bool) -> int:
    """Return the bytes of an entry of a tensor, and of its states."""
    return FP32_BYTES + sum(state.saved_bytes for state in states_of(config.optim, is_matrix))


def checkpoint_copies(rank: Rank) -> Items:
    """Return a rank's copies of a checkpoint in host memory: until they are written, or on GPUs, always."""
    width, is_merged = _saved_width(rank), _saves_merged(rank)
    world, shape = rank.replica.layout.world, rank.trained_shape
    if rank.config.lora is None:
        weights = _file_share(rank, width)
    else:
        adapters = width * num_parameters(shape) if rank.is_first else 0
        weights = adapters + (_file_share(rank, width) if is_merged else 0)
    state = saved_state_bytes(rank.config, shape) // world if rank.config.save_optimizer else 0
    if state and (layout := rank.replica.layout).replicate > 1:  # tensors take turns over replicate indices
        most = max(_saved_entry(rank.config, x) for x in (True, False)) * largest_tensor(shape)
        state += -(-most // layout.fsdp_size)
    return item(MemoryCategory.WEIGHTS, weights, SAVED_WEIGHTS) + item(
        MemoryCategory.OPTIMIZER, state, SAVED_STATE
    )


def _saved_width(rank: Rank) -> int:
    """Return the bytes of a number in a checkpoint's files."""
    return rank.width if rank.replica.role == "train" else FP32_BYTES


def _saves_merged(rank: Rank) -> bool:
    """Return whether the model is saved whole beside its adapters."""
    return rank.config.lora is not None and rank.config.lora.save_merged


def _file_share(rank: Rank, width: int) -> int:
    """Return the bytes of a model's files that a rank writes: its share, and at most one tensor more."""
    num_bytes = width * num_parameters(rank.shape)
    writers = num_writers(num_bytes, rank.replica.layout.world)
    if writers == 1:
        return num_bytes if rank.is_first else 0
    return min(num_bytes, -(-num_bytes // writers) + width * largest_tensor(rank.shape))


def num_writers(num_bytes: float, num_ranks: int) -> int:
    """Return the number of ranks that write the files of a model of some bytes."""
    return min(num_ranks, max(1, math.ceil(num_bytes / MIN_FILE_BYTES)))


def _slice_buckets(rank: Rank) -> Items:
    """Return a bucket of this rank's slices in host memory, with copies where they are not views.

    FSDP casts fp32 shards, and Megatron splits its fused matrices.
    """
    copies = rank.width < FP32_BYTES or not _shards_weights(rank)
    if rank.on_cpu:
        num_bytes = (2 if copies else 1) * _largest_slice_bucket(rank)
    else:
        num_bytes = rank.width * -(-largest_tensor(rank.trained_shape) // _num_slices(rank)) if copies else 0
    return item(MemoryCategory.BUFFERS, num_bytes, "buckets")


def _changes(rank: Rank) -> Items:
    """Return the items of finding the changes of a bucket."""
    num_entries = _largest_slice_bucket(rank) // rank.width
    return item(MemoryCategory.BUFFERS, COMPARE_BYTES * num_entries, "changes")


def _largest_slice_bucket(rank: Rank) -> int:
    """Return the bytes of the largest bucket of this rank's slices."""
    return largest_bucket(rank.trained_shape, rank.width, num_parts=_num_slices(rank))


def _num_slices(rank: Rank) -> int:
    """Return the number of parts into which ranks divide each tensor."""
    return num_slices(rank.traits, rank.replica.layout)


def _gather_bucket(rank: Rank, width: int, shape: ModelShape) -> Items:
    """Return a whole bucket, this rank's part of it twice, and a copy of gloo or the tensor sliced out of it.

    FSDP casts its shards first. A single rank casts whole tensors: the one that is loaded, and two ahead
    (`assemble_tensors` in `weights/buckets.py`).
    """
    casts = width < FP32_BYTES and _shards_weights(rank)
    if rank.replica.layout.world == 1:
        sizes = piece_sizes(shape)
        num_bytes = width * max(sum(sizes[i : i + 3]) for i in range(len(sizes))) if casts else 0
    else:
        num_parts = _num_slices(rank)
        minimum = BUCKET_BYTES * (1 if _shards_weights(rank) else num_parts)
        bucket = largest_bucket(shape, width, minimum)
        copy = bucket if rank.on_cpu else width * largest_tensor(shape)
        num_bytes = bucket + (3 if casts else 2) * (bucket // num_parts) + copy
    return item(MemoryCategory.BUFFERS, num_bytes, "buckets")


def _collected_pieces(rank: Rank, width: int) -> Items:
    """Return the pieces of a tensor that a rank gathers from all ranks that shard it."""
    largest, num_ranks = width * largest_tensor(rank.trained_shape), rank.replica.layout.fsdp_size
    pieces = min(BUCKET_BYTES, largest)
    num_bytes = pieces if num_ranks > 1 else largest if width < FP32_BYTES else 0
    return item(MemoryCategory.BUFFERS, num_bytes, "buckets")


def _shards_weights(rank: Rank) -> bool:
    """Return whether the data axis shards the weights."""
    return rank.traits.shards_weights


@lru_cache
def largest_tensor(shape: ModelShape) -> int:
    """Return the elements of the largest tensor."""
    return max(piece_sizes(shape))


@lru_cache
def piece_sizes(shape: ModelShape) -> tuple[int, ...]:
    """Return the elements of every tensor in the checkpoint's order. Each expert has tensors of its own."""
    return tuple(spec.numel // spec.num_experts for spec in tensors(shape) for _ in range(spec.num_experts))


@lru_cache
def largest_bucket(shape: ModelShape, width: int, minimum: int = BUCKET_BYTES, num_parts: int = 1) -> int:
    """Return the bytes of the largest bucket of tensors in the checkpoint's order.

    Args:
        minimum: bytes at which a bucket is closed.
        num_parts: equal parts of each tensor, of which the bucket has one.
    """
    return max(_buckets((width * -(-size // num_parts) for size in piece_sizes(shape)), minimum))


@lru_cache
def _buckets_ahead(shape: ModelShape, width: int) -> int:
    """Return the bytes of the largest `MAX_BUCKETS` whole buckets in a row."""
    sizes = _buckets((width * size for size in piece_sizes(shape)), BUCKET_BYTES)
    return max(sum(sizes[i : i + MAX_BUCKETS]) for i in range(len(sizes)))


def _buckets(sizes: Iterable[int], minimum: int) -> list[int]:
    """Return the sizes of buckets of neighbouring tensors, each closed when it has the minimum size."""
    sums = [0]
    for size in sizes:
        if sums[-1] >= minimum:
            sums.append(0)
        sums[-1] += size
    return sums
