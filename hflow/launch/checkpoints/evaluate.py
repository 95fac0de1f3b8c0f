"""`hflow eval`: scores the models of a checkpoint on whole datasets, as a run that learns nothing.

The recipe is reduced to what scores samples (`hflow.graph.evaluation`), and runs like any other recipe, in a
directory of its own: `OUT/NAME-eval/TIME`. What its nodes gave each sample is read from its ledger.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hflow.algo.pass_at_k import pass_at_k
from hflow.base.errors import ConfigError
from hflow.config import ModelConfig, RunConfig, load_config
from hflow.config.schema import ScheduleConfig
from hflow.dsl import apply_overrides, load_recipe
from hflow.graph.build import build_graph
from hflow.graph.evaluation import Sampling, evaluation_spec
from hflow.graph.ir import Graph, RecipeSpec
from hflow.graph.queries import reported_field
from hflow.launch.checkpoints.merged import model_directory
from hflow.launch.planning.compile import Compiled, learn_from_run
from hflow.launch.planning.data_settings import check_data
from hflow.launch.planning.models import check_model_fit, with_bases
from hflow.launch.planning.plan_file import PlanFile, read_plan_file, recipe_file, with_overrides
from hflow.launch.planning.read_recipe import check_names, with_resolved_names
from hflow.launch.planning.request import plan_request
from hflow.launch.planning.services import check_services
from hflow.launch.running.run_recipe import RunEnvironment, run_compiled
from hflow.launch.targets import resolve
from hflow.planner.checks.settings import check_unused_keys, without_unused_keys
from hflow.planner.compile import compile_plan
from hflow.runtime.ledger.scores import StreamScores, read_scores
from hflow.runtime.saving.run_directory import RunDirectory, read_metrics

ENDING = "-eval"
"""Ending of the name of an evaluation's run."""


@dataclass(frozen=True)
class EvaluationOptions:
    """What is evaluated, and how."""

    recipe: str | None = None
    """The recipe's file; None: that of the run that saved the checkpoint."""
    model: str | None = None
    """The model that a checkpoint of one model is for; None: that of its directory's name, or the only
    one."""
    streams: tuple[str, ...] = ()
    """Streams to evaluate; empty: those that are not trained, or else all."""
    num_samples: int | None = None
    """Also draw so many samples of every prompt."""
    temperature: float = 1.0
    """Temperature of these samples."""
    pass_at: tuple[int, ...] = ()
    """Values of k for pass@k; empty: powers of two up to the samples of a prompt."""
    threshold: float = 1.0
    """Lowest score with which a sample counts as correct."""


@dataclass(frozen=True)
class EvaluationReport:
    """The result of `hflow eval`."""

    recipe: str
    models: Mapping[str, str]
    """Model -> the checkpoint that was evaluated."""
    steps: int | None
    """Completed steps of the run that saved it; None: it is from no run."""
    directory: str
    """The evaluation's own run."""
    threshold: float
    streams: tuple[StreamScores, ...]
    metrics: Mapping[str, float]
    """All means that the evaluation logged."""

    @property
    def file(self) -> Path:
        """The JSON file with the results."""
        return Path(self.directory) / "evaluation.json"

    def to_json(self) -> dict[str, Any]:
        """Return the results as plain values."""
        return asdict(self)


