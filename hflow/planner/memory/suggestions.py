"""A plan that does not fit is refused, with the phase, the bytes and the nearest change that works."""

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
from hflow.planner.memory.context import MOST_TENSOR_RANKS, devices_of, with_layouts
from hflow.planner.memory.phases import memory_phases
from hflow.planner.request import PlanRequest
from hflow.planner.stream_workloads import stream_workloads

# -------------------- Changes that may make a plan fit, the mildest first; whether one does is found by
# trying it.
# First come smaller micro-batches and recomputation, which change no result; then fewer sequences at once,
# another layout on the same devices, bf16, and more devices.


MOST_DEVICES = 4096


@dataclass(frozen=True)
class Suggestion:
    """A changed plan, and the change in words that a user can type."""

    text: str
    plan: Plan
    request: PlanRequest


def remedies(plan: Plan, request: PlanRequest, over: Sequence[PhaseMemory]) -> Iterator[Suggestion]:
    """Changes on the devices at hand: of each model that runs where too much is needed, then of all."""
    used = _used(plan, over)
    engines, trained = _models(used, "gen"), _models(used, "train")
    tokens = _fewer_tokens(plan, request)
    batched = [*trained, *_models(used, "infer")]
    yield from _settings(plan, request, batched, "tokens_per_microbatch", tokens)
    yield from _settings(plan, request, trained, "activation_checkpointing", _recomputing)
    for remedy in _settings(plan, request, trained, "activation_checkpointing", _recomputing):
        yield from _and(remedy, _settings(plan, remedy.request, trained, "tokens_per_microbatch", tokens))
    yield from _settings(plan, request, engines, "gen.max_running", _fewer_sequences)
    groups = {phase.group for phase in over}
    there = [replica for replica in plan.replicas if replica.group in groups]
    for replica in there:
        yield from _layouts(plan, request, replica)
    yield from _all_devices(plan, request, there)
    yield from _settings(plan, request, _models(there), "dtype", _narrower)


def more_devices(plan: Plan, request: PlanRequest, over: Sequence[PhaseMemory]) -> Iterator[Suggestion]:
    """Twice, four times ... the devices of the group that needs most, its replicas growing by one axis."""
    name = max(over, key=lambda phase: phase.total).group
    replicas = [replica for replica in plan.replicas if replica.group == name]
    num_devices = len(devices_of(plan, name))
    factor = 2
    while num_devices * factor <= MOST_DEVICES:
        for grown in (_more_data, _more_cuts):
            layouts = [grown(replica, factor) for replica in replicas]
            changed = with_layouts(plan, request, replicas, layouts, num_devices * factor)
            if changed is not None:
                names = ", ".join(f"{r.name} as {to}" for r, to in zip(replicas, layouts, strict=True))
                yield Suggestion(f"a group of {num_devices * factor} devices ({names})", changed, request)
        factor *= 2


def _used(plan: Plan, over: Iterable[PhaseMemory]) -> list[Replica]:
    """Replicas that run in these phases: those of nodes, and the engines of groups that generate."""
    placed = {placement.node: placement.replicas[:1] for placement in plan.placements}
    nodes = {name for phase in over for name in placed.get(phase.phase, ())}
    generating = {phase.group for phase in over if phase.phase not in placed}
    return [r for r in plan.replicas if r.name in nodes or (r.role == "gen" and r.group in generating)]


def _models(replicas: Iterable[Replica], *roles: str) -> list[str]:
    """Models with a replica of one of these roles; of any, without roles."""
    return list(dict.fromkeys(r.model for r in replicas if not roles or r.role in roles))


Values = Callable[[ModelConfig], Sequence[Any]]
"""From what is asked for a model to values of one setting, the mildest first."""


def _settings(
    plan: Plan, request: PlanRequest, models: Sequence[str], setting: str, values: Values
) -> Iterator[Suggestion]:
    """One setting of each model, then of all of them together."""
    together = [tuple(models)] if len(models) > 1 else []
    for names in [*((name,) for name in models), *together]:
        tried = [value for name in names for value in values(request.model(name))]
        for value in dict.fromkeys(tried):
            changed = {name: _with(request.model(name), setting, value) for name in names}
            text = " ".join(f"models.{name}.{setting}={str(value).lower()}" for name in names)
            yield Suggestion(text, plan, replace(request, models={**request.models, **changed}))


def _with(model: ModelConfig, key: str, value: Any) -> ModelConfig:
    """Return the model's configuration with one key changed."""
    if key.startswith("gen."):
        return replace(model, gen=replace(model.gen, **{key.removeprefix("gen."): value}))
    return replace(model, **{key: value})


def _and(first: Suggestion, others: Iterable[Suggestion]) -> Iterator[Suggestion]:
    """Each of the others on top of the first."""
    for other in others:
        yield Suggestion(f"{first.text} {other.text}", other.plan, other.request)


def _fewer_tokens(plan: Plan, request: PlanRequest) -> Values:
    """Half the tokens of a micro-batch and so on, down to the longest sequence."""
    longest = max(lengths.prompt + lengths.max_response for _, lengths in stream_workloads(plan, request))
    return lambda asked: _halves(asked.tokens_per_microbatch, longest)


