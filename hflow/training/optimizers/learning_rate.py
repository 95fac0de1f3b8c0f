"""Learning-rate schedules."""

from __future__ import annotations

import math

from hflow.config.schema import OptimConfig


def learning_rate(optim: OptimConfig, num_steps: int, total_steps: int) -> float:
    """Return the learning rate of the optimizer step that follows `num_steps` steps.

    It rises linearly over the warm-up, from `lr / warmup_steps` in the first step to `lr`, and then falls
    until it is `lr * min_lr_ratio` after `total_steps`, warm-up included (unless the schedule is constant).
    """
    if num_steps < optim.warmup_steps:
        return optim.lr * (num_steps + 1) / optim.warmup_steps
    if optim.schedule == "constant":
        return optim.lr
    progress = min((num_steps - optim.warmup_steps) / max(total_steps - optim.warmup_steps, 1), 1.0)
    decay = 1 - progress if optim.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return optim.lr * (optim.min_lr_ratio + (1 - optim.min_lr_ratio) * decay)