def evaluate(
    target: str,
    overrides: Sequence[str] = (),
    options: EvaluationOptions | None = None,
    live: bool | None = None,
    *,
    is_quiet: bool = False,
) -> EvaluationReport:
    """Score the models of a checkpoint on whole datasets.

    Args:
        target: a run's directory, NAME for the latest run in `runs/NAME`, or a checkpoint's directory.
        overrides: keys of the configuration to change, such as `data.heldout.path=test.jsonl`.
        options: what is evaluated, and how; None: the streams that are not trained, as their nodes say.
        live: whether a panel shows progress, as for `hflow.run`.
        is_quiet: show nothing while it runs.

    Raises:
        HflowError: if there is no checkpoint or recipe, or nothing scores samples; and as `hflow.run`.
    """
    options = options or EvaluationOptions()
    saved = resolve(target, fetches_models=True)
    directories = saved.require_models()
    file = read_plan_file(saved.run.plan) if saved.run is not None and options.recipe is None else None
    models = {name: model_directory(path) for name, path in directories.items()}
    compiled = compile_evaluation(models, file, overrides, options)
    summary = run_compiled(compiled, live, RunEnvironment(is_quiet=is_quiet))
    directory = RunDirectory(summary.directory)
    values = {
        name: value
        for row in read_metrics(directory.metrics)
        for name, value in row.items()
        if name != "step" and value is not None
    }
    report = EvaluationReport(
        recipe=str(compiled.recipe),
        models={
            name: str(path)
            for name, path in directories.items()
            if name in {model.name for model in compiled.graph.models}
        },
        steps=saved.steps,
        directory=str(directory.path),
        threshold=options.threshold,
        streams=read_scores(directory.ledger, pass_at_k, options.threshold, options.pass_at),
        metrics=values,
    )
    report.file.write_text(json.dumps(report.to_json(), indent=2) + "\n", encoding="utf-8")
    return report


def compile_evaluation(
    saved: Mapping[str, Path],
    file: PlanFile | None,
    overrides: Sequence[str],
    options: EvaluationOptions,
) -> Compiled:
    """Compile the evaluation of saved models, by the recipe of a run's plan file or of `options.recipe`."""
    if options.recipe is not None:
        recipe = Path(options.recipe)
    elif file is not None:
        recipe = recipe_file(file)
    else:
        raise ConfigError(
            f"{next(iter(saved.values()))} is in no run's directory; name the recipe that scores its "
            "samples, as in --recipe recipes/grpo.py"
        )
    loaded = load_recipe(recipe)
    base = load_config(recipe) if file is None else file.configuration()
    config = with_overrides(_without_placement(base), overrides)
    spec = with_bases(loaded.spec(), base)
    names = {node.name for node in spec.nodes}
    bound = apply_overrides(spec, {name: config.nodes[name] for name in names.intersection(config.nodes)})
    sampling = None if options.num_samples is None else Sampling(options.num_samples, options.temperature)
    graph = build_graph(bound)
    scoring = {node.name for node in graph.nodes if reported_field(graph, node.name)}
    reduced, body_of = evaluation_spec(bound, graph, scoring, options.streams, sampling)
    copies = [node for node in reduced.nodes if node.name not in names]
    check_names(config, replace(spec, nodes=(*spec.nodes, *copies)))
    reduced = apply_overrides(
        reduced, {node.name: config.nodes[node.name] for node in copies if node.name in config.nodes}
    )
    _check_samples(reduced, options.pass_at)
    graph = build_graph(reduced)
    config = with_overrides(_without_unused(_without_placement(base), graph), overrides)
    config = _with_saved_models(
        _reduced(config, reduced), base, reduced, _by_model(saved, reduced, options.model)
    )
    config, unreached = with_resolved_names(config, recipe)
    for problem in unreached.values():
        raise ConfigError(problem)
    bodies = loaded.bodies({node.name: dict(node.options) for node in reduced.nodes})
    graph = loaded.check_bodies(graph)
    check_model_fit(config, graph)
    check_data(config, graph, loaded.row_functions, loaded.samplers)
    check_services(config, graph)
    request = plan_request(config, graph, recipe, learn_from_run)
    check_unused_keys(graph, request)
    plan = compile_plan(graph, request)
    bodies = {name: bodies[body] for name, body in body_of.items()}
    return Compiled(config, graph, bodies, plan, recipe, row_functions=loaded.row_functions)


