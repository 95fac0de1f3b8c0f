"""Seconds of a step of candidates whose analytic period is only an estimate: the state machine tells them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from hflow.planner.forecast import Pace
from hflow.planner.ir import Schedule
from hflow.planner.search.evaluate import Choice, Evaluator
from hflow.planner.search.problem import SearchProblem
from hflow.planner.workload import Workload

PeriodFunction = Callable[[Schedule, Mapping[str, float], Pace, Workload], float]
"""Return the seconds of a step that the state machine reaches, given the schedule, the seconds of its nodes,
the pace of generation and the lengths of samples."""


def by_seconds(
    evaluator: Evaluator, ranked: Sequence[Choice], simulate: PeriodFunction | None, most: int
) -> list[tuple[Choice, float]]:
    """Return choices with the seconds of a step, the fastest first.

    Args:
        evaluator: made the choices.
        ranked: the fastest first, by their analytic periods.
        simulate: gives the seconds where analytic periods are estimates; None: the estimates are returned.
        most: choices to simulate; the others are left out then.
    """
    if simulate is None or not is_estimate(evaluator.problem):
        return [(choice, choice.period) for choice in ranked]
    found = [(choice, _simulated(evaluator, choice, simulate)) for choice in ranked[:most]]
    return sorted(found, key=lambda pair: pair[1])


def is_estimate(problem: SearchProblem) -> bool:
    """Return whether the analytic period is not exact; see `hflow.planner.period`."""
    settings = problem.base.schedule.settings
    return settings.max_staleness > 0 or settings.sync_every > 1


def _simulated(evaluator: Evaluator, choice: Choice, simulate: PeriodFunction) -> float:
    pace = evaluator.pace(choice)
    if pace is None:
        return choice.period
    workload = evaluator.problem.workloads[evaluator.table.events.stream.name]
    return simulate(choice.partition.plan.schedule, choice.seconds, pace, workload)
