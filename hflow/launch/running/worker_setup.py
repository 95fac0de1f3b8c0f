"""Builds what workers and the executor need: setup, workers, settings of models and tokenizers, and rows."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hflow.base.errors import ConfigError
from hflow.base.files import read_json_object, resolved
from hflow.base.model_files import max_positions
from hflow.base.shipped import shipped_recipes
from hflow.config import ModelConfig, RunConfig
from hflow.data.rows.datasets import DataSettings, JoinedRows, RowSource, check_rows, open_dataset
from hflow.data.rows.generated import ENDLESS
from hflow.data.rows.row_order import RowOrder, WeightedOrder
from hflow.data.rows.samplers import SAMPLERS
from hflow.data.text.tokenizer import TokenizerSettings, eos_ids
from hflow.dsl import FirstPass, first_pass_of, read_first_pass
from hflow.graph.ir import Level, Node, Read
from hflow.graph.model import Model
from hflow.graph.queries import reported_field
from hflow.launch.planning.compile import Compiled
from hflow.launch.planning.data_settings import conversation_checks, data_settings, find_row_sampler
from hflow.launch.planning.models import model_dtype, source_model
from hflow.models.hub import is_fetched, local_directory
from hflow.models.merged import is_adapter
from hflow.models.settings import SHARDS, SHARDS_INDEX, ModelSettings
from hflow.planner.models import descriptors
from hflow.planner.plan.rows import Plan, Replica
from hflow.planner.plan.schedule import scheduled_updates
from hflow.runtime.execution.row_cursor import DatasetRows, SampledRows
from hflow.runtime.ledger.header import make_header
from hflow.training.interface import FIRST_PASS_STREAM
from hflow.types import Unit
from hflow.types.kernels import LayerKernels
from hflow.workers.bodies.body_output import log_levels
from hflow.workers.interface import NodeProgram, Workers, WorkerSetup
from hflow.workers.process_setup import device_environment

if TYPE_CHECKING:
    from hflow.workers.ray.ray_actors import RayActors


def make_setup(compiled: Compiled, factories: Mapping[str, Callable[..., Any]] | None = None) -> WorkerSetup:
    """Return the setup that every worker receives, with these factories, or those of the registry.

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
            dataset.name: data_settings(compiled.config, dataset, compiled.row_functions)
            for dataset in compiled.graph.datasets
        },
        tokenizers=tokenizer_settings(compiled),
        seed=compiled.config.seed,
        pool_processes=0 if compiled.config.workers == "debug" else 1,
        factories=descriptors.factories() if factories is None else factories,
        collective_timeout=compiled.config.collective_timeout,
        hang_seconds=compiled.config.faults.hang_seconds,
        endpoint_host=compiled.config.endpoint_host,
        log_levels=log_levels(),
        recipe_directory=str(resolved(compiled.recipe).parent),
    )


def make_processes(plan: Plan, variables: Mapping[str, str] | None = None) -> RayActors:
    """Return the processes of a run's workers on Ray. They are not started."""
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
        settings = data_settings(compiled.config, datasets[name], compiled.row_functions)
        checks = conversation_checks(compiled.graph, name)
        source = open_dataset(settings, dict(datasets[name].columns), checks)
        check_rows(settings, source)
        _refuse_endless(settings, is_trained[stream])
        rows[stream] = _row_order(settings, source, compiled.config.seed, is_trained[stream])
        if (function := find_row_sampler(compiled.config, name, compiled.samplers)) is not None:
            if len(source) == ENDLESS:
                raise ConfigError(
                    f"{settings.key}.sampler chooses among a number of rows, but "
                    f"{settings.key}.generator={settings.generator} may not end; set {settings.key}.limit"
                )
            sampler = compiled.config.data[name].sampler
            judge = _judge(compiled.plan, stream, f"{settings.key}.sampler")
            if judge is None and sampler in SAMPLERS:  # one of the recipe's may need no rewards
                raise ConfigError(
                    f"{settings.key}.sampler={sampler} needs rewards, but no node returns one for the "
                    f"samples of {stream}; add one, such as rewards.math_equal, or remove the sampler"
                )
            key, order = f"{settings.key}.sampler={sampler}", rows[stream]
            rows[stream] = SampledRows(order, function, judge, key)
        files[name] = source.files
    return rows, files


