"""`hflow twin`: checks that a recipe computes the same in one process and distributed over many ranks.

The reference run records the tokens that it samples. The other runs replay these tokens and compute all the
rest themselves. If they sampled too, a rounding difference in the last bit could change a token, and with it
everything after it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from torch import Tensor

from hflow.base.errors import ConfigError, RunError
from hflow.base.validation import FrozenDict
from hflow.config import ModelConfig, RunConfig
from hflow.config.schema import FaultsConfig
from hflow.graph.ir import Graph, Level
from hflow.graph.queries import saved_models
from hflow.launch.planning.compile import AUTO, Compiled, compile_recipe, learn_from_run
from hflow.launch.planning.read_recipe import read_recipe
from hflow.launch.planning.request import cluster_hardware
from hflow.launch.running.preflight import check_ray
from hflow.launch.running.run_recipe import RunEnvironment, run_compiled
from hflow.launch.running.step_warnings import NO_GRADIENT_NORM
from hflow.planner.checks.settings import without_unused_keys
from hflow.planner.make.placement_setting import replace_layout
from hflow.planner.make.replicas import GEN_SUFFIX
from hflow.planner.models.descriptors import EngineKind, engine_kind, factories
from hflow.planner.plan.cluster import ClusterSpec, device_of
from hflow.planner.plan.traits import BACKENDS, ENGINES, first_with, traits
from hflow.report.text.twin import MetricPair, TwinResult, WeightPair
from hflow.runtime.records.run_summary import RunSummary
from hflow.runtime.saving.checkpoint import Checkpoints
from hflow.runtime.saving.run_directory import read_metrics
from hflow.shapes.layout import Layout
from hflow.training.interface import GRAD_NORM

if TYPE_CHECKING:
    from hflow.workers.ray.ray_actors import RayActors


LAYOUTS = ("d2t2", "t2p2", "d2p2", "d2t2p2")
"""Default layouts: all pairs of axes, and all three axes."""
SEEING_LAYOUTS = ("d2", "d4r2")
"""Default layouts of recipes with a model that sees, which only the data axis divides."""
AS_CONFIGURED = "as configured"
WORKER_BYTES = 1 << 30
"""Memory of one worker with a tiny model, on a CPU."""
COMPARED = ("loss", "grad_norm")
"""The metrics of a train node that must be equal. Others, such as clipped fractions, count events."""
MIN_STEPS, MAX_STEPS = 2, 10_000
"""Differences of weights are relative to their change since a checkpoint at half of the steps."""


@dataclass(frozen=True)
class TwinReport:
    """The results of `hflow twin`."""

    results: tuple[TwinResult, ...]
    notes: tuple[str, ...]
    """How the compared runs differ from the configuration, in words."""


def twin(
    recipe: str | Path,
    overrides: Sequence[str] = (),
    layouts: Sequence[str] | None = (),
    steps: int = 3,
    report_progress: Callable[[str], None] = lambda line: None,
    processes: RayActors | None = None,
) -> TwinReport:
    """Run a recipe for some steps in one process, then distributed over many ranks, and compare.

    Args:
        recipe: path of the recipe's Python file.
        overrides: configuration as `key=value`.
        layouts: layouts to compare, each used for all models, on megatron, or on torch if one sees; empty:
            `LAYOUTS` or `SEEING_LAYOUTS`, as far as this machine can hold them; None: as configured.
        steps: training steps, from 2 to 10,000.
        report_progress: called with a line when a run starts.
        processes: worker processes to use; None: start new ones, and stop them at the end.

    Raises:
        HflowError: for the reasons of `hflow.run`.
    """
    if layouts is not None and not layouts:
        layouts = default_layouts(recipe, overrides, report_progress)
    if not MIN_STEPS <= steps <= MAX_STEPS:
        raise ConfigError(f"--steps is {steps}; it must be at least {MIN_STEPS}, and at most {MAX_STEPS:,}")
    with TemporaryDirectory(prefix="hflow-twin-") as out:
        config, graph = configuration(recipe, overrides, as_configured=layouts is None)
        common = comparable_config(config, graph, steps, out)
        reference = compile_recipe(
            recipe, config=reference_config(dataclasses.replace(common, name="reference"), graph)
        )
        twins = [
            (name, compile_recipe(recipe, config=dataclasses.replace(twin, name="twin")))
            for name, twin in _twin_configs(common, graph, layouts)
        ]
        results = tuple(_run_and_compare(reference, twins, report_progress, processes))
    return TwinReport(results, tuple(describe_changes(graph, config)))


def configuration(
    recipe: str | Path, overrides: Sequence[str], *, as_configured: bool
) -> tuple[RunConfig, Graph]:
    """Return the configuration to compare, and the recipe's graph.

    `as_configured` places the models as a run does, where the planner chooses what is left open.

    Raises:
        HflowError: if the recipe cannot be planned.
    """
    config, graph, _ = read_recipe(recipe, overrides)
    if not saved_models(graph):
        raise ConfigError(
            f"{recipe} trains no model, so a twin would compare nothing; name a recipe that does"
        )
    if as_configured:
        config = compile_recipe(recipe, overrides).config
    elif config.placement == AUTO:
        config = dataclasses.replace(config, placement=None)
    return config, graph


def default_layouts(
    recipe: str | Path, overrides: Sequence[str], report_progress: Callable[[str], None]
) -> list[str]:
    """Return those of the default layouts for which this machine has the devices or memory."""
    config, graph, _ = read_recipe(recipe, overrides)
    max_workers = _max_workers(cluster_hardware(config, recipe, learn_from_run)[0])
    layouts = []
    for name in SEEING_LAYOUTS if _sees(graph) else LAYOUTS:
        world = Layout.parse(name).world
        if world <= max_workers:
            layouts.append(name)
        else:
            report_progress(f"{name} is skipped: this machine cannot hold {world} workers")
    return layouts


def _sees(graph: Graph) -> bool:
    """Return whether a model sees, which megatron does not build."""
    return any(model.vision for model in graph.models)


def _max_workers(cluster: ClusterSpec) -> int:
    if cluster.device == "cpu":
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // WORKER_BYTES
    return cluster.devices_per_node


def _twin_configs(
    common: RunConfig, graph: Graph, layouts: Sequence[str] | None
) -> Iterator[tuple[str, RunConfig]]:
    if layouts is None:
        yield AS_CONFIGURED, common
        return
    for name in layouts:
        yield str(Layout.parse(name)), distributed_config(common, graph, Layout.parse(name))


def _run_and_compare(
    reference: Compiled,
    twins: Sequence[tuple[str, Compiled]],
    report_progress: Callable[[str], None],
    processes: RayActors | None,
) -> Iterator[TwinResult]:
    draws: dict[Any, Any] = {}
    for _, twin in twins:
        check_ray(twin.config)
    report_progress("one process")
    recording = RunEnvironment(_factories(_engine().recording_factory, draws), is_quiet=True)
    expected = run_compiled(reference, False, recording)
    refuse_without_gradient(expected, reference.graph)
    shared = processes or _start_processes(twins)
    try:
        for name, twin in twins:
            report_progress(f"{name} on {twin.plan.cluster.num_devices} workers")
            replaying = RunEnvironment(
                _factories(_engine().replaying_factory, draws),
                processes=shared if twin.config.workers == "ray" else None,
                is_quiet=True,
            )
            yield compare_with_twin(expected, run_compiled(twin, False, replaying), name)
    finally:
        if shared is not None and processes is None:
            asyncio.run(shared.close())


def _factories(engine: Callable[..., Any] | None, draws: dict[Any, Any]) -> Mapping[str, Callable[..., Any]]:
    """Return the registry's factories, with an engine that records or replays `draws`."""
    assert engine is not None
    return {**factories(), _engine().name: partial(engine, draws)}


