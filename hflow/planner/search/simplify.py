"""`simplified`: a choice with the defaults of all settings that gain nothing."""

from __future__ import annotations

import math
from collections.abc import Iterator

from hflow.planner.search.evaluate import Choice, Evaluator
from hflow.planner.search.options import MIN_DIFFERENCE, ReplicaOption


def simplified(evaluator: Evaluator, choice: Choice) -> Choice:
    """Return the choice with as many default settings as fit and cost no time."""
    limit = choice.period * (1 + MIN_DIFFERENCE)
    for before in choice.options:
        for option in _defaults(evaluator, before):
            groups = evaluator.replaced(choice, option)
            if groups is None:
                continue
            other = evaluator.choice(choice.partition.blocks, choice.devices, groups, math.inf)
            if other is not None and other.period <= limit:
                choice = other
                break
    return choice


def _defaults(evaluator: Evaluator, option: ReplicaOption) -> Iterator[ReplicaOption]:
    """Yield a replica's option with all settings as configured, if it is not that already."""
    config = evaluator.problem.config(option.name)
    if config != option.config:
        yield evaluator.table.option(option.replica, config)
