"""Which way published weights take between processes."""

from __future__ import annotations

from dataclasses import replace

from hflow.plan.hardware import GIB
from hflow.plan.ir import Replica, WeightRoute
from hflow.plan.request import ModelRequest, PlanRequest

STORE_SHARE = 0.3
"""The part of a machine's memory that Ray's object store takes by itself."""


def with_transport(
    route: WeightRoute, src: Replica, gen: Replica, asked: ModelRequest, request: PlanRequest
) -> WeightRoute:
    """The route with its transport; only weights that are pulled need one.

    Left to the plan it is the object store: memory that processes of a machine share, and that others fetch
    from once. It is the disk where a version does not fit into it, as far as the machine's memory is known.
    """
    if route.how != "pull":
        return route
    if asked.transport != "auto":
        return replace(route, transport=asked.transport, why="as configured")
    room = _room(request)
    machines = {request.cluster.node_of(worker) for worker in src.workers}
    most = route.moved_bytes / gen.layout.data / len(machines)
    if room is not None and most > room:
        why = f"a version has {most / GIB:.1f} GiB on a machine, its object store about {room / GIB:.1f}"
        return replace(route, transport="disk", why=why)
    return replace(route, transport="store", why="memory that processes share")


def _room(request: PlanRequest) -> float | None:
    """Bytes of a machine's object store; None where the host's memory is not known."""
    if request.hardware is None or request.hardware.device.type != "cpu":
        return None
    return STORE_SHARE * request.hardware.device.memory_bytes * request.cluster.devices_per_node
