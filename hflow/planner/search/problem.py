"""`SearchProblem`: what a search may choose, and what the user has fixed."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain

from hflow.base.errors import PlanError
from hflow.config.schema import ModelConfig
from hflow.graph.ir import Graph
from hflow.graph.queries import root_stream, written_models
from hflow.planner.checks.layouts import check_layouts
from hflow.planner.forecast.memory import MEMORY_MARGIN
from hflow.planner.forecast.period.step_graph import SteadyEvents
from hflow.planner.make.placement_setting import device_sets, placed_devices
from hflow.planner.make.replicas import (
    GEN_SUFFIX,
    Devices,
    check_size,
    device_groups,
    named_groups,
    placement_name,
    replica_roles,
)
from hflow.planner.make.structure import plan_structure
from hflow.planner.plan.cluster import ClusterSpec
from hflow.planner.plan.request import PlanRequest, stream_workloads
from hflow.planner.plan.rows import DeviceGroup, Plan, Replica
from hflow.planner.plan.traits import BackendTraits, traits
from hflow.shapes.layout import Layout

LONG_SEQUENCE = 1 << 14
"""Tokens from which on context ranks are tried at once, and not only where nothing else fits."""
PLACEMENT = "placement"
"""The key of `PlanRequest.free` with which replicas that the placement does not name are placed freely."""


@dataclass(frozen=True)
class FixedGroup:
    """Replicas that share devices in any case."""

    devices: Devices | None
    """The devices that the user has named; None: the search chooses them."""
    replicas: tuple[str, ...]
    """A replica in several groups uses the devices of all of them."""


class SearchProblem:
    """The replicas of a graph, and what is known of them before any choice.

    Attributes:
        request: the request with all that is not free.
        margin: share of a device's memory that a plan leaves free.
        allows_planned_only: whether layouts may be chosen that can be planned but not run yet.
        divides_sequences: whether to try layouts with context ranks.
        workloads: root stream -> lengths of its samples.
        base: the plan with every replica on one device, from which everything is read that does not depend on
            devices.
        fixed: groups that the user has named. No two of them share devices, or have the same replicas.
        layouts: replica -> the layout that the user has set.
        given_groups: group that was given with a name -> its devices.
        given_places: replica -> its groups among these, as `models.NAME.group` names them.
        loose: replicas that may be anywhere.
        free_devices: devices that no group has.
    """

    def __init__(
        self,
        graph: Graph,
        request: PlanRequest,
        *,
        margin: float = MEMORY_MARGIN,
        structure: Plan | None = None,
        allows_planned_only: bool = False,
        divides_sequences: bool = False,
    ) -> None:
        """Read a request with something free; the other arguments are the attributes.

        Args:
            structure: the request's plan, where its placement is given and the plan is known.

        Raises:
            PlanError: if groups contradict each other, the cluster or the models.
        """
        self.graph = graph
        self.margin = margin
        self.allows_planned_only = allows_planned_only
        self.layouts: dict[str, Layout] = {}
        self.given_groups: dict[str, Devices] = {}
        self.given_places: dict[str, str] = {}
        names = [f"{model}@{role}" for model, role in replica_roles(graph)]
        if PLACEMENT in request.free and request.placement is not None:
            fixed = self._placed_groups(graph, request)
        elif PLACEMENT in request.free:
            fixed = _configured_groups(graph, request)
        else:
            if structure is None:
                structure, request = plan_structure(graph, request)
            fixed = self._given_groups(structure)
        self.fixed = _merged(fixed)
        self.request = _without_placement(request)
        for name in names:
            config = request.model(_model(name))
            layout = config.gen.layout if name.endswith("@gen") else config.layout
            if layout is not None:
                self.layouts[name] = Layout.parse(layout)
        taken = {name for group in self.fixed for name in group.replicas}
        used = {device for group in self.fixed for device in group.devices or ()}
        self.loose = tuple(name for name in names if name not in taken)
        self.free_devices = tuple(d for d in range(request.cluster.num_devices) if d not in used)
        self.base = self.structure([names])
        self.workloads = dict(stream_workloads(self.base, self.request))
        self.divides_sequences = divides_sequences or self.longest >= LONG_SEQUENCE
        self._check_layouts()

    @cached_property
    def events(self) -> SteadyEvents:
        """The events of a step, whatever the devices of replicas."""
        return SteadyEvents(self.base.schedule)

    @cached_property
    def in_flight(self) -> int:
        """Samples that may be in flight at once: with a free `max_concurrent`, all that staleness allows."""
        schedule = self.request.schedule
        if not self.is_free("schedule.max_concurrent"):
            return schedule.max_concurrent
        useful = schedule.admission_limit(0, self.request.batch) * self.events.stream.group_size
        return max(schedule.max_concurrent, useful)

    @property
    def cluster(self) -> ClusterSpec:
        """The devices to plan for."""
        return self.request.cluster

    def memory_limit(self, device: int) -> int:
        """Return the bytes of a device that a plan may use."""
        return round((1 - self.margin) * self.cluster.memory_of(device))

    @cached_property
    def host_memory_limits(self) -> tuple[float, ...]:
        """Bytes of host memory that a plan may use on each machine; infinite where they are not known."""
        size, found = self.cluster.devices_per_node, []
        for machine in range(self.cluster.num_nodes):
            kind = self.request.hardware.at(machine * size).device
            per_device = None if kind.type == "cpu" else kind.host_memory_bytes
            found.append(math.inf if per_device is None else (1 - self.margin) * size * per_device)
        return tuple(found)

    def host_memory_limit(self, device: int) -> float:
        """Return the bytes of host memory that a plan may use for a device."""
        return self.host_memory_limits[self.cluster.node_of(device)] / self.cluster.devices_per_node

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return max(workload.prompt + workload.max_response for workload in self.workloads.values())

    def is_free(self, key: str) -> bool:
        """Return whether the planner may set a key of the configuration."""
        return key in self.request.free

    def replica(self, name: str) -> Replica:
        """Return a replica on one device, with its backend."""
        return self.base.replica(name)

    def traits(self, name: str) -> BackendTraits:
        """Return the traits of a replica's backend."""
        return traits(self.replica(name).backend)

    def config(self, name: str) -> ModelConfig:
        """Return the configuration of a replica's model."""
        return self.request.model(self.replica(name).model)

    def structure(self, blocks: Sequence[Sequence[str]]) -> Plan:
        """Return the plan with a group of one device for each block, and a data rank on each device.

        A replica in several blocks is in all of their groups, so that it needs a data rank on each of them,
        which says nothing of the layouts to choose.

        Raises:
            PlanError: if the graph cannot be planned at all.
        """
        groups = {name: (i,) for i, name in enumerate(_group_names(blocks))}
        models: dict[str, ModelConfig] = dict(self.request.models)
        for name in dict.fromkeys(name for block in blocks for name in block):
            own = [group for group, block in zip(groups, blocks, strict=True) if name in block]
            config = models.get(_model(name), ModelConfig())
            models[_model(name)] = with_place(config, name, ",".join(own), f"d{len(own)}")
        cluster = replace(self.cluster, num_nodes=1, devices_per_node=len(blocks), cores=(), parts=())
        hardware = replace(self.request.hardware, others=())
        request = replace(self.request, cluster=cluster, hardware=hardware, groups=groups, models=models)
        return plan_structure(self.graph, request, checks_batch=False)[0]

    @cached_property
    def max_data_ranks(self) -> Mapping[str, int]:
        """Replica -> the most dp ranks that all of its nodes can split their batch over."""
        limits: dict[str, int] = {}
        cuts, batch = dict(self.base.cuts), self.request.batch
        for rule in self.base.rules:
            replicas = self.base.placement(rule.consumer).replicas[:1]
            stream = self.graph.stream(rule.stream)
            if not replicas or not rule.fields or not stream.trained:
                continue
            cut = cuts.get(rule.consumer)
            group = root_stream(self.graph, self.graph.node(rule.consumer)).group
            units = batch // (cut.minibatches if cut else 1) * (1 if rule.by_group else group)
            limits[replicas[0]] = min(limits.get(replicas[0], units), units)
        return limits

    @cached_property
    def tied(self) -> tuple[frozenset[str], ...]:
        """Replicas that need equal layouts on equal devices.

        These are engines of one episode, ends of an update, and those with `base_of`.
        """
        nodes = [node.name for node in self.graph.nodes if node.spec.verb in ("generate", "update")]
        sets = {frozenset(self.base.placement(name).replicas) for name in nodes}
        for replica in self.base.replicas:
            if replica.base_of and self.request.model(replica.model).base_of is not None:
                pair = frozenset((replica.name, replica.base_of))
                if replica.role != "gen" or len({self.layouts.get(name) for name in pair}) == 1:
                    sets.add(pair)
        return tuple(sorted((names for names in sets if len(names) > 1), key=sorted))

    @cached_property
    def written(self) -> frozenset[str]:
        """Models whose weights change in the run."""
        return written_models(self.graph)

    def _check_layouts(self) -> None:
        """Raise where a layout that the user has set needs too many devices, or cannot divide its model."""
        for name, layout in self.layouts.items():
            own = [group.devices or () for group in self.fixed if name in group.replicas]
            anywhere = (self.free_devices, *(group.devices or () for group in self.fixed))
            devices = tuple(chain(*own)) if all(own) and own else tuple(chain(*anywhere))
            check_size(name, layout, DeviceGroup(placement_name(name), devices))
        check_layouts(
            [replace(self.replica(name), layout=layout) for name, layout in self.layouts.items()],
            self.request,
        )

    def _placed_groups(self, graph: Graph, request: PlanRequest) -> Iterator[FixedGroup]:
        """Yield the groups that the placement names, and keep the layouts in it."""
        placed = {
            model + GEN_SUFFIX * (role == "gen"): f"{model}@{role}" for model, role in replica_roles(graph)
        }
        items, devices = placed_devices(request, list(placed))
        for name, item in items.items():
            if item.layout is not None:
                layout = self.layouts[placed[name]] = Layout.parse(item.layout)
                check_size(placed[name], layout, DeviceGroup(name, devices[name]))
        for members in device_sets(devices, request.cluster).values():
            names = (placed[name] for name in items if not set(members).isdisjoint(devices[name]))
            yield FixedGroup(members, tuple(names))

    def _given_groups(self, plan: Plan) -> Iterator[FixedGroup]:
        """Yield the groups of a request whose placement is not free, and keep their names."""
        self.given_places = {replica.name: ",".join(replica.groups) for replica in plan.replicas}
        for group in plan.groups:
            names = tuple(r.name for r in plan.replicas if group.name in r.groups)
            if names:
                self.given_groups[group.name] = group.devices
                yield FixedGroup(group.devices, names)


