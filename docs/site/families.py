"""The table of families of models and what runs them, from the registries of the planner."""

from __future__ import annotations

from hflow.planner.checks.unrunnable import builds
from hflow.planner.plan.traits import BACKENDS, ENGINES
from hflow.shapes.architectures import ROUTERS, TITLES, UNSUPPORTED


def family_table() -> str:
    """Return a table with a row for each family."""
    names = (*BACKENDS, *ENGINES)
    head = f"| model | `model_type` | {' | '.join(f'`{name}`' for name in names)} | remarks |"
    return "\n".join([head, "|-" * (len(names) + 3) + "|", *(_row(family, names) for family in TITLES)])


def _row(family: str, names: tuple[str, ...]) -> str:
    router, remark = ROUTERS.get(family), ""
    if family in UNSUPPORTED:
        remark = f"it {UNSUPPORTED[family]}"
    elif router is not None:
        remark = f"balance by loss{' and bias' if router.has_bias else ''}"
    cells = ("yes" if builds(name, family) else "no" for name in names)
    return f"| {TITLES[family]} | `{family}` | {' | '.join(cells)} | {remark} |"
