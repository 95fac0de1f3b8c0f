"""The tracker of MLflow."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from hflow.base.errors import ConfigError
from hflow.observer import RunInfo
from hflow.trackers.interface import Tracker, TrackerKind, read_ids, write_id

DATABASES = ("sqlite", "postgresql", "mysql", "mssql")
"""How the tracking URI of a database begins."""
DATABASE_PACKAGES = ("sqlalchemy", "alembic")
"""Packages by which MLflow opens a database."""

CONNECT_SECONDS = 5.0
"""Longest wait for a tracking server to accept a connection."""
NUM_RETRIES = 3
"""Retries of a request to MLflow, unless MLFLOW_HTTP_REQUEST_MAX_RETRIES is set: 14 s of waiting in all. With
MLflow's own 7 a run whose server has gone waits for minutes at its end."""


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
        known = read_ids(run.directory).get("mlflow")
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
        write_id(run.directory, "mlflow", self._run_id)

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


def _unneeded(uri: str) -> tuple[str, ...]:
    return () if uri.startswith(DATABASES) else DATABASE_PACKAGES


TRACKER = TrackerKind("mlflow", MlflowTracker, ("mlflow", *DATABASE_PACKAGES), _unneeded)
