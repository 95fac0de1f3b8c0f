"""`PlanFigures`: what a plan costs, in the few numbers by which plans are compared."""

from __future__ import annotations

from dataclasses import dataclass

from hflow.planner.forecast.memory import fullest_phase, unknown_models
from hflow.planner.plan.rows import Plan

SECONDS_PER_HOUR = 3600
SECONDS_PER_DAY = 24 * SECONDS_PER_HOUR


@dataclass(frozen=True)
class PlanFigures:
    """Estimated time, memory and cost of a plan. None: the plan has no figures to estimate it from."""

    cluster: str
    num_devices: int
    seconds_per_step: float | None
    samples_per_second: float | None
    days: float | None
    """Days of the whole run."""
    peak_bytes: int | None
    """Bytes of the fullest device, in the phase that needs most."""
    memory_bytes: int
    """Memory of a device."""
    dollars_per_hour: float | None
    """Price of all devices of the cluster."""
    dollars_per_step: float | None
    dollars: float | None
    """Dollars of the whole run."""
    is_lower_bound: bool = False
    """Whether seconds, days and dollars leave out waiting for late responses; samples per second are an upper
    bound then."""
    missing: tuple[str, ...] = ()
    """Reasons why figures are unknown, one line for each."""


def leaves_waiting_out(plan: Plan) -> bool:
    """Return whether the period leaves out waiting for late responses.

    That is so if generation runs ahead of new weights, or several steps use the same ones. A synchronous step
    takes as long as its longest response.
    """
    stream = plan.schedule.streams[0]
    lengths = dict(plan.forecast.workload).get(stream.name)
    settings = plan.schedule.settings
    if not stream.models or not settings.runs_ahead or lengths is None:
        return False
    return lengths.response_cv > 0 or settings.splits_batch


def step_seconds(plan: Plan) -> tuple[float | None, bool]:
    """Return the seconds of a step, and whether they are a lower bound.

    Where the period leaves out waiting for late responses, they are what the state machine takes, if the plan
    was simulated.
    """
    period = plan.forecast.period
    if period is None or not period.seconds:
        return None, False
    if period.simulated is not None:
        return max(period.seconds, period.simulated), False
    return period.seconds, leaves_waiting_out(plan)


def plan_figures(plan: Plan) -> PlanFigures:
    """Return the figures of a plan. Devices are paid for as long as the run takes, idle or not."""
    forecast, cluster, stream = plan.forecast, plan.cluster, plan.schedule.streams[0]
    seconds, is_lower_bound = step_seconds(plan)
    num_steps, num_samples = plan.schedule.num_steps, (stream.batch or 0) * stream.group_size
    prices = [
        (part.num_devices, kind.device.dollars_per_hour)
        for part, kind in zip(cluster.kinds, plan.hardware.kinds, strict=True)
    ]
    paid = [num * price for num, price in prices if price is not None]
    per_hour = sum(paid) if len(paid) == len(prices) else None
    per_step = None if per_hour is None or seconds is None else per_hour * seconds / SECONDS_PER_HOUR
    peak, memory = fullest_phase(() if unknown_models(plan) else forecast.memory, cluster)
    return PlanFigures(
        cluster=cluster.name,
        num_devices=cluster.num_devices,
        seconds_per_step=seconds,
        samples_per_second=None if seconds is None else num_samples / seconds,
        days=None if seconds is None else num_steps * seconds / SECONDS_PER_DAY,
        peak_bytes=None if peak is None else peak.total,
        memory_bytes=memory,
        dollars_per_hour=per_hour,
        dollars_per_step=per_step,
        dollars=None if per_step is None else num_steps * per_step,
        is_lower_bound=is_lower_bound,
        missing=forecast.missing,
    )
