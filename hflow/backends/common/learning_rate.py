"""The learning rate of each optimizer step."""

from __future__ import annotations

import math

from hflow.backends.interface import OptimSettings
from hflow.errors import BackendError

SCHEDULES = ("constant", "linear", "cosine")


def learning_rate(settings: OptimSettings, num_steps: int) -> float:
    """Learning rate of the step after `num_steps` steps.

    It rises linearly to `lr` over the warm-up, the first step having `lr / warmup_steps`, and goes
    to `lr * min_lr_ratio` over the next `total_steps`.
    """
    if num_steps < settings.warmup_steps:
        return settings.lr * (num_steps + 1) / settings.warmup_steps
    if settings.schedule == "constant":
        return settings.lr
    progress = min((num_steps - settings.warmup_steps) / settings.total_steps, 1.0)
    left = 1 - progress if settings.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return settings.lr * (settings.min_lr_ratio + (1 - settings.min_lr_ratio) * left)


def check_schedule(settings: OptimSettings) -> None:
    """Refuse a schedule that is none, or has no end.

    Raises:
        BackendError: naming what is wrong.
    """
    if settings.schedule not in SCHEDULES:
        raise BackendError(f"schedule {settings.schedule!r} is not one of {', '.join(SCHEDULES)}")
    if settings.schedule != "constant" and settings.total_steps <= 0:
        raise BackendError(f"schedule {settings.schedule!r} needs total_steps of at least 1")
