"""`weight_routes`: how generation replicas get the weights that training changes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Literal, Protocol

from hflow.base.devices import has_cuda_api
from hflow.config.schema import ONE_PROCESS, ModelConfig
from hflow.graph.ir import Graph
from hflow.graph.queries import written_models
from hflow.planner.plan.channels import (
    CHANNELS,
    GATHER,
    RouteFacts,
    channel_kind,
    channel_traits,
    near_channel,
)
from hflow.planner.plan.cluster import ClusterSpec
from hflow.planner.plan.request import PlanRequest
from hflow.planner.plan.routing import on_workers
from hflow.planner.plan.rows import DeviceGroup, Plan, Replica, WeightRoute, batch_replica, devices_of
from hflow.planner.plan.traits import traits
from hflow.planner.weights.resharding import add_rows
from hflow.planner.weights.sharding import mean_copies, num_publishers
from hflow.shapes.architectures import knows_tensors
from hflow.shapes.model_shape import DTYPE_BYTES, ModelShape

STORE_FRACTION = 0.3
"""The fraction of a machine's memory that Ray gives its object store by default."""
STORE_LIMIT = 200 * 10**9
"""Bytes that Ray gives an object store at most by default."""


def weight_routes(
    graph: Graph, groups: Iterable[DeviceGroup], replicas: tuple[Replica, ...], request: PlanRequest
) -> tuple[WeightRoute, ...]:
    """Return one route for every generation replica whose model changes during the run.

    Weights that do not change are loaded once by each replica, without a route. Routes of models whose
    tensors are known have rows; entries move in the dtype that engines hold.
    """
    written, group_of = written_models(graph), {group.name: group for group in groups}
    routes = []
    for gen in replicas:
        if gen.role == "gen" and gen.model in written:
            src = batch_replica(replicas, gen.model)
            route = weight_route(src, gen, request, add_rows)
            devices = devices_of([group_of[name] for name in gen.groups])
            in_order = on_workers(gen, devices[: gen.layout.world])
            if gen.workers != in_order.workers:
                more_bytes = weight_route(src, in_order, request, add_rows).moved_bytes
                route = replace(route, saved_bytes=more_bytes - route.moved_bytes)
            routes.append(route)
    return tuple(routes)


class CountBytes(Protocol):
    """Adds the bytes that move to a route."""

    def __call__(
        self,
        route: WeightRoute,
        src: Replica,
        dst: Replica,
        shape: ModelShape,
        item_bytes: int,
        cluster: ClusterSpec,
    ) -> WeightRoute:
        """Return the route with its bytes; the arguments are those of `add_rows`."""


def weight_route(src: Replica, gen: Replica, request: PlanRequest, count: CountBytes) -> WeightRoute:
    """Return the route from a training replica to a generation replica of its model.

    `count` adds the bytes that move, and rows if it makes any.
    """
    config, shape = request.model(gen.model), request.trained_shape(gen.model)
    route = WeightRoute(gen.model, src.name, gen.name, way_of(src, gen, config, request))
    if shape is not None:
        route = count(route, src, gen, shape, DTYPE_BYTES[config.compute_dtype], request.cluster)
        if not knows_tensors(shape):
            route = replace(route, rows=(), worker_sets=())
    return _with_transport(route, src, gen, config, request)


def way_of(
    src: Replica, gen: Replica, config: ModelConfig, request: PlanRequest
) -> Literal["shared", "gather", "pull"]:
    """Return the way of weights from a training to a generation replica (`WeightRoute.how`)."""
    if set(src.workers) != set(gen.workers):
        return "pull"
    if not traits(gen.backend).has_own_process:
        return "shared" if src.layout.world == gen.layout.world == 1 else "gather"
    if request.settings.get("workers") in ONE_PROCESS or config.gen.delta:
        return "pull"
    is_gathered = config.gen.transport == GATHER or (
        config.gen.transport == "auto"
        and has_cuda_api(request.cluster.device)
        and src.layout.world > 1
        and not _can_be_in_place(src, gen)
    )
    return "gather" if is_gathered else "pull"


def _can_be_in_place(src: Replica, gen: Replica) -> bool:
    """Return whether each rank of an engine can be where its part of every tensor is."""
    is_cut_alike = not traits(src.backend).shards_weights and src.layout.pipe == src.layout.expert == 1
    return is_cut_alike and gen.layout.tensor % src.layout.tensor == 0


def _with_transport(
    route: WeightRoute, src: Replica, gen: Replica, config: ModelConfig, request: PlanRequest
) -> WeightRoute:
    """Return the route with its transport, which only a `pull` route has, and that to engines' processes."""
    if route.how != "pull":
        return replace(route, near=near_transport(route, gen, request))
    transport, why = str(config.gen.transport), "as configured"
    if transport in ("auto", GATHER):  # `transport_reasons` refuses the second
        transport, why = _choice(_route_facts(route, src, gen, request))
    route = replace(route, delta=config.gen.delta, transport=transport, why=why)
    return replace(route, near=near_transport(route, gen, request))


def near_transport(route: WeightRoute, gen: Replica, request: PlanRequest) -> str:
    """Return the transport of weights to an engine's process on their device.

    Empty where there is no such process, or the transport of a `pull` route does that, too.
    """
    takes_any = route.how == "gather" or route.held_bytes
    if not takes_any or channel_traits(route.transport).buckets == "device":
        return ""
    if not traits(gen.backend).has_own_process or request.settings.get("workers") in ONE_PROCESS:
        return ""
    near = near_channel(request.cluster.device)
    return "" if near == route.transport else near