def _engine() -> EngineKind:
    """Return the first engine that can replay the tokens that another run sampled."""
    return next(kind for kind in map(engine_kind, ENGINES) if kind.replaying_factory is not None)


def _start_processes(twins: Sequence[tuple[str, Compiled]]) -> RayActors | None:
    """Start worker processes for the largest run on Ray, with the environment variables of all runs."""
    from hflow.workers.process_setup import device_environment
    from hflow.workers.ray.ray_actors import RayActors

    on_ray = [twin for _, twin in twins if twin.config.workers == "ray"]
    if not on_ray:
        return None
    cluster = max((twin.plan.cluster for twin in on_ray), key=lambda cluster: cluster.num_devices)
    environments: list[dict[str, str]] = [{} for _ in range(cluster.num_devices)]
    for worker, variables in enumerate(environments):
        for twin in on_ray:
            variables |= {**device_environment(twin.plan, worker), **twin.config.env}
    return RayActors(cluster, environments, is_shared=True)


def comparable_config(config: RunConfig, graph: Graph, steps: int, out: str) -> RunConfig:
    """Return the configuration with what all runs share.

    They are synchronous and in fp32, train every model from the first step on, and do not evaluate.
    """
    placement = config.placement
    for spec in graph.models:
        if placement is not None and _may_differ(config.models.get(spec.name, ModelConfig())):
            placement = replace_layout(placement, spec.name + GEN_SUFFIX, _data_only)
    return dataclasses.replace(
        config,
        steps=steps,
        out=out,
        placement=placement,
        schedule=dataclasses.replace(config.schedule, max_staleness=0, sync_every=1),
        save_every=0,
        save_minutes=0.0,
        keep_best=None,  # a metric of an evaluation, which does not run
        models={
            spec.name: without_unused_keys(graph, spec.name, _comparable_model(config, spec.name))
            for spec in graph.models
        },
        nodes=_comparable_nodes(config, graph, steps),
    )


