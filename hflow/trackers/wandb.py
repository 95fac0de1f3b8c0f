"""The tracker of Weights & Biases."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from hflow.base.errors import ConfigError
from hflow.observer import RunInfo
from hflow.trackers.interface import Tracker, TrackerKind, read_ids, write_id


class WandbTracker(Tracker):
    """Log to Weights & Biases, at `PROJECT` or `ENTITY/PROJECT`.

    Code, output, git state and the command line stay here. It gets metrics, configuration and the load of
    this machine, and nothing else.
    """

    key = "report.wandb"

    def __init__(self, project: str) -> None:
        self._entity, _, self._project = project.rpartition("/")
        self._run: Any = None

    def start(self, run: RunInfo) -> None:
        """Begin a run of the project, or continue the one that the directory names."""
        import wandb

        if os.environ.get("WANDB_MODE", "online") == "online" and not wandb.api.api_key:
            raise ConfigError(
                "report.wandb is set, but there is no login; run `wandb login`, or set WANDB_API_KEY, or "
                "WANDB_MODE=offline to log to files in the run's directory"
            )
        known = read_ids(run.directory).get("wandb")
        self._run = wandb.init(
            project=self._project,
            entity=self._entity or None,
            name=f"{run.name}/{run.directory.name}",
            id=known,
            resume="allow" if known else None,
            dir=str(run.directory),
            config=dict(run.config),
            settings=wandb.Settings(
                console="off", disable_code=True, disable_git=True, silent=True, x_disable_meta=True
            ),
        )
        write_id(run.directory, "wandb", self._run.id)
        # A resumed run repeats steps, which wandb's own step counter would drop.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def on_step(self, step: int, values: Mapping[str, float]) -> None:
        """Log a step."""
        self._run.log({"step": step, **values})

    def on_evaluation(self, step: int, values: Mapping[str, float]) -> None:
        """Log an evaluation."""
        self._run.log({"step": step, **values})

    def on_end(self, reason: str) -> None:
        """Finish the run."""
        self._run.finish(exit_code=int(reason == "failed"))


TRACKER = TrackerKind("wandb", WandbTracker, ("wandb",))
