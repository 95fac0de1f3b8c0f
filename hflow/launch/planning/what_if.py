"""`what_if`: the plan of a recipe beside the plans with one change each."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hflow.base.errors import ConfigError, PlanError
from hflow.launch.planning.compile import compile_read, simulated_period
from hflow.launch.planning.read_recipe import RecipeReader
from hflow.planner.diff import PlanDiff, diff_plans
from hflow.planner.forecast.figures import PlanFigures, plan_figures
from hflow.planner.plan.serialise import to_json
from hflow.planner.search import PastSearches


@dataclass(frozen=True)
class Changed:
    """A plan with changed settings. Either it cannot be planned, or it has figures and differences."""

    change: str
    """The settings, as the user wrote them."""
    figures: PlanFigures | None
    speed_up: float | None
    """The base's seconds a step over those of this plan; None if either is unknown."""
    diff: PlanDiff | None
    """All differences from the base."""
    decided_keys: tuple[str, ...] = ()
    """Settings that differ though the configuration does not set them: the plan decided them otherwise."""
    refusal: str | None = None
    """Why there is no plan."""


@dataclass(frozen=True)
class WhatIf:
    """A plan, and what changes of its settings would do."""

    base: PlanFigures
    rows: tuple[Changed, ...]

    def to_json(self) -> dict[str, Any]:
        """Return it as plain values for `json.dumps`."""
        rows = [{**asdict(row), "diff": row.diff.to_json() if row.diff else None} for row in self.rows]
        return {"base": asdict(self.base), "changes": rows}


def what_if(recipe: str | Path, overrides: Sequence[str], changes: Sequence[str]) -> WhatIf:
    """Plan a recipe, and again with each change: `key=value`, or several separated by spaces.

    Raises:
        ConfigError: for a change that is not `key=value`, an unknown key, or a value that does not fit.
        HflowError: if the recipe itself cannot be planned.
    """
    settings = [(change, _settings(change)) for change in changes]
    reader, searches = RecipeReader(recipe), PastSearches(simulated_period)
    configured = reader.read(overrides)  # a typing error is found before anything is planned
    changed = [(change, reader.read([*overrides, *values])) for change, values in settings]
    plan = compile_read(configured, searches=searches).plan
    base, before = plan_figures(plan), to_json(plan)
    rows = []
    for change, read in changed:
        try:
            compiled = compile_read(read, searches=searches)
        except (ConfigError, PlanError) as error:
            rows.append(Changed(change, None, None, None, refusal=str(error)))
            continue
        figures, diff = plan_figures(compiled.plan), diff_plans(before, to_json(compiled.plan))
        decided = _decided_keys(diff, compiled.set_keys)
        rows.append(Changed(change, figures, _speed_up(base, figures), diff, decided))
    return WhatIf(base, tuple(rows))


def _decided_keys(diff: PlanDiff, set_keys: Collection[str]) -> tuple[str, ...]:
    """Return the settings of both plans that differ, without those that the configuration sets."""
    settings = [change for change in diff.decided if change.topic == "setting"]
    in_both = [change.subject for change in settings if None not in (change.before, change.after)]
    return tuple(key for key in in_both if key not in set_keys)


def _settings(change: str) -> list[str]:
    """Return the settings of one change, `key=value`, `+key=value` or `~key`."""
    try:
        settings = shlex.split(change)
    except ValueError as error:
        raise ConfigError(f"--what-if {change!r}: {error}; close the quotation") from error
    if not settings or not all("=" in setting or setting.startswith("~") for setting in settings):
        raise ConfigError(f"--what-if {change!r} is not KEY=VALUE, as in schedule.max_staleness=4")
    return settings


def _speed_up(base: PlanFigures, changed: PlanFigures) -> float | None:
    """Return by how much more samples are trained in the same time."""
    if base.samples_per_second is None or changed.samples_per_second is None:
        return None
    return changed.samples_per_second / base.samples_per_second
