"""Refusal of plans that do not fit into memory, with the smallest change that makes them fit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from hflow.config.schema import ModelConfig
from hflow.errors import PlanError
from hflow.planner.backends import traits
from hflow.planner.forecast import PhaseMemory
from hflow.planner.hardware import GIB
from hflow.planner.ir import Plan, Replica
from hflow.planner.layout import Layout
from hflow.planner.memory.phases import memory_phases
from hflow.planner.memory.with_layouts import MAX_TENSOR_RANKS, devices_of, with_layouts
from hflow.planner.request import PlanRequest
from hflow.planner.stream_workloads import stream_workloads

MAX_DEVICES = 4096
"""Largest group to suggest."""


def check_memory(plan: Plan, request: PlanRequest, phases: Sequence[PhaseMemory]) -> None:
    """Refuse a plan that needs more memory than its devices have.

    Args:
        plan: what was compiled.
        request: what it was compiled from.
        phases: what `memory_phases` returns for both.

    Raises:
        PlanError: naming the phase that needs most, its largest item, and a change after which all fits.
    """
    largest = max(phases, key=lambda phase: phase.total, default=None)
    capacity = plan.cluster.memory_bytes
    if largest is None or largest.total <= capacity:
        return
    name, size, _ = max((*largest.resident, *largest.transient), key=lambda item: item.num_bytes)
    raise PlanError(
        f"{largest.phase} needs {_gib(largest.total)} per device but only {_gib(capacity)} is available on "
        f"{_device_range(largest.devices)}. Most of it is for {name} ({_gib(size)}). "
        f"{_advice(plan, request, phases)}"
    )


def _advice(plan: Plan, request: PlanRequest, phases: Sequence[PhaseMemory]) -> str:
    """Return the first suggestion after which every phase fits; else the best that was tried."""
    capacity = plan.cluster.memory_bytes
    overfull = [phase for phase in phases if phase.total > capacity]
    tried: list[tuple[Suggestion, PhaseMemory]] = []
    suggestions = chain(_on_same_devices(plan, request, overfull), _on_more_devices(plan, request, overfull))
    for suggestion in suggestions:
        peak = max(memory_phases(suggestion.plan, suggestion.request), key=lambda phase: phase.total)
        if peak.total <= capacity:
            return f"{suggestion.text[0].upper()}{suggestion.text[1:]} ({_gib(peak.total)})."
        tried.append((suggestion, peak))
    if not tried:
        return "Use larger devices or a smaller model."
    best, peak = min(tried, key=lambda pair: pair[1].total)
    return (
        f"No single change is enough: if you {best.text}, {peak.phase} still needs {_gib(peak.total)}. Use "
        "larger devices or a smaller model."
    )


@dataclass(frozen=True)
class Suggestion:
    """A change of a plan that may make it fit."""

    text: str
    """The change as an imperative clause, such as `set models.actor.dtype=bf16`."""
    plan: Plan
    request: PlanRequest


def _on_same_devices(
    plan: Plan, request: PlanRequest, overfull: Sequence[PhaseMemory]
) -> Iterator[Suggestion]:
    """Yield changes that need no more devices, of each model in turn and then of all.

    Smaller micro-batches and recomputation come first, as they change no result. Then fewer sequences at
    once, other layouts, and bf16.
    """
    running = _running_replicas(plan, overfull)
    engines, trained = _models(running, "gen"), _models(running, "train")
    fewer_tokens = _fewer_tokens(plan, request)
    batched = [*trained, *_models(running, "infer")]
    yield from _settings(plan, request, batched, "tokens_per_microbatch", fewer_tokens)
    yield from _settings(plan, request, trained, "activation_checkpointing", _recompute)
    for suggestion in _settings(plan, request, trained, "activation_checkpointing", _recompute):
        for other in _settings(plan, suggestion.request, trained, "tokens_per_microbatch", fewer_tokens):
            yield replace(other, text=f"{suggestion.text} {other.text.removeprefix('set ')}")
    yield from _settings(plan, request, engines, "gen.max_running", _fewer_sequences)
    groups = {phase.group for phase in overfull}
    in_groups = [replica for replica in plan.replicas if replica.group in groups]
    for replica in in_groups:
        yield from _other_layouts(plan, request, replica)
    yield from _wider_layouts(plan, request, in_groups)
    yield from _settings(plan, request, _models(in_groups), "dtype", _narrower_dtype)


def _on_more_devices(
    plan: Plan, request: PlanRequest, overfull: Sequence[PhaseMemory]
) -> Iterator[Suggestion]:
    """Yield two, four ... times the devices of the group that needs most, with its replicas grown."""
    group = max(overfull, key=lambda phase: phase.total).group
    replicas = [replica for replica in plan.replicas if replica.group == group]
    num_devices = len(devices_of(plan, group))
    factor = 2
    while num_devices * factor <= MAX_DEVICES:
        for grown in (_more_data_ranks, _more_shards):
            layouts = [grown(replica, factor) for replica in replicas]
            changed = with_layouts(plan, request, replicas, layouts, num_devices * factor)
            if changed is not None:
                names = ", ".join(f"{r.name} as {to}" for r, to in zip(replicas, layouts, strict=True))
                yield Suggestion(f"use a group of {num_devices * factor} devices ({names})", changed, request)
        factor *= 2


def _running_replicas(plan: Plan, phases: Iterable[PhaseMemory]) -> list[Replica]:
    """Return the replicas that run in these phases: those of nodes, and engines of groups that generate."""
    placed = {placement.node: placement.replicas[:1] for placement in plan.placements}
    of_nodes = {name for phase in phases for name in placed.get(phase.phase, ())}
    generating = {phase.group for phase in phases if phase.phase not in placed}
    return [r for r in plan.replicas if r.name in of_nodes or (r.role == "gen" and r.group in generating)]


def _models(replicas: Iterable[Replica], *roles: str) -> list[str]:
    """Return the models with a replica of one of these roles; without roles, of any."""
    return list(dict.fromkeys(r.model for r in replicas if not roles or r.role in roles))


Values = Callable[[ModelConfig], Sequence[Any]]
"""Return the values of a setting to try for a model, the smallest change first."""


def _settings(
    plan: Plan, request: PlanRequest, models: Sequence[str], setting: str, values: Values
) -> Iterator[Suggestion]:
    """Yield changes of one setting, of each model and then of all of them together."""
    together = [tuple(models)] if len(models) > 1 else []
    for names in [*((name,) for name in models), *together]:
        candidates = [value for name in names for value in values(request.model(name))]
        for value in dict.fromkeys(candidates):
            changed = {name: _with(request.model(name), setting, value) for name in names}
            overrides = " ".join(f"models.{name}.{setting}={str(value).lower()}" for name in names)
            yield Suggestion(f"set {overrides}", plan, replace(request, models={**request.models, **changed}))


def _with(model: ModelConfig, key: str, value: Any) -> ModelConfig:
    """Return the model's configuration with one key changed."""
    if key.startswith("gen."):
        return replace(model, gen=replace(model.gen, **{key.removeprefix("gen."): value}))
    return replace(model, **{key: value})


