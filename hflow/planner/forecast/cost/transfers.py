"""Seconds of transfers: inputs of nodes, new weights, checkpoints."""

from __future__ import annotations

import math
from collections.abc import Iterator

from hflow.base.devices import is_gpu
from hflow.planner.forecast.cost.collectives import LinkTime, RankPlacement, all_gather, send
from hflow.planner.forecast.cost.flops import layer_parameters, stage_parameters
from hflow.planner.forecast.cost.replica_costs import ReplicaCosts
from hflow.planner.forecast.cost.roofline import HOST, MEMORY, Part
from hflow.planner.forecast.memory.transfer import num_writers, saved_state_bytes
from hflow.planner.plan.channels import channel_traits
from hflow.planner.plan.forecast import EdgeTraffic
from hflow.planner.plan.hardware import Hardware, Link
from hflow.planner.plan.rows import WeightRoute
from hflow.planner.weights.sharding import num_publishers
from hflow.shapes.model_shape import num_parameters
from hflow.types.tensor_slices import BUCKET_BYTES

QUANTIZING_TRAFFIC = 17
"""Estimated bytes of memory traffic for each weight that is quantised. In bf16, a padded copy is zeroed and
written, and read for the largest weight of each block and again to be scaled. The result, a byte, is written,
copied without padding and to its place, and read for a checksum before and after that."""


def redistribute(edge: EdgeTraffic, network: Link, hardware: Hardware) -> Part:
    """Return the seconds of moving a node's inputs: the busiest worker's bytes, and one round trip.

    The fraction of them that crosses machines is assumed to be that of all bytes. The network is the link
    over which they cross machines.
    """
    if not edge.num_bytes:
        return LinkTime().part("redistribution")
    between = edge.busiest_bytes * edge.num_node_bytes / edge.num_bytes
    link_time = send(edge.busiest_bytes - between, hardware.intra, hardware)
    link = network if between else hardware.intra
    return (link_time + send(between, link, hardware)).part("redistribution")


def load_weights(
    route: WeightRoute,
    replica: ReplicaCosts,
    ranks: RankPlacement,
    network: Link,
    num_sources: int,
    merges: bool = False,
    num_tensors: int | None = None,
    has_relays: bool = True,
) -> list[Part]:
    """Return the seconds in which all engines of a replica load new weights at once.

    Slices that several engines on one machine need cross the network once. With `delta` each engine keeps a
    copy, and everything counts as changed, because the plan does not know what training will change.

    Args:
        merges: whether adapters are sent, which the engine adds to its weights.
        num_tensors: each takes a moment of its own; None: those that training changes.
        has_relays: whether the weights of several senders are broadcast by an engine that gets them first.
    """
    if route.how == "shared":
        return _checksums(replica.trained_weights * replica.itemsize, replica)
    merged = _merge(replica) if merges else _quantize(replica)
    num = replica.num_trained_tensors if num_tensors is None else num_tensors
    tensors = Part("tensors", num * replica.hardware.calibration.transfers.tensor_us * 1e-6, HOST)
    if route.how == "gather":
        return [*_gather(route, replica, ranks), tensors, *merged]
    needed = (route.moved_bytes + route.held_bytes) / replica.layout.world
    num_copies = 2 if route.delta else 1
    copy = Part("copy", num_copies * 2 * needed / replica.rates.stream, MEMORY)
    arrival = _arrival(route, replica, ranks, network, needed, num_sources, has_relays)
    # What arrived is summed for the rank's part and again after loading; what was sent, also when it arrives.
    sent = route.moved_bytes + _near_bytes(route)
    checksums = _checksums(2 * needed + sent / replica.layout.world, replica)
    return [*arrival, copy, tensors, *checksums, *merged]


def _gather(route: WeightRoute, replica: ReplicaCosts, ranks: RankPlacement) -> list[Part]:
    """Return the seconds in which each rank gathers all weights and loads its part.

    Whole tensors are written once by the collective, and where they are handed over to an engine's process,
    twice more, into a bucket and out of it.
    """
    trained = num_parameters(replica.trained_shape)
    whole = trained * replica.itemsize
    gathered = all_gather(whole, ranks, replica.hardware.of_updates)
    num_buckets = math.ceil(whole / BUCKET_BYTES)
    latency = LinkTime(gathered.transfer, gathered.latency * num_buckets)
    loaded = replica.trained_weights * replica.itemsize
    num_copies = 2 if route.hands_over else 0
    copy = Part("copy", 2 * (loaded + num_copies * whole) / replica.rates.stream, MEMORY)
    checksums = _checksums((3 if route.hands_over else 1) * whole + loaded, replica)
    return [latency.part("all-gather"), copy, *checksums]