def _judge(plan: Plan, stream: str, key: str) -> str | None:
    """Return the node whose number is the reward of a stream's samples; None if there is none.

    Raises:
        ConfigError: if it rewards whole batches, which are formed before.
    """
    judge = next(row.judge for row in make_header(plan).streams if row.name == stream)
    for node in plan.schedule.nodes:
        if node.name == judge and (node.level is not Level.SAMPLE or node.groups):
            raise ConfigError(
                f"{key} needs the rewards of single samples, but {judge} runs on batches or on a model; "
                "reward them in a compute node with per='sample', or remove the sampler"
            )
    return judge


def _row_order(settings: DataSettings, source: RowSource, seed: int, is_trained: bool) -> DatasetRows:
    """Return the order in which a stream reads a dataset. Evaluations read it once, from the beginning."""
    if isinstance(source, JoinedRows) and settings.sources and is_trained:
        weights = [source.weight for source in settings.sources]
        return WeightedOrder(source.sizes, weights, seed, settings.shuffle)
    return RowOrder(len(source), seed, settings.shuffle and is_trained and len(source) != ENDLESS)


def _refuse_endless(settings: DataSettings, is_trained: bool) -> None:
    """Refuse rows without an end where all of them are read, or a share of them is mixed with others.

    Raises:
        ConfigError: naming the key that ends them.
    """
    for source in settings.sources or (settings,):
        if source.function is not None and source.limit is None and not (is_trained and source is settings):
            why = (
                "several sources are mixed by their numbers of rows"
                if is_trained
                else "evaluations read all rows"
            )
            raise ConfigError(
                f"{source.key}.generator={source.generator} may not end, but {why}; set {source.key}.limit"
            )


def _engine_options(compiled: Compiled, replica: Replica) -> Mapping[str, Any]:
    config = compiled.config.models.get(replica.model, ModelConfig()).gen
    options = config.engine_options
    if replica.merges_adapters:
        options["merges_adapters"] = True
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
        models=spec.models,
        knobs=spec.knob_values,
        options=dict(spec.options),
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
    of_body = inspect.signature(program.body).parameters
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


def model_settings(compiled: Compiled) -> dict[str, ModelSettings]:
    """Return the settings of every model of the recipe.

    Raises:
        ConfigError: if a model has neither weights nor an architecture.
    """
    return {spec.name: _model_settings(compiled, spec) for spec in compiled.graph.models}


def tokenizer_settings(compiled: Compiled) -> dict[str, TokenizerSettings]:
    """Return the settings of every model's tokenizer."""
    sources = {spec.name: source_config(compiled, spec) for spec in compiled.graph.models}
    own = {name: compiled.config.models.get(name, ModelConfig()) for name in sources}
    images = {name: own[name].images.over(source.images) for name, source in sources.items()}
    sees = {spec.name: spec.vision for spec in compiled.graph.models}
    configs: dict[str, Mapping[str, Any]] = {
        name: source.architecture or {}
        if source.path is None
        else read_json_object(local_directory(source.path) / "config.json")
        for name, source in sources.items()
    }
    return {
        name: TokenizerSettings(
            source.path,
            source.alphabet,
            own[name].chat_template or source.chat_template,
            own[name].template_kwargs or source.template_kwargs,
            _architecture_eos(name, source),
            max_positions(configs[name]),
            configs[name] if sees[name] else None,
            images[name].min_pixels,
            images[name].max_pixels,
        )
        for name, source in sources.items()
    }


def _architecture_eos(name: str, source: ModelConfig) -> tuple[int, ...]:
    """Return the end-of-text tokens of a configured architecture. It is not used if there is a checkpoint."""
    if source.path is not None or source.architecture is None:
        return ()
    return eos_ids(source.architecture, f"models.{name}.architecture")


def source_config(compiled: Compiled, spec: Model) -> ModelConfig:
    """Return the configuration that a model's weights come from: its own, or that of its `init_from`.

    Raises:
        ConfigError: if there is none, or its checkpoint does not exist.
    """
    spec = source_model(compiled.config, spec)
    config = compiled.config.models.get(spec.name, ModelConfig())
    if config.path is None and config.architecture is None:
        raise ConfigError(
            f"models.{spec.name} has no weights; set models.{spec.name}.path to a checkpoint directory, "
            f"or choose an architecture with model@models.{spec.name}=tiny-qwen2"
        )
    if config.path is not None and not (local_directory(config.path) / "config.json").is_file():
        raise ConfigError(
            f"models.{spec.name}.path is {config.path}, which has no checkpoint (config.json); "
            f"{_training_hint(config.path)}set another path"
        )
    return config


