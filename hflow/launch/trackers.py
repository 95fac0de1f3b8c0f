"""Trackers: observers that log a run to Weights & Biases or MLflow, as `report` asks."""

from __future__ import annotations

import json
import logging
import os
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from hflow.config.schema import ReportConfig
from hflow.dsl import missing_extra
from hflow.durable_files import replace_text
from hflow.errors import ConfigError
from hflow.observer import Observer, RunInfo

STATE_FILE = "trackers.json"
"""File in a run's directory: tracker -> its id of the run, with which a resumed run continues."""

DATABASES = ("sqlite", "postgresql", "mysql", "mssql")
"""How the tracking URI of a database begins. MLflow opens one with sqlalchemy and alembic."""

CONNECT_SECONDS = 5.0
"""Longest wait for a tracking server to accept a connection."""
NUM_RETRIES = 3
"""Retries of a request to MLflow, unless MLFLOW_HTTP_REQUEST_MAX_RETRIES is set: 14 s of waiting in all. With
MLflow's own 7 a run whose server has gone waits for minutes at its end."""


def check_trackers(report: ReportConfig) -> None:
    """Check that the libraries of the configured trackers are installed.

    Raises:
        ConfigError: for the first that is not.
    """
    for key in ("wandb", "mlflow"):
        target = getattr(report, key)
        database = ("sqlalchemy", "alembic") if key == "mlflow" and str(target).startswith(DATABASES) else ()
        problem = missing_extra(key, key, *database) if target is not None else None
        if problem is not None:
            raise ConfigError(f"report.{key} is set, but {problem}")


def open_trackers(report: ReportConfig) -> Iterator[Observer]:
    """Yield the configured trackers."""
    if report.wandb is not None:
        yield WandbTracker(report.wandb)
    if report.mlflow is not None:
        yield MlflowTracker(report.mlflow)


class Tracker(Observer):
    """An observer that `report` asks for."""

    key: str
    """The configuration key that asks for it."""


class WandbTracker(Tracker):
    """Log to Weights & Biases: metrics, configuration and the load of this machine, and nothing else.

    Code, output, git state and the command line stay here.

    Args:
        project: `PROJECT` or `ENTITY/PROJECT`.
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
        known = _read_ids(run.directory).get("wandb")
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
        _write_id(run.directory, "wandb", self._run.id)
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


class MlflowTracker(Tracker):
    """Log metrics and configuration to MLflow.

    The experiment has the name of the run, and the run in it that of the run's directory, which is a time.

    Args:
        uri: the tracking URI: a server, or a local database as `sqlite:///mlflow.db`.
    """

    key = "report.mlflow"

    def __init__(self, uri: str) -> None:
        self._uri = uri
        self._client: Any = None
        self._run_id = ""

    def start(self, run: RunInfo) -> None:
        """Begin a run of the experiment, or continue the one that the directory names."""
        _check_server(self._uri)
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", str(NUM_RETRIES))
        from mlflow import MlflowClient
        from mlflow.entities import Param

        logging.getLogger("mlflow").setLevel(logging.WARNING)  # it reports how it makes a database
        self._client = client = MlflowClient(tracking_uri=self._uri)
        known = _read_ids(run.directory).get("mlflow")
        if known is not None:
            self._run_id = known
            client.update_run(known, status="RUNNING")
            self._tag_changes(run.config)
            return
        experiment = client.get_experiment_by_name(run.name)
        experiment_id = client.create_experiment(run.name) if experiment is None else experiment.experiment_id
        self._run_id = client.create_run(experiment_id, run_name=run.directory.name).info.run_id
        params = [Param(key, str(value)[:MAX_PARAM]) for key, value in run.config.items()]
        for start in range(0, len(params), PARAMS_PER_BATCH):
            client.log_batch(self._run_id, params=params[start : start + PARAMS_PER_BATCH])
        _write_id(run.directory, "mlflow", self._run_id)

    def _tag_changes(self, config: Mapping[str, Any]) -> None:
        """Set a tag for each value that a resume changed: MLflow's parameters cannot change.

        A tag of an earlier resume takes the present value.
        """
        from mlflow.entities import RunTag

        data = self._client.get_run(self._run_id).data
        texts = {key: str(value)[:MAX_PARAM] for key, value in config.items()}
        tags = [
            RunTag(f"{CHANGED_TAG}{key}", text)
            for key, text in texts.items()
            if data.tags.get(f"{CHANGED_TAG}{key}", data.params.get(key)) != text
        ]
        for start in range(0, len(tags), PARAMS_PER_BATCH):
            self._client.log_batch(self._run_id, tags=tags[start : start + PARAMS_PER_BATCH])

    def on_step(self, step: int, values: Mapping[str, float]) -> None:
        """Log a step."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(name, value, now, step) for name, value in values.items()]
        self._client.log_batch(self._run_id, metrics=metrics)

    def on_evaluation(self, step: int, values: Mapping[str, float]) -> None:
        """Log an evaluation."""
        self.on_step(step, values)

    def on_end(self, reason: str) -> None:
        """Finish the run."""
        self._client.set_terminated(self._run_id, status=MLFLOW_STATUS.get(reason, "FINISHED"))


MAX_PARAM = 6000
"""Characters of the longest parameter that MLflow stores."""
PARAMS_PER_BATCH = 100
CHANGED_TAG = "resumed."
"""How the tags begin that have the values which a resume has changed, as in `resumed.steps`."""
MLFLOW_STATUS = {"done": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
"""How a run ended -> MLflow's word for it."""


def _check_server(uri: str) -> None:
    """Check that a tracking server accepts connections. Other URIs, and proxies, are not checked.

    Raises:
        ConfigError: if it does not, or if the URI names no host.
    """
    key = f"{MlflowTracker.key}={uri}"
    try:
        parts = urlsplit(uri)
        if parts.scheme not in ("http", "https"):
            return
        host, port = parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError as error:
        raise ConfigError(f"{key}: {error}; write http://HOST:PORT") from error
    if not host:
        raise ConfigError(f"{key} names no host; write http://HOST:PORT")
    if parts.scheme in getproxies() and not proxy_bypass(host):
        return
    try:
        socket.create_connection((host, port), CONNECT_SECONDS).close()
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"{key}: nothing answers there; start the server, correct the address, or remove the key"
        ) from error


def _read_ids(directory: Path) -> dict[str, str]:
    file = directory / STATE_FILE
    ids: dict[str, str] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return ids


def _write_id(directory: Path, tracker: str, run_id: str) -> None:
    ids = {**_read_ids(directory), tracker: run_id}
    replace_text(directory / STATE_FILE, json.dumps(ids, indent=2) + "\n")
