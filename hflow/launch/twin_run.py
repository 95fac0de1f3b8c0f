"""`hflow twin`: one recipe in one process and divided over many must compute the same.

The reference run notes the tokens that it draws; the others take these tokens, and compute everything else
themselves. So what differs is what they compute, and not what chance makes of a last bit.
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

from hflow.config import ModelConfig, RunConfig
from hflow.errors import ConfigError
from hflow.graph.ir import Graph, Level
from hflow.launch.compile import Compiled, compile_recipe, read_recipe
from hflow.launch.plan_request import cluster_hardware
from hflow.launch.run_recipe import RunEnvironment, run_compiled
from hflow.planner.backends import (
    BACKENDS,
    ENGINES,
    EngineKind,
    engine_kind,
    factories,
    model_parallel_backend,
)
from hflow.planner.cluster import device_of
from hflow.planner.ir import ClusterSpec
from hflow.planner.layout import Layout
from hflow.report.summary import RunSummary
from hflow.report.twin_text import MetricPair, TwinResult, WeightPair
from hflow.runtime.execution.metrics_log import read_metrics

if TYPE_CHECKING:
    from hflow.workers.ray.ray_actors import RayActors


# -------------------- The two configurations that a twin compares: one process that does everything, and
# a divided run.


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
    """The reference: one process, one device, the default backend; it saves every step."""
    return _placed(config, 1, BACKENDS[0], None, workers="inproc", save_every=1)


def divided(config: RunConfig, layout: Layout) -> RunConfig:
    """Every model on a model-parallel backend in this layout, on Ray workers; engines on all of them."""
    return _placed(config, layout.world, model_parallel_backend(), layout, workers="ray")


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
    return dataclasses.replace(model, dtype="fp32", gen=dataclasses.replace(model.gen, engine=_engine().name))


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


# -------------------- Holds what two runs left in their directories against each other.


COMPARED = ("loss", "grad_norm")
"""What of a train node's metrics must be equal; others, such as clipped fractions, count events."""


def compare(reference: RunSummary, twin: RunSummary, layout: str) -> TwinResult:
    """Losses and gradient norms of every step, and the weights after the last one.

    Args:
        reference: one process, which saved every step.
        twin: the divided run.
        layout: its name.
    """
    return TwinResult(layout, tuple(_metrics(reference, twin)), tuple(_weights(reference, twin)))


def _metrics(reference: RunSummary, twin: RunSummary) -> Iterator[MetricPair]:
    ours, theirs = _compared_values(reference), _compared_values(twin)
    nan = float("nan")
    for name in sorted({name for name, _ in [*ours, *theirs]}):
        scale = max((abs(value) for (named, _), value in ours.items() if named == name), default=0.0)
        for step in sorted({at for named, at in [*ours, *theirs] if named == name}):
            key = name, step
            yield MetricPair(name, step, ours.get(key, nan), theirs.get(key, nan), scale)


def _compared_values(summary: RunSummary) -> dict[tuple[str, int], float]:
    found = {}
    for row in read_metrics(summary.directory / "metrics.jsonl"):
        for name, value in row.items():
            if name.rpartition("/")[2] in COMPARED:
                found[name, int(row["step"] or 0)] = float("nan") if value is None else value
    return found


def _weights(reference: RunSummary, twin: RunSummary) -> Iterator[WeightPair]:
    first, last = (reference.directory / "checkpoints" / name for name in ("step-1", "latest"))
    for model in sorted(path.name for path in last.iterdir()):
        other = twin.directory / "checkpoints" / "latest" / model
        difference, moved = _distance(last / model, other), _distance(last / model, first / model)
        yield WeightPair(model, difference / moved if moved else float(difference > 0))


def _distance(a: Path, b: Path) -> float:
    """2-norm of the difference of two checkpoints; infinite where they hold other tensors."""
    ours, theirs = dict(_files(a)), dict(_files(b))
    if ours.keys() != theirs.keys():
        return float("inf")
    differences = (_read(ours[name], name) - _read(theirs[name], name) for name in ours)
    return math.sqrt(sum(float(difference.square().sum()) for difference in differences))


def _files(directory: Path) -> Iterator[tuple[str, Path]]:
    """Every tensor of a checkpoint, and the file that holds it."""
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            yield from ((name, file) for name in opened.keys())  # noqa: SIM118 - no mapping


def _read(file: Path, name: str) -> Tensor:
    with safe_open(file, "pt") as opened:
        tensor: Tensor = opened.get_tensor(name)
        return tensor.to(torch.float64)


LAYOUTS = ("d2t2", "t2p2", "d2p2", "d2t2p2")
"""What a recipe is divided by if nothing is said: all pairs of axes, and all three."""
AS_CONFIGURED = "as configured"
WORKER_BYTES = 1 << 30
"""Memory of one worker with a tiny model, on a CPU."""
LEAST_STEPS = 2
"""Weights are compared by how far they moved since the first step."""