def _fewer_sequences(asked: ModelConfig) -> list[int]:
    return _halves(asked.gen.max_running, 1)


def _halves(number: int, least: int) -> list[int]:
    """Half of it, a quarter, ... and the least."""
    found = []
    while number // 2 > least:
        number //= 2
        found.append(number)
    return [*found, least] if number > least else []


def _recomputing(asked: ModelConfig) -> list[bool]:
    return [] if asked.activation_checkpointing else [True]


def _narrower(asked: ModelConfig) -> list[str]:
    return ["bf16"] if asked.compute_dtype == "fp32" else []


def _layouts(plan: Plan, request: PlanRequest, replica: Replica) -> Iterator[Suggestion]:
    """Other layouts of a replica on its group's devices: more data ranks, tensor ranks or stages."""
    num_devices, layout = len(devices_of(plan, replica.group)), replica.layout
    found = [Layout(num_devices // (layout.tensor * layout.pipe), layout.tensor, layout.pipe)]
    if traits(replica.backend).is_model_parallel:
        factors = [f for f in (2, 4, 8, 16, 32, 64) if layout.data % f == 0]
        found += [Layout(layout.data // f, layout.tensor * f, layout.pipe) for f in factors]
        found += [Layout(layout.data // f, layout.tensor, layout.pipe * f) for f in factors]
    for other in found:
        if other != layout and other.tensor <= MOST_TENSOR_RANKS:
            changed = with_layouts(plan, request, [replica], [other], num_devices)
            if changed is not None:
                yield Suggestion(f"{replica.name} as {other}", changed, request)


def _all_devices(plan: Plan, request: PlanRequest, replicas: Sequence[Replica]) -> Iterator[Suggestion]:
    """Data ranks on all devices of its group for every replica that leaves some out."""
    changed: Plan | None = plan
    texts = []
    for replica in replicas:
        layout, at_hand = replica.layout, len(devices_of(plan, replica.group))
        wider = replace(layout, data=at_hand // (layout.tensor * layout.pipe))
        if wider != layout and changed is not None:
            changed = with_layouts(changed, request, [replica], [wider], at_hand)
            texts.append(f"{replica.name} as {wider}")
    if changed is not None and len(texts) > 1:
        yield Suggestion(", ".join(texts), changed, request)


def _more_data(replica: Replica, factor: int) -> Layout:
    return replace(replica.layout, data=replica.layout.data * factor)


def _more_cuts(replica: Replica, factor: int) -> Layout:
    """More tensor ranks up to a machine's, then more stages, where the backend can."""
    layout = replica.layout
    if not traits(replica.backend).is_model_parallel:
        return _more_data(replica, factor)
    tensor = min(layout.tensor * factor, max(MOST_TENSOR_RANKS, layout.tensor))
    return replace(layout, tensor=tensor, pipe=layout.pipe * layout.tensor * factor // tensor)


def check_memory(plan: Plan, request: PlanRequest, phases: Sequence[PhaseMemory]) -> None:
    """Refuse a plan whose devices would need more memory than they have.

    Args:
        plan: what was compiled.
        request: what it was compiled from; the advice is a change of it.
        phases: what `memory_phases` made of the two.

    Raises:
        PlanError: naming the phase that needs most, its largest item, and a change after which all fits.
    """
    worst = max(phases, key=lambda phase: phase.total, default=None)
    capacity = plan.cluster.memory_bytes
    if worst is None or worst.total <= capacity:
        return
    name, size = max((*worst.resident, *worst.transient), key=lambda item: item[1])
    raise PlanError(
        f"{worst.phase} needs {_gib(worst.total)} on {_devices(worst.devices)}, which has {_gib(capacity)}; "
        f"most of it is for {name} ({_gib(size)}); {_advice(plan, request, phases)}"
    )


def _advice(plan: Plan, request: PlanRequest, phases: Sequence[PhaseMemory]) -> str:
    """The mildest change after which every phase fits, found by trying; else what stands in the way."""
    capacity = plan.cluster.memory_bytes
    over = [phase for phase in phases if phase.total > capacity]
    tried: list[tuple[Suggestion, PhaseMemory]] = []
    for remedy in chain(remedies(plan, request, over), more_devices(plan, request, over)):
        peak = max(memory_phases(remedy.plan, remedy.request), key=lambda phase: phase.total)
        if peak.total <= capacity:
            return f"{remedy.text} fits ({_gib(peak.total)})"
        tried.append((remedy, peak))
    if not tried:
        return "take larger devices or a smaller model"
    best, peak = min(tried, key=lambda pair: pair[1].total)
    return (
        f"no single change fits: even with {best.text} {peak.phase} needs {_gib(peak.total)}; take larger "
        f"devices or a smaller model"
    )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB"


def _devices(devices: tuple[int, ...]) -> str:
    """`device 3`, `each of devices 0-7`, or `each of 4 devices from 1 to 7`."""
    first, last = devices[0], devices[-1]
    if len(devices) == 1:
        return f"device {first}"
    if last - first == len(devices) - 1:
        return f"each of devices {first}-{last}"
    return f"each of {len(devices)} devices from {first} to {last}"
