"""Puts the parts together: the only package that chooses concrete classes.

What `check` and `plan` need imports neither torch nor ray; `run` imports the rest when called.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hflow.launch.compile import Compiled, check, compile_recipe, compose, plan
from hflow.launch.ledger_queries import SAMPLE_COLUMNS, count_samples, samples, why
from hflow.launch.lockfile import compare, compile_locked, compose_locked, document
from hflow.report.summary import RunSummary

if TYPE_CHECKING:
    from hflow.launch.twin_run import Twin
    from hflow.runtime.simulation.simulate_plan import Simulation

__all__ = [
    "SAMPLE_COLUMNS",
    "Compiled",
    "check",
    "compare",
    "compile_locked",
    "compile_recipe",
    "compose",
    "compose_locked",
    "count_samples",
    "document",
    "plan",
    "run",
    "run_plan",
    "samples",
    "simulate",
    "twin",
    "why",
]


def run(recipe: str | Path, overrides: Sequence[str] = (), live: bool | None = None) -> RunSummary:
    """Run a recipe to its end.

    Args:
        recipe: path of the recipe's file.
        overrides: configuration as `key=value`.
        live: a live panel (True), plain lines (False), or what fits the terminal (None).

    Raises:
        HflowError: for anything that a user can mend, before or during the run.
    """
    from hflow.launch.run_recipe import run_compiled

    return run_compiled(compile_recipe(recipe, overrides), live)


def run_plan(
    file: str | Path,
    recipe: str | Path | None = None,
    overrides: Sequence[str] = (),
    live: bool | None = None,
) -> RunSummary:
    """Run exactly the plan in a plan file, or that of an earlier run's directory, to its end.

    Args:
        file: what `hflow plan RECIPE --json` printed, or a run's directory.
        recipe: where the recipe lies now; None: where it lay.
        overrides: configuration to change that leaves the plan as it is, such as `out=elsewhere`.
        live: as for `run`.

    Raises:
        HflowError: as `run`, and where the plan is another one now.
    """
    from hflow.launch.run_recipe import run_compiled

    return run_compiled(compile_locked(file, recipe, overrides), live)


def simulate(
    recipe: str | Path, overrides: Sequence[str] = (), steps: int | None = None, seed: int = 0
) -> Simulation:
    """Run a recipe's plan on a virtual clock; no device is needed.

    Args:
        recipe: path of the recipe's file.
        overrides: configuration as `key=value`.
        steps: training steps; None: those of the plan, or as many of them as show the stride.
        seed: of the responses' lengths.

    Raises:
        HflowError: as `plan`, and where the plan has no seconds to simulate with.
    """
    from hflow.runtime.simulation.simulate_plan import simulate_plan

    asked = overrides if steps is None else (*overrides, f"steps={steps}")
    return simulate_plan(plan(recipe, asked), steps, seed)


def twin(
    recipe: str | Path,
    overrides: Sequence[str] = (),
    layouts: Sequence[str] | None = (),
    steps: int = 3,
    tell: Callable[[str], None] = lambda line: None,
) -> Twin:
    """Whether a recipe divided over many ranks computes what one process computes.

    Args:
        recipe: path of the recipe's file.
        overrides: configuration as `key=value`.
        layouts: layouts of all models, on megatron; empty: those that this machine can hold of
            `launch.twin.LAYOUTS`; None: as configured.
        steps: training steps.
        tell: takes a line when a run begins.

    Raises:
        HflowError: as `run`.
    """
    from hflow.launch.twin_run import default_layouts, run_twin

    if layouts is not None and not layouts:
        layouts = default_layouts(recipe, overrides, tell)
    return run_twin(recipe, overrides, layouts, steps, tell)
