"""`size`: the smallest or the cheapest cluster on which a recipe reaches a target."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hflow.base.errors import ConfigError, PlanError
from hflow.base.text import format_seconds
from hflow.config import RunConfig
from hflow.launch.planning.compile import Compiled, compile_read
from hflow.launch.planning.read_recipe import RecipeReader
from hflow.launch.planning.request import known_devices
from hflow.planner.forecast.figures import SECONDS_PER_DAY, PlanFigures, plan_figures
from hflow.planner.plan.cluster import MAX_DEVICES, device_of, parse_cluster
from hflow.planner.plan.hardware import Device
from hflow.planner.plan.rows import Plan

PER_MACHINE = 8
"""Devices of a machine in the clusters that a device's name means."""


@dataclass(frozen=True)
class Target:
    """What a cluster must reach. Exactly one is set."""

    seconds: float | None = None
    """Most seconds of a step."""
    samples: float | None = None
    """Fewest samples per second."""
    days: float | None = None
    """Most days of the whole run."""

    def __post_init__(self) -> None:
        values = [value for value in asdict(self).values() if value is not None]
        if len(values) != 1 or not (values[0] > 0 and math.isfinite(values[0])):
            raise ConfigError(
                "set exactly one of --seconds, --samples and --days to a number above 0, as in --days 3"
            )

    def is_reached(self, figures: PlanFigures) -> bool:
        """Return whether a plan is fast enough."""
        if self.samples is not None:
            return figures.samples_per_second is not None and figures.samples_per_second >= self.samples
        needed, most = (
            (figures.seconds_per_step, self.seconds)
            if self.seconds is not None
            else (figures.days, self.days)
        )
        return needed is not None and most is not None and needed <= most

    def __str__(self) -> str:
        if self.samples is not None:
            return f"{self.samples:g} samples/s"
        if self.seconds is not None:
            return f"{self.seconds:g} s a step"
        assert self.days is not None
        text = "1 day" if self.days == 1 else f"{self.days:g} days"
        return text if self.days >= 1 else f"{text} ({format_seconds(self.days * SECONDS_PER_DAY)})"


@dataclass(frozen=True)
class SizedCluster:
    """A cluster with the figures of the recipe's plan on it."""

    cluster: str
    num_devices: int
    figures: PlanFigures | None
    reaches: bool
    """Whether it reaches the target."""
    placement: str | None = None
    """Devices and layouts of the plan, as one `NAME=DEVICES:LAYOUT` for each replica."""
    refusal: str | None = None
    """Why there is no plan."""
    can_run: bool = True
    """Whether `run` accepts the plan."""


@dataclass(frozen=True)
class Sizes:
    """The clusters that were tried, and the one that was chosen."""

    target: Target
    is_cheapest: bool
    """Whether the cheapest cluster was asked for, rather than the smallest."""
    rows: tuple[SizedCluster, ...]
    chosen: SizedCluster | None
    compiled: Compiled | None
    """The recipe with its plan on the chosen cluster."""
    problem: str | None
    """Why none was chosen, and what to change."""

    def to_json(self) -> dict[str, Any]:
        """Return it as plain values for `json.dumps`."""
        return {
            "target": asdict(self.target),
            "cheapest": self.is_cheapest,
            "clusters": [asdict(row) for row in self.rows],
            "chosen": self.chosen.cluster if self.chosen else None,
            "problem": self.problem,
        }


