"""`hflow twin`: one recipe in one process and divided over many must compute the same.

The reference run notes the tokens that it draws; the others take these tokens, and compute everything else
themselves. So what differs is what they compute, and not what chance makes of a last bit.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from hflow.config import RunConfig
from hflow.errors import ConfigError
from hflow.launch.compiled import Compiled, compile_recipe, read_recipe
from hflow.launch.factories import FACTORIES, recording_engine, replaying_engine
from hflow.launch.hardware import cluster_hardware
from hflow.launch.running import Means, run_compiled
from hflow.launch.twin_compare import compare
from hflow.launch.twin_config import alone, changes, common, divided
from hflow.plan.ir import ClusterSpec
from hflow.plan.layout import Layout
from hflow.report.twin_text import TwinResult

if TYPE_CHECKING:
    from hflow.workers.ray_processes import RayProcesses

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
    processes: RayProcesses | None = None,
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
    processes: RayProcesses | None,
) -> Iterator[TwinResult]:
    draws: dict[Any, Any] = {}
    tell("one process")
    expected = run_compiled(reference, False, Means(_with(recording_engine, draws), is_quiet=True))
    lent = processes or _processes(others)
    try:
        for name, other in others:
            tell(f"{name} on {other.plan.cluster.num_devices} workers")
            means = Means(_with(replaying_engine, draws), _usable(other, lent), is_quiet=True)
            yield compare(expected, run_compiled(other, False, means), name)
    finally:
        if lent is not None and processes is None:
            asyncio.run(lent.close())


def _with(engine: Callable[..., Any], draws: dict[Any, Any]) -> Mapping[str, Callable[..., Any]]:
    return {**FACTORIES, "embedded": partial(engine, draws)}


def _processes(others: Sequence[tuple[str, Compiled]]) -> RayProcesses | None:
    """Processes for the largest of the runs that use Ray, with what any of them needs set."""
    from hflow.workers.environment import environment
    from hflow.workers.ray_processes import RayProcesses

    plans = [other.plan for _, other in others if other.config.workers == "ray"]
    if not plans:
        return None
    cluster = max((plan.cluster for plan in plans), key=lambda cluster: cluster.num_devices)
    environments = [
        {name: value for plan in plans for name, value in environment(plan, worker).items()}
        for worker in range(cluster.num_devices)
    ]
    return RayProcesses(cluster, environments)


def _usable(compiled: Compiled, processes: RayProcesses | None) -> RayProcesses | None:
    return processes if compiled.config.workers == "ray" else None
