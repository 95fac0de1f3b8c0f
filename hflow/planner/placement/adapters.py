"""The replicas that train adapters, and those that use the same weights without them in place of a copy."""

from __future__ import annotations

from dataclasses import replace

from hflow.graph.ir import Graph
from hflow.graph.model import Model
from hflow.planner.graph_queries import written_models
from hflow.planner.ir import Replica
from hflow.planner.model_shape import num_parameters
from hflow.planner.request import PlanRequest


def with_adapters(graph: Graph, replicas: tuple[Replica, ...], request: PlanRequest) -> tuple[Replica, ...]:
    """Return the replicas, with what trainers have in adapters, and the frozen replicas that share weights.

    A frozen model that starts as a trained one is the trained model without its adapters. It needs no copy
    if its replica has the backend, layout, workers and precision of the trainer.
    """
    models = {model.name: model for model in graph.models}
    trainers = {r.model: r for r in replicas if r.role == "train" and request.model(r.model).lora}
    written = written_models(graph)
    changed = []
    for replica in replicas:
        model = models[replica.model]
        trainer = trainers.get(_origin(model, request))
        if replica in trainers.values():
            shape = request.trained_shape(replica.model)
            changed.append(replace(replica, adapter_parameters=num_parameters(shape) if shape else 0))
        elif trainer is not None and model.name not in written and _are_alike(replica, trainer, request):
            has_same_head = model.head == models[trainer.model].head
            changed.append(replace(replica, base_of=trainer.name if has_same_head else ""))
        else:
            changed.append(replica)
    return tuple(changed)


def _are_alike(replica: Replica, trainer: Replica, request: PlanRequest) -> bool:
    """Return whether a replica without adapters computes as the trainer does without its own."""
    settings = [
        (r.backend, r.layout, r.workers, request.model(r.model).compute_dtype) for r in (replica, trainer)
    ]
    return replica.role == "infer" and settings[0] == settings[1]


def _origin(model: Model, request: PlanRequest) -> str:
    """Return the model whose weights a model starts from, because nothing else is configured for it."""
    config = request.model(model.name)
    if model.init_from is None:
        return ""
    source = request.model(model.init_from.name)
    is_own = config.path is not None or config.architecture is not None
    same = (config.path, config.architecture) == (source.path, source.architecture)
    return model.init_from.name if same or not is_own else ""