def _configured_groups(graph: Graph, request: PlanRequest) -> Iterator[FixedGroup]:
    """Yield the groups that models name, with their devices where the request has any.

    Raises:
        PlanError: for groups that contradict each other, the cluster or the models.
    """
    named: dict[str, list[str]] = {}
    roles = replica_roles(graph)
    for model, role in roles:
        config = request.model(model)
        group, key = config.group, f"models.{model}.group"
        if role == "gen" and (config.gen.group is not None or len([m for m, _ in roles if m == model]) > 1):
            group, key = config.gen.group, f"models.{model}.gen.group"
        for name in () if group is None else named_groups(key, group):
            named.setdefault(name, []).append(f"{model}@{role}")
    if not request.groups:
        if len(named) > request.cluster.num_devices:
            raise PlanError(
                f"models name {len(named)} device groups ({', '.join(named)}), but cluster "
                f"{request.cluster.name} has {request.cluster.num_devices} devices; name fewer groups"
            )
        yield from (FixedGroup(None, tuple(names)) for names in named.values())
        return
    for group in request.groups:
        if group not in named:
            raise PlanError(
                f"groups.{group} has devices, but no model is in it; set models.{roles[0][0]}.group={group}, "
                "or remove it"
            )
    groups = device_groups(request.cluster, request.groups, dict.fromkeys(named))
    yield from (FixedGroup(groups[name].devices, tuple(names)) for name, names in named.items())


