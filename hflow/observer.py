"""`Observer`: receives what a run reports, for a tracker or a notification of one's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class RunInfo:
    """A run that begins or continues."""

    name: str
    directory: Path
    num_steps: int
    config: Mapping[str, Any]
    """The composed configuration: dotted key -> value. It holds no secrets."""
    is_resumed: bool
    """Whether the run continues in the directory of an earlier start."""


class Observer:
    """Receive what a run reports: subclass it, override what you need, and list it in `Recipe(observers=)`.

    The methods are called one after the other, on a thread that no step waits for. One that raises is not
    called again; the run warns of it and continues. Only `start` is called before the run begins, and ends it
    when it raises.
    """

    def start(self, run: RunInfo) -> None:
        """Prepare for a run that begins or continues."""

    def on_step(self, step: int, values: Mapping[str, float]) -> None:
        """Receive the metrics of a training step, as in `metrics.jsonl`; steps count from 1.

        After a resume or a restart, the steps since the checkpoint come again.
        """

    def on_evaluation(self, step: int, values: Mapping[str, float]) -> None:
        """Receive the metrics of an evaluation after `step` completed steps."""

    def on_samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Receive the texts of some samples of a batch or an evaluation, or of refused samples.

        Rows are those of `samples/step-N.jsonl`; refused ones have the node as `refused_by`.
        """

    def on_refusal(self, node: str, reason: str, message: str) -> None:
        """Receive a sample that a node refused: `keep`, `failed`, ..., and the error of its body, if any."""

    def on_warning(self, warning: str) -> None:
        """Receive a warning of the run, in one line."""

    def on_end(self, reason: str) -> None:
        """Finish: the run is `done`, was `stopped`, or has `failed`."""
