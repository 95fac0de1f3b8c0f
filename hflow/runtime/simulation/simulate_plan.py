"""`simulate_plan` runs a plan on a virtual clock, with the seconds and lengths of its forecast."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any

from hflow.base.errors import PlanError
from hflow.graph.ir import Level
from hflow.planner.forecast.figures import step_seconds
from hflow.planner.forecast.period import steady_period
from hflow.planner.forecast.period.step_graph import SteadyEvents
from hflow.planner.plan.forecast import Forecast, Pace, SimulatedStep
from hflow.planner.plan.rows import Plan, Schedule
from hflow.planner.plan.workload import Workload
from hflow.runtime.simulation.simulate import DurationFunction, response_seconds, simulate_run
from hflow.runtime.simulation.simulation_result import SimulatedRun

MIN_STEPS = 4
"""Steps that a steady state needs."""
DEFAULT_STEPS = 64
"""Steps that are simulated by default, unless they are too many samples."""
DEFAULT_SAMPLES = 100_000
"""About the most samples that are simulated by default. They take a few seconds."""
MAX_SAMPLES = 5_000_000
"""The most samples that are simulated. They take minutes."""

COMPARED_STEPS = 24
"""Steps that are simulated to compare two plans."""
COMPARED_SAMPLES = 3_000
"""About the most samples that are simulated to compare two plans."""


@dataclass(frozen=True)
class Simulation:
    """A plan's run on a virtual clock, and the times that it is compared with."""

    plan: Plan
    run: SimulatedRun
    num_steps: int
    seed: int
    generation_alone: float
    """Seconds to generate one batch, of the simulated lengths, on engines whose slots are always full."""
    training_alone: float
    """Seconds per step of the batch nodes, if samples and new weights took no time."""
    in_turns: tuple[tuple[str, float], ...]
    """Device group with engines -> seconds per step of generation and of the group's own batch nodes. They
    cannot run at the same time."""
    tokens_kept: float
    """Response tokens that interrupted samples kept, so that they were not generated again."""

    @property
    def limit(self) -> float:
        """The largest of these seconds. No run of this plan takes fewer per step."""
        return max(self.generation_alone, self.training_alone, *(seconds for _, seconds in self.in_turns))

    @property
    def period(self) -> float:
        """Seconds per step in the steady state."""
        return self.run.timeline.period()

    def to_json(self) -> dict[str, Any]:
        """Return plain values for `json.dumps`: seconds, shares of 1, and counts over the whole run."""
        run = self.run
        return {
            "recipe": self.plan.recipe,
            "digest": self.plan.digest,
            "steps": self.num_steps,
            "seed": self.seed,
            "seconds_per_step": self.period,
            "planned_seconds_per_step": step_seconds(self.plan)[0],
            "generation_alone": self.generation_alone,
            "training_alone": self.training_alone,
            "in_turns": dict(self.in_turns),
            "limit": self.limit,
            "samples_per_second": run.samples_per_second,
            "idle": dict(run.idle),
            "mean_generating": run.mean_generating,
            "staleness_bound": self.plan.staleness_bound,
            "staleness": [vars(row) for row in run.lags],
            "interruptions": run.interruptions,
            "tokens_kept": self.tokens_kept,
            "refused": dict(run.refused),
        }


def simulate_plan(plan: Plan, num_steps: int | None = None, seed: int = 0) -> Simulation:
    """Run a plan's trained stream on a virtual clock. Evaluations are left out, as in the plan's period.

    Args:
        plan: a plan with a forecast.
        num_steps: steps to simulate; None: enough to reach a steady state.
        seed: seed of the lengths of responses.

    Raises:
        PlanError: for a plan without a forecast, or too few steps.
    """
    if not plan.graph.learns:
        raise PlanError(f"{plan.recipe} learns nothing, so it has no steps to simulate; use hflow plan")
    forecast = _forecast_of(plan)
    schedule = _simulated_schedule(plan.schedule, num_steps)
    stream = schedule.streams[0]
    nodes: dict[str, float | DurationFunction] = {
        row.node: row.seconds for row in forecast.times if row.node != stream.source
    }
    pace, workload = forecast.pace, dict(forecast.workload)[stream.name]
    if pace is None:
        run, generation = simulate_run(schedule, nodes, slots={}, speeds={}), 0.0
    else:
        response = response_seconds(workload, pace.seconds_per_token, seed, pace.seconds_per_sample)
        run = simulate_run(
            schedule,
            {**nodes, stream.source: response},
            slots={stream.name: pace.slots},
            speeds={stream.name: pace.speed},
        )
        generation = _generation_alone(schedule, run, response, pace.slots)
    nodes_of: dict[str, tuple[str, ...]] = dict(schedule.orders)
    return Simulation(
        plan=plan,
        run=run,
        num_steps=schedule.num_steps,
        seed=seed,
        generation_alone=generation,
        training_alone=_seconds_alone(schedule, forecast, {node.name for node in schedule.nodes}),
        in_turns=tuple(
            (group, generation + _seconds_alone(schedule, forecast, nodes_of.get(group, ())))
            for group, _ in schedule.shared
        ),
        tokens_kept=run.seconds_kept / pace.seconds_per_token if pace else 0.0,
    )


def simulated_period(
    schedule: Schedule,
    seconds: Mapping[str, float],
    pace: Pace,
    workload: Workload,
    *,
    num_steps: int = COMPARED_STEPS,
    num_samples: int = COMPARED_SAMPLES,
) -> SimulatedStep:
    """Return the step that the state machine reaches on the virtual clock.

    To compare plans quickly, a large batch is simulated as a smaller one of which each sample represents
    several: slots and limits shrink with it.

    Args:
        schedule: what runs. Evaluations are left out.
        seconds: seconds of one execution of each node, of new weights of an engine, and of publishing them.
        num_samples: about the most samples to simulate.
    """
    return _simulated_step(schedule, tuple(seconds.items()), pace, workload, num_steps, num_samples)


