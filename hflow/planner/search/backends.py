"""The training backends that a search may choose for models whose backend is not set."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from hflow.config.schema import ModelConfig
from hflow.graph.ir import Graph
from hflow.planner.checks.unrunnable import runs_family
from hflow.planner.make.replicas import replica_roles
from hflow.planner.models.choices import layer_choice
from hflow.planner.plan.request import PlanRequest
from hflow.planner.plan.rows import LayerChoice, Replica
from hflow.planner.plan.traits import BACKENDS, traits
from hflow.planner.search.result import MIN_GAIN, NUM_CANDIDATES, SearchResult
from hflow.shapes.layout import Layout
from hflow.types.kernels import LayerKernels


@dataclass(frozen=True)
class BackendTrial:
    """A backend in the place of the configured one."""

    name: str
    configured: str
    settings: Mapping[str, str]
    """The settings that choose it."""
    objection: str | None = None
    """Why it is not tried."""


def backend_trials(graph: Graph, request: PlanRequest) -> Iterator[BackendTrial]:
    """Yield the backends that models with a free backend could have in place of the configured one.

    All of these models get the same one, so that those that start with equal weights compute alike.
    """
    models = [model for model, role in replica_roles(graph) if role != "gen"]
    models = [model for model in models if f"models.{model}.backend" in request.free]
    configured = {request.model(model).backend for model in models}
    for name in BACKENDS if models else ():
        if name not in configured:
            settings = {f"models.{model}.backend": name for model in models}
            problems = (_problem(name, model, request) for model in models)
            objection = request.backend_problems.get(name) or next(filter(None, problems), None)
            yield BackendTrial(name, " and ".join(sorted(configured)), settings, objection)


def _problem(backend: str, model: str, request: PlanRequest) -> str | None:
    """Return the reason why a backend cannot train or infer a model as it is configured; None if it can."""
    config, shape, own = request.model(model), request.shapes.get(model), traits(backend)
    if shape is None or not runs_family(backend, shape):
        return f"{backend} does not have the family of {model}"
    has_stage = config.zero_stage != ModelConfig().zero_stage
    has_sets = config.layout is not None and Layout.parse(config.layout).replicate > 1
    if (has_stage or has_sets) and not own.shards_weights:
        return f"{backend} does not shard the weights of {model}"
    choice = layers_with(backend, model, request)
    if choice is not None and choice.kernels is not LayerKernels.TRANSFORMER_ENGINE:
        return f"the seconds of {backend} are known with Transformer Engine alone; {choice.why}"
    return None


def layers_with(backend: str, model: str, request: PlanRequest) -> LayerChoice | None:
    """Return the kernels with which a backend would compute a model; None if it has no choice."""
    if not traits(backend).chooses_kernels:
        return None
    return layer_choice(Replica(f"{model}@train", model, "train", backend, Layout(), (), (), ()), request)


def is_better(other: SearchResult, found: SearchResult | None) -> bool:
    """Return whether a plan with another backend is clearly faster, and runs where the first one does."""
    if found is None:
        return True
    return other.seconds < found.seconds * (1 - MIN_GAIN) and other.num_reasons <= found.num_reasons


def with_backend(trial: BackendTrial, other: SearchResult, found: SearchResult | None) -> SearchResult:
    """Return the plan with another backend, compared with what was found without it."""
    rows = [
        replace(row, settings=tuple(sorted({**dict(row.settings), **trial.settings}.items())))
        for row in other.candidates
    ]
    why = f"{trial.name}: with {trial.configured} no plan fits"
    if found is not None:
        why = f"{trial.name}: a step takes {_percent(1 - other.seconds / found.seconds)} less than with "
        why += trial.configured
        for row in found.candidates:
            slower = f"+{_percent(row.seconds / other.seconds - 1)}"
            division = row.why.partition(": ")[0]
            rows.append(replace(row, why=f"{division} with {trial.configured}: {slower}"))
    rows = [rows[0], *sorted(rows[1:], key=lambda row: row.seconds)][:NUM_CANDIDATES]
    return replace(
        other, overrides={**other.overrides, **trial.settings}, candidates=tuple(rows), backend=why
    )


def kept_backend(trials: Sequence[BackendTrial]) -> str:
    """Return the configured backend of models that leave it open, with the reason; empty without any."""
    reasons = [
        trial.objection or f"with {trial.name} a step is not {_percent(MIN_GAIN)} shorter" for trial in trials
    ]
    return f"{trials[0].configured}: {'; '.join(reasons)}" if trials else ""


def _percent(share: float) -> str:
    return f"{share:.0%}".replace("%", " %")