def _training_hint(path: str) -> str:
    """Return the command that trains a missing checkpoint, if it is of a run of a shipped recipe."""
    out, name, *_ = (*Path(path).parts, "", "")
    is_shipped = out == RunConfig.out and name in shipped_recipes()
    return f"train it with `hflow run {name}`, or " if is_shipped else ""


def _model_settings(compiled: Compiled, spec: Model) -> ModelSettings:
    config = compiled.config.models.get(spec.name, ModelConfig())
    source = source_config(compiled, spec)
    if config.lora is not None and source.path is None:
        raise ConfigError(
            f"models.{spec.name}.lora adapts the weights of a checkpoint, but {spec.name} starts from random "
            f"ones; set models.{spec.name}.path, or remove models.{spec.name}.lora"
        )
    is_resumed = _is_resumed(spec, config, _followers(compiled, spec))
    num_earlier = _saved_updates(Path(str(config.path)) / SHARDS) if is_resumed else 0
    resolved_values = {
        "path": None if source.path is None else _place(source.path),
        "architecture": None if source.path is not None else source.architecture or {},
        "dtype": model_dtype(compiled.config, spec, compiled.plan.cluster.device),
        "kernels": _kernels(compiled, spec),
        "resume": is_resumed,
    }
    return ModelSettings(
        **vars(config) | resolved_values,
        name=spec.name,
        head=spec.head,
        trainable=spec.trainable,
        seed=compiled.config.seed,
        device=compiled.plan.cluster.device,
        num_updates=num_earlier + scheduled_updates(compiled.plan, compiled.config.steps).get(spec.name, 0),
    )


def _place(path: str) -> str:
    """Return a path that means the same in every worker: a model of the Hub, or an absolute path."""
    return path if is_fetched(path) else str(resolved(path))


def _kernels(compiled: Compiled, spec: Model) -> LayerKernels:
    """Return the kernels that the plan chose for the layers of a model; torch's if there is no choice."""
    plan = compiled.plan
    chosen = (c.kernels for c in plan.layers if plan.replica(c.replica).model == spec.name)
    return next(chosen, LayerKernels.TORCH)


def _followers(compiled: Compiled, spec: Model) -> list[str]:
    """Return the models that start from a model's weights, because nothing else is configured for them."""
    names = []
    for other in compiled.graph.models:
        config = compiled.config.models.get(other.name, ModelConfig())
        if other.init_from == spec and config.path is None and config.architecture is None:
            names.append(other.name)
    return names


def _is_resumed(spec: Model, config: ModelConfig, followers: Sequence[str]) -> bool:
    """Return whether a model starts with the optimizer state of its checkpoint; `followers` start from it.

    Only weights and optimizer state are restored, not the position in the data, samples or the ledger.

    Raises:
        ConfigError: if there is no such state, the model is not trained, or another model would start from
            weights that it did not have.
    """
    if not config.resume:
        return False
    key = f"models.{spec.name}"
    if not spec.trainable:
        raise ConfigError(
            f"{key}.resume is for trained models, but {spec.name} is frozen; remove {key}.resume"
        )
    if config.lora is not None:
        raise ConfigError(
            f"{key}.resume takes all weights of a checkpoint, but of {spec.name} only adapters are trained; "
            f"continue the whole run with hflow run --resume RUN, or remove {key}.lora"
        )
    if config.path is None:
        raise ConfigError(f"{key}.resume needs a checkpoint; set {key}.path")
    if is_adapter(Path(config.path)):
        raise ConfigError(
            f"{key}.path is {config.path}, which has the optimizer state of an adapter alone; set "
            f"{key}.resume=false to train the merged weights"
        )
    for other in followers:
        raise ConfigError(
            f"models.{other} starts from the weights of {spec.name}, which {key}.resume takes from a later "
            f"checkpoint; set models.{other}.path to the weights that it had, or continue the whole run with "
            "hflow run --resume RUN"
        )
    if not (Path(config.path) / SHARDS).is_dir():
        raise ConfigError(
            f"{key}.path is {config.path}, which has no optimizer state ({SHARDS}/); set {key}.resume=false "
            f"to load only its weights, or use a checkpoint saved with {key}.save_optimizer=true"
        )
    return True


def _saved_updates(shards: Path) -> int:
    """Return the number of optimizer steps that a sharded checkpoint was saved after.

    Raises:
        ConfigError: if its index is damaged.
    """
    index = shards / SHARDS_INDEX
    num_steps = read_json_object(index, "sharded checkpoint").get("num_steps")
    if type(num_steps) is not int:
        raise ConfigError(f"{index}: num_steps is {num_steps!r}, not a number; use another checkpoint")
    return num_steps
