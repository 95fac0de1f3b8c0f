"""Learning-rate schedules."""

from __future__ import annotations

import math

from hflow.backends.interface import OptimSettings
from hflow.errors import BackendError

SCHEDULES = ("constant", "linear", "cosine")


def learning_rate(settings: OptimSettings, num_steps: int) -> float:
    """Return the learning rate of the optimizer step that follows `num_steps` steps.

    It rises linearly over the warm-up, from `lr / warmup_steps` in the first step to `lr`, and then falls to
    `lr * min_lr_ratio` over `total_steps` (unless the schedule is constant).
    """
    if num_steps < settings.warmup_steps:
        return settings.lr * (num_steps + 1) / settings.warmup_steps
    if settings.schedule == "constant":
        return settings.lr
    progress = min((num_steps - settings.warmup_steps) / settings.total_steps, 1.0)
    decay = 1 - progress if settings.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return settings.lr * (settings.min_lr_ratio + (1 - settings.min_lr_ratio) * decay)


def check_schedule(settings: OptimSettings) -> None:
    """Check that the schedule is known and, if it decays, has an end.

    Raises:
        BackendError: if not.
    """
    if settings.schedule not in SCHEDULES:
        raise BackendError(f"schedule {settings.schedule!r} is not one of {', '.join(SCHEDULES)}")
    if settings.schedule != "constant" and settings.total_steps <= 0:
        raise BackendError(f"schedule {settings.schedule!r} needs total_steps of at least 1")
