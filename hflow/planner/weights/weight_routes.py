"""`weight_routes`: how generation replicas get the weights that training changes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Literal, Protocol

from hflow.base.text import format_gib
from hflow.config.schema import ModelConfig
from hflow.graph.ir import Graph
from hflow.graph.queries import written_models
from hflow.planner.models.architectures import can_run
from hflow.planner.plan.cluster import ClusterSpec
from hflow.planner.plan.model_shape import DTYPE_BYTES, ModelShape
from hflow.planner.plan.request import PlanRequest
from hflow.planner.plan.routing import on_workers
from hflow.planner.plan.rows import DeviceGroup, Plan, Replica, WeightRoute, batch_replica, devices_of
from hflow.planner.plan.traits import traits
from hflow.planner.weights.resharding import add_rows
from hflow.planner.weights.sharding import mean_copies

STORE_FRACTION = 0.3
"""The fraction of a machine's memory that Ray gives its object store by default."""
STORE_LIMIT = 200 * 10**9
"""Bytes that Ray gives an object store at most by default."""


_THROUGH_HOSTS = ("store", "disk", "shared")
"""Transports that copy weights to the memory of a machine, or further."""


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

    Args:
        src: the replica that trains.
        gen: the replica that generates.
        request: the sizes of the model, and the settings of its engine.
        count: adds the bytes that move, and rows if it makes any.
    """
    route = WeightRoute(gen.model, src.name, gen.name, _how(src, gen))
    config, shape = request.model(gen.model), request.trained_shape(gen.model)
    if shape is not None:
        route = count(route, src, gen, shape, DTYPE_BYTES[config.compute_dtype], request.cluster)
        if not can_run(shape):
            route = replace(route, rows=(), worker_sets=())
    return _with_transport(route, src, gen, config, request)


def _how(src: Replica, gen: Replica) -> Literal["shared", "gather", "pull"]:
    if set(src.workers) != set(gen.workers) or traits(gen.backend).has_own_process:
        return "pull"
    return "shared" if src.layout.world == gen.layout.world == 1 else "gather"


def _with_transport(
    route: WeightRoute, src: Replica, gen: Replica, config: ModelConfig, request: PlanRequest
) -> WeightRoute:
    """Return the route with its transport, which only a `pull` route has."""
    if route.how != "pull":
        return route
    transport, why = str(config.gen.transport), "as configured"
    if transport == "auto":
        transport, why = _choice(route, src, gen, request)
    route = replace(route, delta=config.gen.delta, transport=transport, why=why)
    return replace(route, near=near_transport(route, gen, request))


def near_transport(route: WeightRoute, gen: Replica, request: PlanRequest) -> str:
    """Return the transport of what an engine's own device holds; empty where it makes no difference."""
    if route.transport not in _THROUGH_HOSTS:
        return ""
    has_own = route.held_bytes and traits(gen.backend).has_own_process
    if not has_own or request.settings.get("workers") == "inproc":
        return ""
    near = "ipc" if request.cluster.device == "cuda" else "shared"
    return "" if near == route.transport else near


def _choice(route: WeightRoute, src: Replica, gen: Replica, request: PlanRequest) -> tuple[str, str]:
    """Return the transport of a route by default, and the reason.

    On GPUs weights stay there where they can. Otherwise they go through host memory: shared memory for an
    engine in a process of its own on the same machine, else the object store, which each other machine
    fetches once. It is the disk if a version does not fit into the store, as far as the memory is known.
    """
    own_process, cluster = traits(gen.backend).has_own_process, request.cluster
    machines = cluster.machines(src.workers).keys() | cluster.machines(gen.workers).keys()
    in_one_process = request.settings.get("workers") == "inproc"
    if cluster.device == "cuda" and not in_one_process:
        if not set(src.workers) & set(gen.workers):
            return "collective", "NCCL broadcasts between devices"
        if own_process and route.held_bytes and not route.moved_bytes:
            return "ipc", "every engine is on the devices that hold its weights"
    if own_process and len(machines) == 1:
        return "shared", "the engines have processes of their own on this machine"
    available = store_bytes(request)
    fullest = max(stored_bytes(route, src, gen, request).values(), default=0)
    if available is not None and fullest > available:
        return "disk", (
            f"trainers publish {format_gib(fullest)} per machine, but the object store has only about "
            f"{format_gib(available)}"
        )
    return "store", "memory that processes share"


def stored_bytes(route: WeightRoute, src: Replica, gen: Replica, request: PlanRequest) -> dict[int, int]:
    """Return what each machine of the trainer puts into the object store of one version, by machine.

    That is its ranks' part of what engines do not have on their own devices; empty if the model's sizes are
    unknown.
    """
    shape = request.trained_shape(gen.model)
    if shape is None:
        return {}
    version = route.moved_bytes / mean_copies(shape, gen.layout)
    senders = request.cluster.machines(src.workers)
    return {machine: round(version * num / src.layout.world) for machine, num in senders.items()}


def transport_reasons(plan: Plan, request: PlanRequest) -> Iterator[str]:
    """Yield why a run cannot send weights as configured, each with what to set instead."""
    in_one_process = request.settings.get("workers") == "inproc"
    for route in plan.weights:
        src, gen = plan.replica(route.src), plan.replica(route.dst)
        both = set(src.workers) & set(gen.workers)
        machines = {plan.cluster.node_of(worker) for worker in (*src.workers, *gen.workers)}
        own_process = traits(gen.backend).has_own_process
        reason = None
        if route.transport == "shared" and len(machines) > 1:
            reason = f"{src.name} and {gen.name} are on {len(machines)} machines"
        elif route.transport == "collective" and in_one_process:
            reason = "workers=inproc is one process"
        elif route.transport == "collective" and both:
            reason = f"{src.name} and {gen.name} share a device, and a broadcast needs one per process"
        elif route.transport == "ipc" and plan.cluster.device != "cuda":
            reason = f"the cluster's devices are {plan.cluster.device}, and only GPUs have it"
        elif route.transport == "ipc" and (not own_process or in_one_process):
            reason = f"{gen.name} has no process of its own on the trainer's GPU"
        elif route.transport == "ipc" and (route.moved_bytes or not both):
            reason = f"devices of {gen.name} need weights that other devices hold"
        if route.how != "pull" and request.model(route.model).gen.delta:
            yield (
                f"models.{route.model}.gen.delta=true cannot be used: {gen.name} takes weights from the "
                f"memory of its workers, so nothing is sent. Set models.{route.model}.gen.delta=false."
            )
        if route.how != "pull" and request.model(route.model).gen.transport != "auto":
            yield (
                f"models.{route.model}.gen.transport={request.model(route.model).gen.transport} cannot be "
                f"used: {gen.name} takes weights from the memory of its workers, so nothing is sent. Set "
                f"models.{route.model}.gen.transport=auto."
            )
        if reason is not None:
            yield (
                f"models.{route.model}.gen.transport={route.transport} cannot be used: {reason}. Set "
                f"models.{route.model}.gen.transport=auto."
            )


def store_bytes(request: PlanRequest) -> float | None:
    """Return the bytes of a machine's object store; None if the memory of the machine is not known."""
    if request.hardware is None:
        return None
    device = request.hardware.device
    size = device.memory_bytes if device.type == "cpu" else device.host_memory_bytes
    return (
        None if size is None else min(STORE_FRACTION * size * request.cluster.devices_per_node, STORE_LIMIT)
    )