def _without_placement(config: RunConfig) -> RunConfig:
    """Return a configuration whose models are placed anew, since those that train are gone."""
    models = {
        name: replace(
            model, group=None, resume=False, lora=None, base_of=None, gen=replace(model.gen, group=None)
        )
        for name, model in config.models.items()
    }
    return replace(
        config,
        name=f"{config.name}{ENDING}",
        placement=None,
        groups={},
        keep_best=None,
        calibrate=None,
        report=replace(config.report.without_trackers(), show=None),
        models=models,
    )


def _without_unused(config: RunConfig, graph: Graph) -> RunConfig:
    """Return a configuration without what only training uses."""
    models = {name: without_unused_keys(graph, name, model) for name, model in config.models.items()}
    rules = ScheduleConfig(
        max_concurrent=config.schedule.max_concurrent,
        max_refused_per_step=config.schedule.max_refused_per_step,
        interrupt=config.schedule.interrupt,
    )
    return replace(config, models=models, schedule=rules)


def _reduced(config: RunConfig, spec: RecipeSpec) -> RunConfig:
    """Return a configuration without what the evaluation does not have."""
    models, datasets = {m.name for m in spec.models}, {d.name for d in spec.datasets}
    nodes = {node.name for node in spec.nodes}
    return replace(
        config,
        models={name: value for name, value in config.models.items() if name in models},
        data={name: value for name, value in config.data.items() if name in datasets},
        nodes={name: value for name, value in config.nodes.items() if name in nodes},
    )


def _by_model(saved: Mapping[str, Path], spec: RecipeSpec, chosen: str | None) -> Mapping[str, Path]:
    """Return model of the evaluation -> the checkpoint that it is loaded from."""
    names = [model.name for model in spec.models]
    found = {name: path for name, path in saved.items() if name in names}
    if chosen is None and found:
        return found
    path = next(iter(saved.values()))
    if len(saved) > 1:
        raise ConfigError(
            f"the checkpoint has the models {', '.join(saved)}, but the evaluation {', '.join(names)}"
        )
    if chosen is not None and chosen not in names:
        raise ConfigError(f"--model: the evaluation has no model {chosen!r}; it has {', '.join(names)}")
    if chosen is None and len(names) > 1:
        raise ConfigError(
            f"the evaluation has the models {', '.join(names)}; choose one for {path} with --model"
        )
    return {chosen or names[0]: path}


def _with_saved_models(
    config: RunConfig, base: RunConfig, spec: RecipeSpec, saved: Mapping[str, Path]
) -> RunConfig:
    """Return a configuration in which saved models are loaded, and all others are what they were.

    A model that starts from the first weights of another one starts from where that one started.
    """
    models = dict(config.models)
    for model in spec.models:
        own = models.get(model.name, ModelConfig())
        source = model
        while source.name not in saved and own.path is None and own.architecture is None and source.init_from:
            source = source.init_from
            first = base.models.get(source.name, ModelConfig())
            own = replace(
                own,
                path=first.path,
                architecture=first.architecture,
                alphabet=first.alphabet,
                chat_template=own.chat_template or first.chat_template,
                template_kwargs=own.template_kwargs or first.template_kwargs,
                images=own.images.over(first.images),
            )
        models[model.name] = own
    for name, path in saved.items():
        models[name] = replace(models[name], path=str(path), architecture=None)
    return replace(config, models=models)


def _check_samples(spec: RecipeSpec, pass_at: Sequence[int]) -> None:
    """Refuse several samples of a prompt at temperature 0, and a k for which there are too few samples."""
    sources = [node for node in spec.nodes if node.opens_stream and node.on is None]
    for node in sources:
        if node.group > 1 and node.option("temperature") == 0:
            raise ConfigError(
                f"nodes.{node.name} draws {node.group} samples of each prompt at temperature 0, which are "
                f"equal; set nodes.{node.name}.temperature=1.0 or nodes.{node.name}.group=1"
            )
    most = max(node.group for node in sources)
    if pass_at and not 1 <= min(pass_at) <= max(pass_at) <= most:
        raise ConfigError(
            f"--pass-at needs numbers from 1 to {most}, the samples of a prompt; draw more with "
            f"--samples {max(pass_at)}"
        )
