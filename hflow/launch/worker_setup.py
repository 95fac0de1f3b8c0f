"""Builds what workers and the executor need: setup, workers and the rows of datasets."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hflow.backends.interface import FIRST_PASS_STREAM
from hflow.config import ModelConfig
from hflow.data.datasets import DataSettings, JoinedRows, RowSource, check_rows, open_dataset
from hflow.data.row_order import RowOrder, WeightedOrder
from hflow.dsl import FirstPass, first_pass_of, read_first_pass
from hflow.graph.ir import Node, Read
from hflow.launch.compile import Compiled
from hflow.launch.data_settings import conversation_checks, data_settings
from hflow.launch.model_settings import model_settings, tokenizer_settings
from hflow.planner import descriptors
from hflow.planner.ir import Plan, Replica
from hflow.planner.reported_field import reported_field
from hflow.runtime.execution.row_cursor import DatasetRows
from hflow.types import Unit
from hflow.user_files import resolved
from hflow.workers.interface import NodeProgram, Workers, WorkerSetup
from hflow.workers.process_setup import device_environment

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
        datasets={
            dataset.name: data_settings(compiled.config, dataset) for dataset in compiled.graph.datasets
        },
        tokenizers=tokenizer_settings(compiled),
        seed=compiled.config.seed,
        factories=descriptors.factories() if factories is None else factories,
        collective_timeout=compiled.config.collective_timeout,
        hang_seconds=compiled.config.faults.hang_seconds,
        endpoint_host=compiled.config.endpoint_host,
        recipe_directory=str(resolved(compiled.recipe).parent),
    )


def make_processes(plan: Plan, variables: Mapping[str, str] | None = None) -> RayActors:
    """Return the processes of a run's workers on Ray. They are not started.

    Args:
        plan: of the run.
        variables: environment variables of all workers.
    """
    from hflow.workers.ray.ray_actors import RayActors

    workers, same = range(plan.cluster.num_devices), variables or {}
    return RayActors(plan.cluster, [{**device_environment(plan, worker), **same} for worker in workers])


def make_workers(processes: RayActors | None) -> Workers:
    """Return workers on Ray, in these processes; None: all in this process."""
    if processes is None:
        from hflow.workers.inproc import InprocWorkers

        return InprocWorkers()
    from hflow.workers.ray.ray_workers import RayWorkers

    return RayWorkers(processes)


def open_rows(compiled: Compiled) -> tuple[dict[str, DatasetRows], dict[str, tuple[Path, ...]]]:
    """Open the dataset of every stream and check its first rows.

    Returns:
        Stream -> the order of its rows, and dataset -> the files that hold them.

    Raises:
        DataError: for a file that does not have the columns that the recipe declares.
        ConfigError: if the configuration names no rows of a dataset.
    """
    datasets = {dataset.name: dataset for dataset in compiled.graph.datasets}
    is_trained = {stream.name: stream.batch is not None for stream in compiled.plan.schedule.streams}
    dataset_of = {stream: compiled.graph.stream(stream).dataset for stream in is_trained}
    rows: dict[str, DatasetRows] = {}
    files: dict[str, tuple[Path, ...]] = {}
    for stream, name in dataset_of.items():
        assert name is not None, f"root stream {stream} has no dataset"
        settings = data_settings(compiled.config, datasets[name])
        checks = conversation_checks(compiled.graph, name)
        source = open_dataset(settings, dict(datasets[name].columns), checks)
        check_rows(settings, source)
        rows[stream] = _row_order(settings, source, compiled.config.seed, is_trained[stream])
        files[name] = source.files
    return rows, files


def _row_order(settings: DataSettings, source: RowSource, seed: int, is_trained: bool) -> DatasetRows:
    """Return the order in which a stream reads a dataset. Evaluations read it once, from the beginning."""
    if isinstance(source, JoinedRows) and settings.sources and is_trained:
        weights = [source.weight for source in settings.sources]
        return WeightedOrder(source.sizes, weights, seed, settings.shuffle)
    return RowOrder(len(source), seed, settings.shuffle and is_trained)


def _engine_options(compiled: Compiled, replica: Replica) -> Mapping[str, Any]:
    config = compiled.config.models.get(replica.model, ModelConfig()).gen
    options = {"max_running": config.max_running, "max_model_len": config.max_model_len}
    choice = next(choice for choice in compiled.plan.engines if choice.replica == replica.name)
    return options if choice.cache_bytes is None else {**options, "cache_bytes": choice.cache_bytes}


def _program(compiled: Compiled, node: Node) -> NodeProgram:
    spec = node.spec
    program = NodeProgram(
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
        knobs=spec.knob_values,
        options=dict(spec.options),
        dataset=spec.data,
        group=spec.group,
        reported=reported_field(compiled.graph, spec.name),
        scalars={returned.field: returned.scalar for returned in spec.returns},
    )
    function = first_pass_of(inspect.unwrap(program.body))
    return program if function is None else with_first_pass(program, read_first_pass(function))


def with_first_pass(program: NodeProgram, first: FirstPass) -> NodeProgram:
    """Return a program that runs a first pass and reads its result, each with its own knobs."""
    name = first.function.__name__
    result = _read_of_first_pass(program, name, first.unit)
    parameters = [parameter.name for parameter in first.parameters]
    outputs = [_read_of_first_pass(program, output, Unit.TOKEN) for output in first.outputs]
    knobs = {knob.name: program.knobs[knob.name] for knob in first.knobs}
    of_body = inspect.signature(inspect.unwrap(program.body)).parameters
    function = replace(
        program,
        body=first.function,
        reads=(*outputs, *(read for read in program.reads if read.parameter in parameters)),
        provided=first.provided,
        returns=((name, first.unit.value),),
        metrics=False,
        knobs=knobs,
    )
    return replace(
        program,
        reads=(*program.reads, result),
        knobs={knob: value for knob, value in program.knobs.items() if knob in of_body},
        first_pass=function,
    )


def _read_of_first_pass(program: NodeProgram, name: str, unit: Unit) -> Read:
    return Read(name, name, FIRST_PASS_STREAM, program.name, unit, unit, "tensor")