@dataclass(frozen=True)
class Twin:
    """What was compared, and how it came out."""

    results: tuple[TwinResult, ...]
    notes: tuple[str, ...]
    """What both runs do otherwise than the configuration says."""


def run_twin(
    recipe: str | Path,
    overrides: Sequence[str],
    layouts: Sequence[str] | None,
    steps: int,
    tell: Callable[[str], None],
    processes: RayActors | None = None,
) -> Twin:
    """Run a recipe for some steps in one process, then divided, and compare.

    Args:
        recipe: path of its file.
        overrides: configuration as `key=value`.
        layouts: of all models, on megatron; None: as configured.
        steps: training steps, at least 2.
        tell: takes a line when a run begins.
        processes: worker processes to use; None: some are started, and ended after.

    Raises:
        HflowError: as a run does.
    """
    if steps < LEAST_STEPS:
        raise ConfigError(f"--steps is {steps}; a twin needs at least {LEAST_STEPS}")
    with TemporaryDirectory(prefix="hflow-twin-") as out:
        config, graph, _ = read_recipe(recipe, overrides)
        both = common(config, graph, steps, out)
        reference = compile_recipe(recipe, config=alone(dataclasses.replace(both, name="reference")))
        others = [
            (named, compile_recipe(recipe, config=dataclasses.replace(other, name="twin")))
            for named, other in _divisions(both, config, layouts)
        ]
        results = tuple(_compared(reference, others, tell, processes))
    return Twin(results, tuple(changes(graph, config)))


def default_layouts(recipe: str | Path, overrides: Sequence[str], tell: Callable[[str], None]) -> list[str]:
    """All pairs of axes and all three, as far as this machine has the devices or memory."""
    config, _, _ = read_recipe(recipe, overrides)
    most = _most_workers(cluster_hardware(config, recipe)[0])
    fitting = []
    for name in LAYOUTS:
        world = Layout.parse(name).world
        if world <= most:
            fitting.append(name)
        else:
            tell(f"{name} is left out: this machine cannot hold {world} workers")
    return fitting


def _most_workers(cluster: ClusterSpec) -> int:
    if cluster.device == "cpu":
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // WORKER_BYTES
    return cluster.devices_per_node


def _divisions(
    both: RunConfig, config: RunConfig, layouts: Sequence[str] | None
) -> Iterator[tuple[str, RunConfig]]:
    if layouts is None:
        yield AS_CONFIGURED, both
        return
    for name in layouts:
        yield str(Layout.parse(name)), divided(both, Layout.parse(name))


def _compared(
    reference: Compiled,
    others: Sequence[tuple[str, Compiled]],
    tell: Callable[[str], None],
    processes: RayActors | None,
) -> Iterator[TwinResult]:
    draws: dict[Any, Any] = {}
    tell("one process")
    expected = run_compiled(
        reference, False, RunEnvironment(_with(_engine().recording_factory, draws), is_quiet=True)
    )
    lent = processes or _processes(others)
    try:
        for name, other in others:
            tell(f"{name} on {other.plan.cluster.num_devices} workers")
            means = RunEnvironment(
                _with(_engine().replaying_factory, draws), _usable(other, lent), is_quiet=True
            )
            yield compare(expected, run_compiled(other, False, means), name)
    finally:
        if lent is not None and processes is None:
            asyncio.run(lent.close())


def _with(engine: Callable[..., Any] | None, draws: dict[Any, Any]) -> Mapping[str, Callable[..., Any]]:
    assert engine is not None
    return {**factories(), _engine().name: partial(engine, draws)}


def _engine() -> EngineKind:
    """Return the first engine that can replay the tokens that another run sampled."""
    return next(kind for kind in map(engine_kind, ENGINES) if kind.replaying_factory is not None)


def _processes(others: Sequence[tuple[str, Compiled]]) -> RayActors | None:
    """Processes for the largest of the runs that use Ray, with what any of them needs set."""
    from hflow.workers.process_setup import device_environment
    from hflow.workers.ray.ray_actors import RayActors

    plans = [other.plan for _, other in others if other.config.workers == "ray"]
    if not plans:
        return None
    cluster = max((plan.cluster for plan in plans), key=lambda cluster: cluster.num_devices)
    environments = [
        {name: value for plan in plans for name, value in device_environment(plan, worker).items()}
        for worker in range(cluster.num_devices)
    ]
    return RayActors(cluster, environments)


def _usable(compiled: Compiled, processes: RayActors | None) -> RayActors | None:
    return processes if compiled.config.workers == "ray" else None