def reference_config(config: RunConfig, graph: Graph) -> RunConfig:
    """Return the reference's configuration: one process, one device, default backend.

    It keeps the weights at half of the steps, so that their change until the end is known.
    """
    changes = {"workers": "inproc", "env": FrozenDict(), "faults": FaultsConfig()}
    saving = {"save_every": config.steps // 2, "keep_checkpoints": None}
    return _on_cluster(config, graph, 1, BACKENDS.default, None, **changes, **saving)


def distributed_config(config: RunConfig, graph: Graph, layout: Layout) -> RunConfig:
    """Return a configuration on Ray workers: all models in this layout, and engines on all workers."""
    shards = layout.replicate > 1 or _sees(graph)
    backend = first_with("shards_weights" if shards else "is_model_parallel")
    return _on_cluster(config, graph, layout.world, backend, layout, workers="ray")


def describe_changes(graph: Graph, config: RunConfig) -> Iterator[str]:
    """Yield what `comparable_config` changes, in words."""
    for node in graph.nodes:
        if node.spec.verb == "train" and node.spec.after:
            yield f"{node.name} trains from the first step on (after={node.spec.after})"
    if config.schedule.max_staleness:
        yield f"generation and training take turns (max_staleness={config.schedule.max_staleness})"
    for name, model in config.models.items():
        if model.dtype not in (None, "fp32"):
            yield f"{name} computes in fp32 (dtype={model.dtype})"
        if model.fp8 is not None:
            yield f"{name} multiplies in fp32 (fp8={model.fp8})"
        for key, value in model.gen.precisions.items():
            yield f"{name} generates in fp32 (gen.{key}={value})"
        if model.gen.engine not in (None, _engine().name):
            yield f"{name} generates with the {_engine().name} engine (gen.engine={model.gen.engine})"


def _comparable_model(config: RunConfig, name: str) -> ModelConfig:
    model = config.models.get(name, ModelConfig())
    rounding: dict[str, Any] = dict.fromkeys(model.gen.precisions)
    gen = dataclasses.replace(model.gen, engine=_engine().name, transport="auto", delta=False, **rounding)
    if _may_differ(model):  # options of the configured engine
        layout = None if gen.layout is None else _data_only(gen.layout)
        gen = dataclasses.replace(gen, layout=layout, cache_gib=None)
    return dataclasses.replace(model, dtype="fp32", fp8=None, gen=gen)


def _may_differ(model: ModelConfig) -> bool:
    """Return whether a model may be configured for another engine than that of the compared runs."""
    return model.gen.engine != _engine().name


def _data_only(layout: str) -> str:
    """Return the layout on the same number of devices that the engine of the compared runs can have."""
    return f"d{Layout.parse(layout).world}"


def _comparable_nodes(config: RunConfig, graph: Graph, steps: int) -> Mapping[str, Mapping[str, Any]]:
    """Return node options with which training starts at once and evaluation never starts."""
    nodes = {name: dict(values) for name, values in config.nodes.items()}
    for node in graph.nodes:
        stream = graph.stream(node.stream)
        if node.spec.opens_stream and stream.parent is None and not stream.trained:
            nodes.setdefault(node.name, {})["after"] = steps + 1
        elif node.spec.verb == "train" and node.spec.level is Level.BATCH:
            nodes.setdefault(node.name, {})["after"] = 0
    return nodes


def _on_cluster(
    config: RunConfig, graph: Graph, world: int, backend: Any, layout: Layout | None, **changes: Any
) -> RunConfig:
    def placed(model: ModelConfig) -> ModelConfig:
        gen = dataclasses.replace(model.gen, layout=f"d{world}", group=None)
        named, stage = None if layout is None else str(layout), ModelConfig().zero_stage
        if layout is not None and traits(backend).shards_weights and layout.fsdp_size > 1:
            stage = model.zero_stage
        return dataclasses.replace(
            model, backend=backend, layout=named, group=None, gen=gen, zero_stage=stage
        )

    return dataclasses.replace(
        config,
        cluster=f"{device_of(config.cluster)}-1x{world}",
        cores=None,
        placement=None,
        groups={},
        models={
            name: without_unused_keys(graph, name, placed(model)) for name, model in config.models.items()
        },
        **changes,
    )


def compare_with_twin(reference: RunSummary, twin: RunSummary, layout: str) -> TwinResult:
    """Compare losses and gradient norms of every step, and the weights after the last step.

    The reference has an earlier checkpoint too.
    """
    return TwinResult(layout, tuple(_metric_pairs(reference, twin)), tuple(_weight_pairs(reference, twin)))


def _metric_pairs(reference: RunSummary, twin: RunSummary) -> Iterator[MetricPair]:
    expected, actual = _compared_values(reference), _compared_values(twin)
    nan = float("nan")
    for name in sorted({name for name, _ in [*expected, *actual]}):
        sizes = (abs(value) for (metric, _), value in expected.items() if metric == name)
        scale = max(filter(math.isfinite, sizes), default=0.0)  # relative to infinity, all would be equal
        for step in sorted({step for metric, step in [*expected, *actual] if metric == name}):
            key = name, step
            yield MetricPair(name, step, expected.get(key, nan), actual.get(key, nan), scale)


def _compared_values(summary: RunSummary) -> dict[tuple[str, int], float]:
    values = {}
    for row in read_metrics(summary.directory / "metrics.jsonl"):
        for name, value in row.items():
            if name.rpartition("/")[2] in COMPARED:
                values[name, int(row["step"] or 0)] = float("nan") if value is None else value
    return values


def _weight_pairs(reference: RunSummary, twin: RunSummary) -> Iterator[WeightPair]:
    last = reference.directory / "checkpoints" / "latest"
    for model, moved in _movements(reference).items():
        difference = distance(last / model, twin.directory / "checkpoints" / "latest" / model)
        yield WeightPair(model, difference / moved if math.isfinite(moved) else math.inf)


def _movements(reference: RunSummary) -> dict[str, float]:
    """Return saved model -> how far its weights moved from the first checkpoint to the last."""
    checkpoints = Checkpoints(reference.directory / "checkpoints")
    first, last = (checkpoints.path(steps) for steps in (checkpoints.steps[0], checkpoints.steps[-1]))
    models = sorted({file.parent.name for file in last.glob("*/*.safetensors")})
    return {model: distance(last / model, first / model) for model in models}


def refuse_without_gradient(reference: RunSummary, graph: Graph) -> None:
    """Check that the reference has a gradient of every train node, and weights that changed.

    Raises:
        RunError: if a comparison would show nothing; names the node or model.
    """
    rows = read_metrics(reference.directory / "metrics.jsonl")
    fix = (
        f"so nothing of it would be compared. Use data and weights with which it learns in {reference.steps} "
        "steps, such as samples of a prompt with different rewards, or more --steps."
    )
    for node in graph.nodes:
        if node.spec.verb == "train":
            norms = [row.get(GRAD_NORM.member(node.name)) or 0.0 for row in rows]
            if max(norms, default=0.0) <= NO_GRADIENT_NORM:
                raise RunError(f"{node.name} had no gradient in the run in one process, {fix}")
    for model, moved in _movements(reference).items():
        if not moved:
            raise RunError(f"the weights of {model} did not change in the run in one process, {fix}")


def distance(a: Path, b: Path) -> float:
    """Return the 2-norm of the difference of two checkpoints; infinite if they have different tensors.

    It is NaN where a weight is infinite or NaN.
    """
    files_a, files_b = dict(_tensor_files(a)), dict(_tensor_files(b))
    if files_a.keys() != files_b.keys():
        return math.inf
    total = 0.0
    for name, file in files_a.items():
        ours, theirs = _read(file, name), _read(files_b[name], name)
        if ours.shape != theirs.shape:
            return math.inf
        total += float((ours - theirs).square().sum())
    return math.sqrt(total)


def _tensor_files(directory: Path) -> Iterator[tuple[str, Path]]:
    """Yield the name of every tensor of a checkpoint, and its file."""
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            yield from ((name, file) for name in opened.keys())  # noqa: SIM118 - no mapping


def _read(file: Path, name: str) -> Tensor:
    with safe_open(file, "pt") as opened:
        tensor: Tensor = opened.get_tensor(name)
        return tensor.to(torch.float64)