@lru_cache(maxsize=256)
def _simulated_step(
    schedule: Schedule,
    seconds: tuple[tuple[str, float], ...],
    pace: Pace,
    workload: Workload,
    num_steps: int,
    num_samples: int,
) -> SimulatedStep:
    """Return the result of `simulated_period`. Many plans of a search differ in nothing that takes time."""
    part = replace(_steady_part(schedule), num_steps=num_steps)
    stream, settings = part.streams[0], part.settings
    batch = stream.batch or 1
    scale = max(1, min(batch, batch * stream.group_size * num_steps // num_samples))
    queue = None if settings.queue is None else max(batch // scale, settings.queue // scale)
    settings = replace(
        settings, max_concurrent=max(stream.group_size, settings.max_concurrent // scale), queue=queue
    )
    part = replace(part, streams=(replace(stream, batch=batch // scale),), settings=settings)
    streaming = {node.name for node in part.nodes if node.level is not Level.BATCH and node.groups}
    durations: dict[str, float | DurationFunction] = {
        name: value * (scale if name in streaming else 1) for name, value in seconds
    }
    drawn = response_seconds(workload, pace.seconds_per_token, 0, pace.seconds_per_sample)
    durations[stream.source] = drawn
    run = simulate_run(
        part,
        durations,
        slots={stream.name: max(1, pace.slots // scale)},
        speeds={stream.name: cache(lambda num_running: pace.speed(num_running * scale))},
        steady_only=True,
    )
    return SimulatedStep(run.timeline.period(), run.idle)


def trained_part(schedule: Schedule) -> Schedule:
    """Return a schedule without its side streams."""
    stream = schedule.streams[0]
    nodes = tuple(node for node in schedule.nodes if node.stream == stream.name)
    return replace(
        schedule,
        streams=(stream,),
        nodes=nodes,
        orders=_only({node.name for node in nodes}, schedule.orders),
        shared=_only(set(stream.replicas), schedule.shared),
    )


def _steady_part(schedule: Schedule) -> Schedule:
    """Return the trained part of a schedule in which nodes that start later run from the beginning.

    Few steps are simulated, and a steady state has these nodes (`after`) in it.
    """
    part = trained_part(schedule)
    repeats = SteadyEvents(part).repeats
    nodes = (replace(n, after=n.after % n.every) if repeats(n) else n for n in part.nodes)
    return replace(part, nodes=tuple(nodes))


def _only(
    names: set[str], rows: tuple[tuple[str, tuple[str, ...]], ...]
) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Return the rows with those members only; rows without members are left out."""
    filtered = ((group, tuple(name for name in members if name in names)) for group, members in rows)
    return tuple((group, members) for group, members in filtered if members)


def _forecast_of(plan: Plan) -> Forecast:
    unknown = [line.partition(":")[0] for line in plan.forecast.missing]
    if unknown:
        raise PlanError(
            f"the plan has no times to simulate: the size of {', '.join(unknown)} is unknown. Set "
            f"models.{unknown[0]}.path to a checkpoint, or model@models.{unknown[0]} to one of configs/model."
        )
    return plan.forecast


def _simulated_schedule(schedule: Schedule, num_steps: int | None) -> Schedule:
    """Return the part of a schedule that is simulated, with its number of steps; None: the default.

    Raises:
        PlanError: for too few steps, or too many samples.
    """
    num_steps = _default_steps(schedule) if num_steps is None else num_steps
    if num_steps < MIN_STEPS:
        raise PlanError(
            f"{num_steps} steps are too few to reach a steady state. Simulate at least {MIN_STEPS}, such as "
            f"--steps {DEFAULT_STEPS}."
        )
    step_samples = _step_samples(schedule)
    if num_steps * step_samples > MAX_SAMPLES:
        raise PlanError(
            f"{num_steps:,} steps of {step_samples:,} samples take too long to simulate. Simulate at most "
            f"{max(MIN_STEPS, MAX_SAMPLES // step_samples):,}, as with --steps {DEFAULT_STEPS}."
        )
    return replace(_steady_part(schedule), num_steps=num_steps)


def _generation_alone(
    schedule: Schedule, run: SimulatedRun, response: DurationFunction, num_slots: int
) -> float:
    """Return the mean seconds to generate a step's samples in slots that are always full.

    The mean is over the steady steps, from which the period comes: lengths differ from step to step.
    """
    steps, step_samples = run.timeline.steps(), _step_samples(schedule)
    samples = range(steps.start * step_samples, steps.stop * step_samples)
    return sum(map(response, samples)) / num_slots / len(steps)


def _step_samples(schedule: Schedule) -> int:
    """Return the samples of a batch of the trained stream."""
    stream = schedule.streams[0]
    return (stream.batch or 1) * stream.group_size


def _default_steps(schedule: Schedule) -> int:
    affordable_steps = DEFAULT_SAMPLES // _step_samples(schedule)
    return min(schedule.num_steps, DEFAULT_STEPS, max(4 * MIN_STEPS, affordable_steps))


def _seconds_alone(schedule: Schedule, forecast: Forecast, names: Collection[str]) -> float:
    """Return the seconds per step of a schedule in which nothing but these nodes takes time."""
    seconds = {row.node: row.seconds for row in forecast.times if row.node in names}
    period = steady_period(schedule, seconds)
    return period.seconds if period else 0.0