def _merged(groups: Iterable[FixedGroup]) -> tuple[FixedGroup, ...]:
    """Merge groups with the same replicas: the merged group has the devices of both."""
    devices: dict[tuple[str, ...], Devices | None] = {}
    for group in groups:
        before = devices.get(group.replicas)
        both = None if before is None or group.devices is None else tuple(sorted(before + group.devices))
        devices[group.replicas] = both or group.devices
    return tuple(FixedGroup(own, replicas) for replicas, own in devices.items())


def with_place(config: ModelConfig, replica: str, group: str, layout: str) -> ModelConfig:
    """Return a model's configuration with the group and layout of one of its replicas."""
    if replica.endswith("@gen"):
        return replace(config, gen=replace(config.gen, group=group, layout=layout))
    return replace(config, group=group, layout=layout)


def _group_names(blocks: Sequence[Sequence[str]]) -> list[str]:
    """Return a name for each group of replicas: its first one that is in no other group, else all of them."""
    num_blocks = Counter(name for block in blocks for name in block)
    own = [next((name for name in block if num_blocks[name] == 1), None) for block in blocks]
    return [
        "+".join(map(placement_name, block)) if name is None else placement_name(name)
        for name, block in zip(own, blocks, strict=True)
    ]


def _without_placement(request: PlanRequest) -> PlanRequest:
    """Return the request without devices; layouts that the user has set stay."""
    models = {
        name: replace(config, group=None, gen=replace(config.gen, group=None))
        for name, config in request.models.items()
    }
    return replace(request, placement=None, groups={}, models=models)


def _model(replica: str) -> str:
    return replica.partition("@")[0]


def check_known(problem: SearchProblem) -> None:
    """Raise where replicas cannot be placed, as the sizes of a model are unknown.

    Raises:
        PlanError: naming the model.
    """
    unknown = [r.model for r in problem.base.replicas if r.model not in problem.request.shapes]
    if not problem.is_free(PLACEMENT):
        return
    if unknown:
        raise PlanError(
            f"placement=auto needs the sizes of {unknown[0]!r}, which are unknown. Set "
            f"models.{unknown[0]}.path to a checkpoint, or model@models.{unknown[0]} to one of configs/model."
        )
