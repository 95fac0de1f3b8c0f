"""Plans in which some replicas have other layouts, as far as memory depends on them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from hflow.errors import PlanError
from hflow.planner.ir import DeviceGroup, Plan, Replica
from hflow.planner.layout import Layout
from hflow.planner.layout_checks import check_layouts
from hflow.planner.request import PlanRequest
from hflow.planner.routing import rank_order

MAX_TENSOR_RANKS = 8
"""Most tensor ranks to suggest: on more than one machine they would cost more time than they save memory."""


def devices_of(plan: Plan, group: str) -> tuple[int, ...]:
    """Return the devices of a group."""
    return next(g.devices for g in plan.groups if g.name == group)


def with_layouts(
    plan: Plan,
    request: PlanRequest,
    replicas: Sequence[Replica],
    layouts: Sequence[Layout],
    num_devices: int,
) -> Plan | None:
    """Return the plan with other layouts of a group's replicas, or None if a layout is not valid.

    Args:
        plan: is not changed.
        request: what the plan was compiled from.
        replicas: of one group.
        layouts: of these replicas.
        num_devices: size of the group in the new plan.
    """
    group = replicas[0].group
    devices = devices_of(plan, group)
    if len(devices) != num_devices:
        devices = tuple(range(num_devices))
    changed = {
        replica.name: replace(
            replica,
            layout=layout,
            workers=devices[: layout.world],
            heads=tuple(devices[rank] for rank in layout.heads(rank_order(replica.role))),
        )
        for replica, layout in zip(replicas, layouts, strict=True)
        if layout.world <= num_devices
    }
    if len(changed) < len(replicas) or not _are_valid(plan, request, changed.values()):
        return None
    groups = tuple(DeviceGroup(group, devices) if g.name == group else g for g in plan.groups)
    all_replicas = tuple(changed.get(replica.name, replica) for replica in plan.replicas)
    return replace(plan, groups=groups, replicas=all_replicas)


def _are_valid(plan: Plan, request: PlanRequest, replicas: Iterable[Replica]) -> bool:
    """Return whether layouts divide their models, and every dp rank has a sample of every minibatch."""
    stream = plan.schedule.streams[0]
    num_minibatches = max((cut.minibatches for _, cut in plan.cuts), default=1)
    num_samples = (stream.batch or 1) // num_minibatches * stream.group_size
    if any(r.role != "gen" and r.layout.data > num_samples for r in replicas):
        return False
    try:
        check_layouts(replicas, request)
    except PlanError:
        return False
    return True
