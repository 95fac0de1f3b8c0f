"""`EvaluationOptions`: what `hflow eval` evaluates, and how."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EvaluationOptions:
    """What is evaluated, and how."""

    recipe: str | None = None
    """The recipe's file; None: that of the run that saved the checkpoint."""
    model: str | None = None
    """The model that a checkpoint of one model is for; None: that of its directory's name, or the only
    one."""
    streams: tuple[str, ...] = ()
    """Streams to evaluate; empty: those that are not trained, or else all."""
    num_samples: int | None = None
    """Also draw so many samples of every prompt."""
    temperature: float = 1.0
    """Temperature of these samples."""
    pass_at: tuple[int, ...] = ()
    """Values of k for pass@k; empty: powers of two up to the samples of a prompt."""
    threshold: float = 1.0
    """Lowest score with which a sample counts as correct."""