def _merge(replica: ReplicaCosts) -> Iterator[Part]:
    """Yield the seconds in which an engine adds adapters to its copy of the weights, and loads the sum.

    The copy is in host memory. The sum is written, read and written into the model, and summed twice.
    """
    num_bytes = replica.stage_weights * replica.itemsize
    yield from _over_pcie(num_bytes, replica)
    yield Part("merge", 4 * num_bytes / replica.rates.stream, MEMORY)
    yield from _checksums(2 * num_bytes, replica)


def _quantize(replica: ReplicaCosts) -> list[Part]:
    """Return the seconds in which an engine quantises what it has loaded, if that is not only adapters."""
    if replica.low_dtype is None or replica.config.lora is not None:
        return []
    traffic = QUANTIZING_TRAFFIC * _layer_weights(replica)
    return [Part("quantisation", traffic / replica.rates.stream, MEMORY)]


def _layer_weights(replica: ReplicaCosts) -> float:
    """Return the number of weights of layers that a rank of an engine without stages holds."""
    return replica.shape.num_layers * layer_parameters(replica.shape) / replica.layout.tensor


def _checksums(num_bytes: float, replica: ReplicaCosts) -> list[Part]:
    """Return the seconds of checksums of weights."""
    rate = replica.hardware.calibration.transfers.checksum_gb_per_s
    return [] if rate is None else [Part("checksums", num_bytes / (rate * 1e9), MEMORY)]


def _near_bytes(route: WeightRoute) -> int:
    """Return the bytes that are sent to engines on the senders' devices, in place."""
    return route.held_bytes if route.near or channel_traits(route.transport).needs_one_device else 0


def crossing_bytes(route: WeightRoute, num_receivers: int, copies: int, machines: int, sources: int) -> float:
    """Return the bytes that the busiest port between machines carries, of a receiver or a sender.

    Receivers on a machine share what they need. Some channels serve each machine by itself; a broadcast
    passes through the receivers, so that it is sent once (Thakur et al. 2005, "Optimization of collective
    communication operations in MPICH", 3.2: a pipelined ring). `copies` receivers on a machine need the same
    slices.
    """
    received = route.node_bytes / num_receivers / copies
    sent = route.node_bytes / copies / sources
    by_each = channel_traits(route.transport).is_fetched_by_each_machine
    return max(received, sent if by_each else sent / machines)


