"""Seconds of a step of candidates whose analytic period is only an estimate: they are simulated."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from hflow.planner.plan.forecast import Pace, SimulatedStep
from hflow.planner.plan.rows import Schedule
from hflow.planner.plan.workload import Workload
from hflow.planner.search.evaluate import Choice, Evaluator
from hflow.planner.search.explore import MIN_SPREAD_GAIN
from hflow.planner.search.partition import Blocks, overlaps
from hflow.planner.search.problem import SearchProblem

PeriodFunction = Callable[[Schedule, Mapping[str, float], Pace, Workload], SimulatedStep]
"""Return the step that the state machine reaches, given the schedule, the seconds of its nodes,
the pace of generation and the lengths of samples."""


NUM_ALTERNATIVES = 8
"""Choices that are tried besides the best ones of their divisions."""
NUM_SPREAD = 3
"""Choices with replicas in several groups that are simulated where others are possible."""
MIN_GAIN = 0.03
"""By so much an alternative must be faster to be taken: the few steps that are simulated differ from many by
up to 4 %."""


def by_seconds(
    evaluator: Evaluator,
    ranked: Sequence[Choice],
    simulate: PeriodFunction | None,
    most: int,
    alternatives: Mapping[Blocks, Sequence[Choice]] | None = None,
) -> list[tuple[Choice, float]]:
    """Return the best choice of each division with the seconds of a step, the fastest first.

    By its analytic period, an engine that just keeps up is as good as one that has time to wait for late
    responses. So alternatives are tried too, those first that would be fastest if they waited as much as the
    best of their division. One takes its place if it is clearly faster; it is not simulated if even its
    analytic period is not. Divisions with replicas in several groups are left out if they are not clearly
    faster than all others. `ranked` is sorted by analytic periods.

    Args:
        simulate: the source of seconds where analytic periods are estimates; None: estimates are returned.
        most: choices of `ranked` to simulate; the others are left out then.
    """
    if simulate is None or not is_estimate(evaluator.problem):
        return [(choice, choice.period) for choice in ranked]
    spread = [choice for choice in ranked if overlaps(choice.partition.blocks)]
    plain = [choice for choice in ranked if choice not in spread]
    if not plain:  # the user has placed replicas like this
        plain, spread = spread, []
    found = {c.partition.blocks: (c, step_seconds(evaluator, c, simulate)) for c in plain[:most]}
    others: list[tuple[float, Choice]] = []
    for blocks, (choice, seconds) in found.items():
        rows = (alternatives or {}).get(blocks, ())
        others += [(seconds * row.period / choice.period, row) for row in rows if row is not choice]
    fastest, num = min((seconds for _, seconds in found.values()), default=0.0), 0
    for _, other in sorted(others, key=lambda pair: pair[0]):
        if num == NUM_ALTERNATIVES:
            break
        if other.period >= fastest:  # which is the least that it takes
            continue
        num += 1
        blocks = other.partition.blocks
        slowest = found[blocks][1] * (1 - MIN_GAIN)
        if other.period >= slowest:
            continue
        seconds = step_seconds(evaluator, other, simulate)
        if seconds < slowest:
            found[blocks], fastest = (other, seconds), min(fastest, seconds)
    for choice in spread[:NUM_SPREAD]:
        limit = fastest * (1 - MIN_SPREAD_GAIN)
        if choice.period < limit and (seconds := step_seconds(evaluator, choice, simulate)) < limit:
            found[choice.partition.blocks] = choice, seconds
    return sorted(found.values(), key=lambda pair: pair[1])


def is_estimate(problem: SearchProblem) -> bool:
    """Return whether the analytic period is not exact; see `hflow.planner.forecast.period`."""
    return problem.base.schedule.settings.runs_ahead


def step_seconds(evaluator: Evaluator, choice: Choice, simulate: PeriodFunction | None) -> float:
    """Return the seconds of a step with a choice, simulated where its analytic period is an estimate."""
    pace = None
    if simulate is not None and is_estimate(evaluator.problem):
        pace = evaluator.pace(choice)
    if simulate is None or pace is None:
        return choice.period
    workload = evaluator.problem.workloads[evaluator.problem.events.stream.name]
    schedule = choice.partition.plan.schedule
    settings = replace(schedule.settings, max_concurrent=evaluator.in_flight(choice))
    return simulate(replace(schedule, settings=settings), choice.seconds, pace, workload).seconds