def size(
    recipe: str | Path,
    overrides: Sequence[str],
    target: Target,
    *,
    on: Sequence[str] = (),
    most: int = 1024,
    cheapest: bool = False,
) -> Sizes:
    """Plan a recipe on clusters of several sizes, and choose the smallest or cheapest that is fast enough.

    The smallest has the fewest devices; of equals, the one whose whole run costs least is chosen. A
    cluster on which the plan can run comes before all on which it cannot.

    Args:
        recipe: path of the recipe's Python file.
        overrides: configuration as `key=value`; it names no cluster.
        target: what the cluster must reach.
        on: clusters, such as `h100-4x8`, and devices, such as `h100`, which mean 1, 2, 4, ... devices;
            empty: the device of the configured cluster.
        most: devices of the largest cluster that a device's name means.
        cheapest: choose by cost; every device must have a price.

    Raises:
        ConfigError: for settings that do not fit the recipe, or a device without a price if cost decides.
        PlanError: for an unknown cluster or device.
        RecipeError: for an error in the recipe.
    """
    if most > MAX_DEVICES:
        raise ConfigError(f"--most is {most}; it must be at most {MAX_DEVICES:,}")
    reader = RecipeReader(recipe)
    config = reader.read(overrides).config
    devices = known_devices(recipe)
    clusters = _clusters(on or (_device_of(config, devices),), most, devices)
    for name in dict.fromkeys(device_of(cluster) for cluster in clusters):
        if cheapest and devices[name].dollars_per_hour is None:
            raise ConfigError(
                f"{name} has no price; set dollars_per_hour in hardware/devices/{name}.yaml beside the "
                "recipe, or remove --cheapest"
            )
    tried = [_plan_on(reader, overrides, cluster, target, devices) for cluster in clusters]
    rows = tuple(row for row, _ in tried)
    fitting = [(row, compiled) for row, compiled in tried if row.reaches]
    if not fitting:
        return Sizes(target, cheapest, rows, None, None, _problem(target, rows))
    chosen, compiled = min(fitting, key=lambda found: _order(found[0], cheapest))
    return Sizes(target, cheapest, rows, chosen, compiled, None)


def _device_of(config: RunConfig, devices: dict[str, Device]) -> str:
    parse_cluster(config.cluster, devices)
    return device_of(config.cluster)


def _clusters(on: Sequence[str], most: int, devices: dict[str, Device]) -> list[str]:
    names: list[str] = []
    for name in on:
        names += _sizes_of(name, most) if name in devices else [name]
    for name in names:
        parse_cluster(name, devices)
    return list(dict.fromkeys(names))


def _sizes_of(device: str, most: int) -> Iterator[str]:
    num = 1
    while num <= most:
        yield f"{device}-{max(1, num // PER_MACHINE)}x{min(num, PER_MACHINE)}"
        num *= 2


def _plan_on(
    reader: RecipeReader, overrides: Sequence[str], cluster: str, target: Target, devices: dict[str, Device]
) -> tuple[SizedCluster, Compiled | None]:
    """Plan on one cluster. Without a plan, the second result is None."""
    num_devices = parse_cluster(cluster, devices).num_devices
    try:
        compiled = compile_read(reader.read([*overrides, f"cluster={cluster}"]))
    except PlanError as error:
        return SizedCluster(cluster, num_devices, None, False, refusal=str(error)), None
    plan = compiled.plan
    figures = plan_figures(plan)
    if figures.seconds_per_step is None:
        missing = "; ".join(plan.forecast.missing)
        return SizedCluster(cluster, num_devices, figures, False, refusal=missing), compiled
    reaches, can_run = target.is_reached(figures), not plan.unrunnable
    return SizedCluster(cluster, num_devices, figures, reaches, _placement(plan), can_run=can_run), compiled


def _placement(plan: Plan) -> str:
    return " ".join(
        f"{replica.name}={min(replica.workers)}-{max(replica.workers)}:{replica.layout}"
        for replica in plan.replicas
    )


def _order(row: SizedCluster, cheapest: bool) -> tuple[float, ...]:
    assert row.figures is not None
    dollars = math.inf if row.figures.dollars is None else row.figures.dollars
    seconds = row.figures.seconds_per_step or math.inf
    order = (dollars, row.num_devices, seconds) if cheapest else (row.num_devices, dollars, seconds)
    return (not row.can_run, *order)


def _problem(target: Target, rows: Sequence[SizedCluster]) -> str:
    """Return that no cluster is fast enough, and what the fastest reaches."""
    known = [row for row in rows if row.figures is not None and row.figures.samples_per_second is not None]
    if not known:
        return (
            f"the recipe has no plan on any of {len(rows)} clusters; on the last, {rows[-1].cluster}: "
            f"{rows[-1].refusal}"
        )
    best = max(known, key=lambda row: (row.figures and row.figures.samples_per_second) or 0)
    assert best.figures is not None
    assert best.figures.days is not None
    reached = (
        f"{best.figures.samples_per_second:.3g} samples/s, {best.figures.seconds_per_step:.3g} s a step, "
        f"{format_seconds(best.figures.days * SECONDS_PER_DAY)} for the whole run"
    )
    return (
        f"no cluster reaches {target}; the fastest, {best.cluster}, reaches {reached}. Allow larger clusters "
        "with --most, or other devices with --on, or see what limits the plan: hflow plan"
    )