def _arrival(
    route: WeightRoute,
    replica: ReplicaCosts,
    ranks: RankPlacement,
    network: Link,
    needed: float,
    num_sources: int,
    has_relays: bool,
) -> Iterator[Part]:
    """Yield the seconds until the weights of an engine's rank are on its device.

    What a transport reads in place, such as shared memory on a CPU or memory of the same GPU, takes none; nor
    does what the device itself holds, where `WeightRoute.near` carries it.
    """
    hardware, num = replica.hardware.of_updates, replica.layout.world
    if route.near:
        needed = route.moved_bytes / num
    copies = max(1, ranks.per_machine // (replica.layout.tensor * replica.layout.pipe))
    received = route.node_bytes / num / copies
    between = crossing_bytes(route, num, copies, ranks.machines, num_sources)
    num_buckets = math.ceil(needed / BUCKET_BYTES)
    channel = channel_traits(route.transport)
    if channel.buckets == "disk":
        yield _on_disk("disk", needed, replica)
        yield from _over_pcie(needed, replica)
    elif channel.buckets == "store":
        crossing = send(between, network, hardware) if between else LinkTime()
        latency = hardware.intra.latency_us * 1e-6 + crossing.latency
        yield LinkTime(crossing.transfer, latency * num_buckets).part("weights")
        yield from _over_pcie(needed, replica)
    elif channel.buckets == "host":
        yield from _over_pcie(needed, replica)
    elif not channel.needs_one_device:
        link_time = send(route.moved_bytes / num - received, hardware.intra, hardware)
        if between:
            link_time += send(between, network, hardware)
        if has_relays and channel.broadcasts and replica.layout.data > 1 and num_sources > 1:
            # The next bucket comes from its sender while one is broadcast, so the longer way counts.
            link = network if route.node_bytes == route.moved_bytes else hardware.intra
            first = send(route.moved_bytes / num, link, hardware)
            transfer = max(first.transfer, link_time.transfer) + first.transfer / num_buckets
            link_time = LinkTime(transfer, link_time.latency + first.latency)
        yield LinkTime(link_time.transfer, link_time.latency * num_buckets).part("weights")


def publish_weights(route: WeightRoute, source: ReplicaCosts, engine: ReplicaCosts) -> list[Part]:
    """Return the seconds of publishing one training rank's slices, once for all engines that need it.

    Slices are packed on the device, where some channels leave them. Others copy them into the memory of the
    host, and from there into files or Ray's object store. With `delta` they are compared
    with those that were sent last. `WeightRoute.near` carries what the engine on the same device needs.
    """
    sent_bytes = route.moved_bytes / engine.mean_copies / num_publishers(source.traits, source.layout)
    packed_bytes = sent_bytes + _near_bytes(route) / source.layout.world
    packed = Part("copy", 2 * packed_bytes / source.rates.stream, MEMORY)
    parts = [packed, *_checksums(packed_bytes, source)]
    if route.delta:
        parts.append(packed._replace(name="comparison"))
    buckets = channel_traits(route.transport).buckets
    if buckets != "device":
        parts += _over_pcie(sent_bytes, source)
    if buckets == "store":
        rate = source.hardware.calibration.transfers.store_gb_per_s * 1e9
        parts.append(Part("object store", sent_bytes / rate, MEMORY))
    if buckets == "disk":
        parts.append(_on_disk("disk", sent_bytes, source))
    return parts


def keep_weights(engine: ReplicaCosts) -> list[Part]:
    """Return the seconds in which a sleeping engine's weights are copied to the host's memory, and back."""
    num_bytes = engine.stage_weights * engine.itemsize - _layer_weights(engine) * (
        engine.itemsize - engine.weight_bytes
    )
    return [part._replace(name="sleep") for part in _over_pcie(2 * num_bytes, engine)]


def offload(num_bytes: float, replica: ReplicaCosts) -> list[Part]:
    """Return the seconds of copying state between a device and the memory of its host."""
    if not num_bytes:
        return []
    copied = list(_over_pcie(num_bytes, replica))
    if copied:
        return [part._replace(name="offloading") for part in copied]
    return [Part("offloading", 2 * num_bytes / replica.rates.stream, MEMORY)]


def _over_pcie(num_bytes: float, replica: ReplicaCosts) -> Iterator[Part]:
    """Yield the seconds of copying bytes between a GPU and the memory of its host; nothing on a CPU."""
    if is_gpu(replica.hardware.device.type):
        yield send(num_bytes, replica.hardware.host, replica.hardware).part("PCIe")


def _on_disk(name: str, num_bytes: float, replica: ReplicaCosts) -> Part:
    """Return the seconds in which one process writes or reads files."""
    return Part(name, num_bytes / (replica.hardware.calibration.transfers.disk_gb_per_s * 1e9), "disk")


def save_checkpoint(replica: ReplicaCosts) -> list[Part]:
    """Return the seconds for which a checkpoint stops training.

    The weights are gathered and copied to the memory of the host, each rank an equal share. Each rank copies
    its optimizer state. Files are written while training continues. The first copy from a GPU takes longer:
    it pins the memory for all of them. Of a model with adapters, these alone are saved, by one rank, and the
    merged weights if they are asked for.
    """
    lora, layout = replica.config.lora, replica.layout
    numel = stage_parameters(replica.shape, layout.pipe) / layout.tensor
    trained = numel if lora is None else replica.trained_weights
    saved = numel + trained if lora is not None and lora.save_merged else trained
    ranks = replica.data if layout.replicate == 1 else replica.shard
    gather = all_gather(saved * replica.itemsize, ranks, replica.hardware)
    whole = trained * layout.tensor * layout.pipe
    num_bytes = saved * layout.tensor * layout.pipe * replica.itemsize
    copied = num_bytes / num_writers(num_bytes, layout.world)
    if replica.config.save_optimizer:
        shape = replica.trained_shape
        copied += whole * saved_state_bytes(replica.config, shape) / num_parameters(shape) / layout.world
    copy = list(_over_pcie(copied, replica)) or [Part("copy", 2 * copied / replica.rates.stream, MEMORY)]
    return [gather.part("all-gather"), *copy]
