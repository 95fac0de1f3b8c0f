"""Puts the parts together: the only package that chooses concrete classes.

What `check` and `plan` need imports neither torch nor ray; `run` imports the rest when called.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hflow.launch.compiled import Compiled, check, compile_recipe, compose, plan, to_json
from hflow.report.summary import RunSummary

__all__ = ["Compiled", "check", "compile_recipe", "compose", "plan", "run", "to_json"]


def run(recipe: str | Path, overrides: Sequence[str] = (), live: bool | None = None) -> RunSummary:
    """Run a recipe to its end.

    Args:
        recipe: path of the recipe's file.
        overrides: configuration as `key=value`.
        live: a live panel (True), plain lines (False), or what fits the terminal (None).

    Raises:
        HflowError: for anything that a user can mend, before or during the run.
    """
    from hflow.launch.running import run_recipe

    return run_recipe(recipe, overrides, live)