def _fewer_sequences(model: ModelConfig) -> list[int]:
    return _halves(model.gen.max_running, 1)


def _fewer_tokens(plan: Plan, request: PlanRequest) -> Values:
    """Return values that halve the tokens of a micro-batch, down to the longest sequence."""
    longest = max(workload.prompt + workload.max_response for _, workload in stream_workloads(plan, request))
    return lambda model: _halves(model.tokens_per_microbatch, longest)


def _halves(number: int, minimum: int) -> list[int]:
    """Return half of a number, a quarter and so on, and the minimum."""
    values = []
    while number // 2 > minimum:
        number //= 2
        values.append(number)
    return [*values, minimum] if number > minimum else []


def _recompute(model: ModelConfig) -> list[bool]:
    return [] if model.activation_checkpointing else [True]


def _narrower_dtype(model: ModelConfig) -> list[str]:
    return ["bf16"] if model.compute_dtype == "fp32" else []


def _other_layouts(plan: Plan, request: PlanRequest, replica: Replica) -> Iterator[Suggestion]:
    """Yield other layouts on the devices of a replica's group: more data ranks, tensor ranks or stages."""
    num_devices, layout = len(devices_of(plan, replica.group)), replica.layout
    layouts = [Layout(num_devices // (layout.tensor * layout.pipe), layout.tensor, layout.pipe)]
    if traits(replica.backend).is_model_parallel:
        factors = [f for f in (2, 4, 8, 16, 32, 64) if layout.data % f == 0]
        layouts += [Layout(layout.data // f, layout.tensor * f, layout.pipe) for f in factors]
        if traits(replica.backend).has_pipeline_axis:
            layouts += [Layout(layout.data // f, layout.tensor, layout.pipe * f) for f in factors]
    for other in layouts:
        if other != layout and other.tensor <= MAX_TENSOR_RANKS:
            changed = with_layouts(plan, request, [replica], [other], num_devices)
            if changed is not None:
                yield Suggestion(f"use layout {other} for {replica.name}", changed, request)


def _wider_layouts(plan: Plan, request: PlanRequest, replicas: Sequence[Replica]) -> Iterator[Suggestion]:
    """Yield a plan in which all replicas that leave devices of their group unused have more data ranks."""
    changed: Plan | None = plan
    texts = []
    for replica in replicas:
        layout, num_devices = replica.layout, len(devices_of(plan, replica.group))
        wider = replace(layout, data=num_devices // (layout.tensor * layout.pipe))
        if wider != layout and changed is not None:
            changed = with_layouts(changed, request, [replica], [wider], num_devices)
            texts.append(f"{wider} for {replica.name}")
    if changed is not None and len(texts) > 1:
        yield Suggestion(f"use layouts {', '.join(texts)}", changed, request)


def _more_data_ranks(replica: Replica, factor: int) -> Layout:
    return replace(replica.layout, data=replica.layout.data * factor)


def _more_shards(replica: Replica, factor: int) -> Layout:
    """Return more tensor ranks up to those of a machine, then more stages, where the backend has them."""
    layout = replica.layout
    if not traits(replica.backend).is_model_parallel:
        return _more_data_ranks(replica, factor)
    tensor = min(layout.tensor * factor, max(MAX_TENSOR_RANKS, layout.tensor))
    rest = layout.tensor * factor // tensor
    if traits(replica.backend).has_pipeline_axis:
        return replace(layout, tensor=tensor, pipe=layout.pipe * rest)
    return replace(layout, data=layout.data * rest, tensor=tensor)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB"


def _device_range(devices: tuple[int, ...]) -> str:
    """Return `device 3`, `devices 0-7`, or `4 devices from 1 to 7`."""
    first, last = devices[0], devices[-1]
    if len(devices) == 1:
        return f"device {first}"
    if last - first == len(devices) - 1:
        return f"devices {first}-{last}"
    return f"{len(devices)} devices from {first} to {last}"