def _choice(facts: RouteFacts) -> tuple[str, str]:
    """Return the transport of a route by default, and the reason.

    On GPUs weights stay there where they can. Otherwise they go through host memory: shared memory for an
    engine in a process of its own on the same machine, else the object store, which each other machine
    fetches once. It is the disk if a version does not fit into the store, as far as the memory is known.
    """
    for name in sorted(CHANNELS, key=lambda name: channel_kind(name).priority, reverse=True):
        reason = channel_kind(name).prefer(facts)
        if reason is not None:
            return name, reason
    raise AssertionError("the object store is always possible")


def _route_facts(route: WeightRoute, src: Replica, gen: Replica, request: PlanRequest) -> RouteFacts:
    cluster = request.cluster
    return RouteFacts(
        device=cluster.device,
        is_one_process=request.settings.get("workers") in ONE_PROCESS,
        has_own_process=traits(gen.backend).has_own_process,
        shares_devices=not set(src.workers).isdisjoint(gen.workers),
        num_machines=len(cluster.machines(src.workers).keys() | cluster.machines(gen.workers).keys()),
        moved_bytes=route.moved_bytes,
        held_bytes=route.held_bytes,
        stored_bytes=max(stored_bytes(route, src, gen, request).values(), default=0),
        store_bytes=store_bytes(request),
    )


def stored_bytes(route: WeightRoute, src: Replica, gen: Replica, request: PlanRequest) -> dict[int, int]:
    """Return the bytes of one version that each machine of the trainer puts into its object store.

    That is its ranks' part of what engines do not have on their own devices; empty if the model's sizes are
    unknown.
    """
    shape = request.trained_shape(gen.model)
    if shape is None:
        return {}
    version = route.moved_bytes / mean_copies(shape, gen.layout)
    senders = request.cluster.machines(src.workers)
    publishers = num_publishers(traits(src.backend), src.layout)
    return {machine: round(version * min(1.0, num / publishers)) for machine, num in senders.items()}


def transport_reasons(plan: Plan, request: PlanRequest) -> Iterator[str]:
    """Yield reasons why a run cannot send weights as configured, each with a fix."""
    for route in plan.weights:
        gen = plan.replica(route.dst)
        transport, reason = route.transport, _obstacle(route, plan.replica(route.src), gen, request)
        if route.how == "pull" and request.model(route.model).gen.transport == GATHER:
            transport, reason = GATHER, _gather_obstacle(gen, request)
        if route.how != "pull" and request.model(route.model).gen.delta:
            yield (
                f"models.{route.model}.gen.delta=true cannot be used: {gen.name} takes weights from the "
                f"memory of its workers, so nothing is sent. Set models.{route.model}.gen.delta=false."
            )
        if route.how != "pull" and request.model(route.model).gen.transport not in ("auto", route.how):
            yield (
                f"models.{route.model}.gen.transport={request.model(route.model).gen.transport} cannot be "
                f"used: {gen.name} takes weights from the memory of its workers, so nothing is sent. Set "
                f"models.{route.model}.gen.transport=auto."
            )
        if reason is not None:
            yield (
                f"models.{route.model}.gen.transport={transport} cannot be used: {reason}. Set "
                f"models.{route.model}.gen.transport=auto."
            )


def _obstacle(route: WeightRoute, src: Replica, gen: Replica, request: PlanRequest) -> str | None:
    """Return the reason for which a route's transport cannot carry its weights; None if it can."""
    channel, facts = channel_traits(route.transport), _route_facts(route, src, gen, request)
    if channel.needs_cuda and not has_cuda_api(facts.device):
        return f"the cluster's devices are {facts.device}, and only GPUs have it"
    if channel.needs_workers_apart and facts.is_one_process:
        return "workers=inproc is one process"
    if channel.needs_workers_apart and facts.shares_devices:
        return f"{src.name} and {gen.name} share a device, and a broadcast needs one per process"
    if channel.needs_one_device and (not facts.has_own_process or facts.is_one_process):
        return f"{gen.name} has no process of its own on the trainer's GPU"
    if channel.needs_one_device and (facts.moved_bytes or not facts.shares_devices):
        return f"devices of {gen.name} need weights that other devices hold"
    if not channel.crosses_machines and facts.num_machines > 1 and not channel.needs_one_device:
        return f"{src.name} and {gen.name} are on {facts.num_machines} machines"
    return None


def _gather_obstacle(gen: Replica, request: PlanRequest) -> str:
    """Return the reason for which weights cannot be gathered into engines' processes."""
    if request.settings.get("workers") in ONE_PROCESS:
        return "workers=inproc is one process"
    if request.model(gen.model).gen.delta:
        return "whole tensors are gathered, and not changes alone"
    return f"{gen.name} does not have exactly the devices of its trainer"


def store_bytes(request: PlanRequest) -> float | None:
    """Return the bytes of the smallest object store of a machine; None if one is not known."""
    devices = [hardware.device for hardware in request.hardware.kinds]
    sizes = [device.memory_bytes if device.type == "cpu" else device.host_memory_bytes for device in devices]
    known = [size for size in sizes if size is not None]
    if len(known) < len(sizes):
        return None
    return min(STORE_FRACTION * min(known) * request.cluster.devices_per_node, STORE_LIMIT)
