"""Runs the check that a library node makes of its knobs when a recipe is read."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from hflow.dsl.bodies import check_of


def knob_problem(node: Any, reads: Collection[str] = (), **knobs: Any) -> str | None:
    """Return what the check says about these knobs and options, with the defaults of the others."""
    check, definition = check_of(node), node.__hflow__
    assert check is not None
    return check(definition.kind.option_values | definition.knobs | knobs, reads)
