"""Builds what workers and the executor need: setup, workers and the rows of datasets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hflow.config import DataConfig, ModelConfig
from hflow.data.datasets import DataSettings, open_dataset
from hflow.data.row_order import RowOrder
from hflow.errors import ConfigError
from hflow.graph.ir import DatasetSpec, Node
from hflow.launch.compile import Compiled
from hflow.launch.model_settings import model_settings, tokenizer_settings
from hflow.planner import backends
from hflow.planner.ir import Replica
from hflow.planner.reported_field import reported_field
from hflow.runtime.execution.row_cursor import DatasetRows
from hflow.workers.interface import NodeProgram, Workers, WorkerSetup

if TYPE_CHECKING:
    from hflow.workers.ray.ray_actors import RayActors


def make_setup(compiled: Compiled, factories: Mapping[str, Callable[..., Any]] | None = None) -> WorkerSetup:
    """Return the setup that every worker receives.

    Args:
        compiled: the recipe.
        factories: name of a backend or engine -> the function that builds it; None: those of the registry.

    Raises:
        ConfigError: if a model or dataset is not configured.
    """
    return WorkerSetup(
        plan=compiled.plan,
        programs={node.name: _program(compiled, node) for node in compiled.graph.nodes},
        models=model_settings(compiled),
        engines={
            replica.name: _engine_options(compiled, replica)
            for replica in compiled.plan.replicas
            if replica.role == "gen"
        },
        datasets={dataset.name: _data_settings(compiled, dataset) for dataset in compiled.graph.datasets},
        tokenizers=tokenizer_settings(compiled),
        seed=compiled.config.seed,
        factories=backends.factories() if factories is None else factories,
        collective_timeout=compiled.config.collective_timeout,
        endpoint_host=compiled.config.endpoint_host,
        recipe_directory=str(compiled.recipe.resolve().parent),
    )


def make_workers(compiled: Compiled, processes: RayActors | None = None) -> Workers:
    """Return workers as configured: on Ray, in the given or in new processes, or all in this process."""
    if compiled.config.workers == "inproc":
        from hflow.workers.inproc import InprocWorkers

        return InprocWorkers()
    from hflow.workers.ray.ray_workers import RayWorkers

    return RayWorkers(processes)


def open_rows(compiled: Compiled) -> dict[str, DatasetRows]:
    """Open the dataset of every stream, check its first row, and return the order of its rows.

    Raises:
        DataError: for a file that does not have the columns that the recipe declares.
    """
    datasets = {dataset.name: dataset for dataset in compiled.graph.datasets}
    rows: dict[str, DatasetRows] = {}
    for stream in compiled.plan.schedule.streams:
        name = compiled.graph.stream(stream.name).dataset
        assert name is not None, f"root stream {stream.name} has no dataset"
        settings = _data_settings(compiled, datasets[name])
        source = open_dataset(settings, dict(datasets[name].columns))
        is_trained = stream.batch is not None
        rows[stream.name] = RowOrder(len(source), compiled.config.seed, settings.shuffle and is_trained)
    return rows


def _data_settings(compiled: Compiled, dataset: DatasetSpec) -> DataSettings:
    config = compiled.config.data.get(dataset.name, DataConfig())
    if config.path is None and config.generator is None:
        raise ConfigError(
            f"data.{dataset.name} has no rows; set data.{dataset.name}.path to a .jsonl or .parquet file "
            f"with the columns {', '.join(name for name, _ in dataset.columns)}"
        )
    if config.path is not None and config.generator is not None:
        raise ConfigError(
            f"data.{dataset.name} has both path and generator; set data.{dataset.name}.generator=null to "
            "read the file"
        )
    return DataSettings(
        path=None if config.path is None else str(Path(config.path).resolve()),
        generator=config.generator,
        split=config.split,
        shuffle=config.shuffle,
        limit=config.limit,
    )


def _engine_options(compiled: Compiled, replica: Replica) -> Mapping[str, Any]:
    config = compiled.config.models.get(replica.model, ModelConfig()).gen
    options = {"max_running": config.max_running, "max_model_len": config.max_model_len}
    choice = next(choice for choice in compiled.plan.engines if choice.replica == replica.name)
    return options if choice.cache_bytes is None else {**options, "cache_bytes": choice.cache_bytes}


def _program(compiled: Compiled, node: Node) -> NodeProgram:
    spec = node.spec
    return NodeProgram(
        name=spec.name,
        verb=spec.verb,
        level=spec.level.value,
        stream=node.stream,
        root=compiled.graph.root_stream(node.stream).name,
        body=compiled.bodies[spec.name],
        reads=node.reads,
        provided=spec.provided,
        returns=tuple((returned.field, returned.unit.value) for returned in spec.returns),
        metrics=spec.metrics,
        opens_stream=spec.opens_stream,
        models=spec.models,
        knobs={knob.name: knob.value for knob in spec.knobs},
        options=dict(spec.options),
        dataset=spec.data,
        group=spec.group,
        reported=reported_field(compiled.graph, spec.name),
    )
