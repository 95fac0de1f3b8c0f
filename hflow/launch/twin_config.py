"""The two configurations that a twin compares: one process that does everything, and a divided run."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from hflow.config import ModelConfig, RunConfig
from hflow.graph.ir import Graph, Level
from hflow.plan.cluster import device_of
from hflow.plan.layout import Layout


def common(config: RunConfig, graph: Graph, steps: int, out: str) -> RunConfig:
    """What both runs have: fp32, synchronous, every model trained from the first step on, no evaluation.

    Args:
        config: of the recipe.
        graph: of the recipe.
        steps: training steps.
        out: directory of results.
    """
    return dataclasses.replace(
        config,
        steps=steps,
        out=out,
        schedule=dataclasses.replace(config.schedule, max_staleness=0, sync_every=1),
        save_every=0,
        models={spec.name: _comparable(config, spec.name) for spec in graph.models},
        nodes=_nodes(config, graph, steps),
    )


def alone(config: RunConfig) -> RunConfig:
    """The reference: one process, one device, the torch backend; it saves every step."""
    return _placed(config, 1, "torch", None, workers="inproc", save_every=1)


def divided(config: RunConfig, layout: Layout) -> RunConfig:
    """Every model on megatron in this layout, on as many Ray workers; engines on all of them."""
    return _placed(config, layout.world, "megatron", layout, workers="ray")


def changes(graph: Graph, config: RunConfig) -> Iterator[str]:
    """What `common` changes that a reader might miss, in words."""
    for node in graph.nodes:
        if node.spec.verb == "train" and node.spec.after:
            yield f"{node.name} trains from the first step on (after={node.spec.after})"
    if config.schedule.max_staleness:
        yield f"generation and training take turns (max_staleness={config.schedule.max_staleness})"
    for name, model in config.models.items():
        if model.dtype not in (None, "fp32"):
            yield f"{name} computes in fp32 (dtype={model.dtype})"


def _comparable(config: RunConfig, name: str) -> ModelConfig:
    model = config.models.get(name, ModelConfig())
    return dataclasses.replace(model, dtype="fp32", gen=dataclasses.replace(model.gen, engine="embedded"))


def _nodes(config: RunConfig, graph: Graph, steps: int) -> Mapping[str, Mapping[str, Any]]:
    """Training starts at once, and evaluations never."""
    nodes = {name: dict(values) for name, values in config.nodes.items()}
    for node in graph.nodes:
        stream = graph.stream(node.stream)
        if node.spec.opens_stream and stream.parent is None and not stream.trained:
            nodes.setdefault(node.name, {})["after"] = steps + 1
        elif node.spec.verb == "train" and node.spec.level is Level.BATCH:
            nodes.setdefault(node.name, {})["after"] = 0
    return nodes


def _placed(config: RunConfig, world: int, backend: Any, layout: Layout | None, **changes: Any) -> RunConfig:
    def placed(model: ModelConfig) -> ModelConfig:
        gen = dataclasses.replace(model.gen, layout=f"d{world}", group=None)
        named = None if layout is None else str(layout)
        return dataclasses.replace(model, backend=backend, layout=named, group=None, gen=gen)

    return dataclasses.replace(
        config,
        cluster=f"{device_of(config.cluster)}-1x{world}",
        placement=None,
        groups={},
        models={name: placed(model) for name, model in config.models.items()},
        **changes,
    )
