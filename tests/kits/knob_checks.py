"""Runs the check that a library node makes of its knobs when a recipe is read."""

from __future__ import annotations

import inspect
from collections.abc import Collection
from typing import Any

from hflow.dsl.body_check import check_of


def knob_problem(node: Any, reads: Collection[str] = (), **knobs: Any) -> str | None:
    """Return what the check says about these knobs, with the defaults of the others."""
    parameters = inspect.signature(node).parameters.values()
    defaults = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    check = check_of(node)
    assert check is not None
    return check(defaults | knobs, reads)
