"""`choose_engines`: the engine of each generation replica whose configuration names none."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from hflow.planner.descriptors import EngineKind, ServedModel, engine_kind
from hflow.planner.ir import EngineChoice, Replica
from hflow.planner.request import PlanRequest
from hflow.planner.traits import ENGINES

UNDECIDED = ""
"""The backend of a generation replica whose engine is not chosen yet."""


def choose_engines(
    replicas: Iterable[Replica], request: PlanRequest
) -> tuple[tuple[Replica, ...], tuple[EngineChoice, ...]]:
    """Give every generation replica its engine.

    The configuration decides, then the plan file that is executed again. Otherwise it is the first engine
    that prefers the cluster's devices, is installed and can serve the model, else the default engine.

    Args:
        replicas: with devices and layouts; undecided ones have the backend `UNDECIDED`.
        request: the configuration of models, and what this machine cannot run.

    Returns:
        The replicas with their engines, and the reasons in the same order.
    """
    chosen, choices = [], []
    for replica in replicas:
        if replica.role == "gen":
            choice = _choice(replica, request)
            replica = replace(replica, backend=choice.engine)
            remark = engine_kind(choice.engine).remark(served_model(replica, request))
            choices.append(choice if remark is None else replace(choice, why=f"{choice.why}; {remark}"))
        chosen.append(replica)
    return tuple(chosen), tuple(choices)


def served_model(replica: Replica, request: PlanRequest) -> ServedModel:
    """Return what the engine of a replica has to serve."""
    name = replica.model
    return ServedModel(
        replica, request.model(name), request.cluster, request.shapes.get(name), request.families.get(name)
    )


def _choice(replica: Replica, request: PlanRequest) -> EngineChoice:
    if replica.backend != UNDECIDED:
        return EngineChoice(replica.name, replica.backend, "as configured")
    if replica.model in request.engines:
        return EngineChoice(replica.name, request.engines[replica.model], "as in the plan file")
    device = request.cluster.device
    preferred = [kind for kind in map(engine_kind, ENGINES) if device in kind.preferred_on]
    objections = {kind.name: _objection(kind, replica, request) for kind in preferred}
    for name, objection in objections.items():
        if objection is None:
            return EngineChoice(replica.name, name, f"installed, {device.upper()}")
    why = next((objection for objection in objections.values() if objection), f"the cluster is {device}")
    return EngineChoice(replica.name, ENGINES[0], why)


def _objection(kind: EngineKind, replica: Replica, request: PlanRequest) -> str | None:
    """Return why an engine cannot be the default of a replica."""
    return next(_objections(kind, replica, request), None)


def _objections(kind: EngineKind, replica: Replica, request: PlanRequest) -> Iterator[str]:
    if kind.name in request.engine_problems:
        yield request.engine_problems[kind.name]
    yield from kind.check(served_model(replace(replica, backend=kind.name), request))
