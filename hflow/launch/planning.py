"""From the configuration to the `PlanRequest`: cluster, sizes and places of models, numbers of the run."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from hflow.config import ModelConfig, RunConfig, flatten
from hflow.graph.ir import Graph, ModelSpec
from hflow.launch.hardware import cluster_hardware
from hflow.launch.sources import model_dtype, model_shape, overruled_architectures
from hflow.plan.request import ModelRequest, PlanRequest
from hflow.plan.workload import WorkloadRequest

RESULT_KEYS = ("models.", "data.", "workers")
"""Configuration that changes what a run computes but is no part of the plan's own rows."""


def plan_request(config: RunConfig, graph: Graph, recipe: str | Path) -> PlanRequest:
    """What the planner is asked for.

    Args:
        config: the configuration, its names checked.
        graph: the recipe's graph.
        recipe: path of the recipe's Python file; a user's hardware lies beside it.

    Raises:
        ConfigError: for an unknown link, or a file that is not what it should be.
        PlanError: for an unknown device.
    """
    cluster, hardware = cluster_hardware(config, recipe)
    return PlanRequest(
        cluster=cluster,
        batch=config.batch,
        num_steps=config.steps,
        models={spec.name: _model(config, graph, spec) for spec in graph.models},
        groups=config.groups,
        placement=config.placement,
        **dataclasses.asdict(config.schedule),
        save_every=config.save_every,
        seed=config.seed,
        hardware=hardware,
        workload=WorkloadRequest(**dataclasses.asdict(config.workload)),
        settings={key: value for key, value in flatten(config) if key.startswith(RESULT_KEYS)},
        warnings=overruled_architectures(config),
    )


def _model(config: RunConfig, graph: Graph, spec: ModelSpec) -> ModelRequest:
    model = config.models.get(spec.name, ModelConfig())
    return ModelRequest(
        layout=model.layout,
        gen_layout=model.gen.layout,
        group=model.group,
        gen_group=model.gen.group,
        backend=model.backend,
        engine=model.gen.engine,
        transport=model.gen.transport,
        shape=model_shape(config, graph, spec),
        dtype=model_dtype(config, graph, spec),
        tokens_per_microbatch=model.tokens_per_microbatch,
        recompute=model.activation_checkpointing,
        sequence_parallel=model.sequence_parallel,
        saves_optimizer=model.save_optimizer,
        max_running=model.gen.max_running,
        max_model_len=model.gen.max_model_len,
    )
