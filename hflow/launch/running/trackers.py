"""Trackers: observers that log a run to Weights & Biases or MLflow, as `report` asks.

`ObserverThread`: calls observers one after the other, so that a slow tracker does not slow a run.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from hflow.base.errors import ConfigError, HflowError, shorten
from hflow.base.files import replace_text
from hflow.config.schema import ReportConfig
from hflow.dsl import missing_extra
from hflow.observer import Observer, RunInfo
from hflow.processes.error_location import error_line

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


CLOSE_SECONDS = 60.0
"""Longest wait for observers when a run ends."""
MAX_ERROR = 300
"""Characters of an observer's error in a message. MLflow's are longer than a screen."""

_Call = Callable[[Observer], None]


class ObserverThread:
    """Passes what a run reports to observers.

    Args:
        observers: they are called in this order.
    """

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = list(observers)
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._failures: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="hflow-observers", daemon=True)
        self._is_closed = False

    def start(self, run: RunInfo) -> None:
        """Start the observers. If one cannot start, end those that have.

        Raises:
            ConfigError: if one cannot start.
        """
        with ExitStack() as started:
            for observer in self._observers:
                try:
                    observer.start(run)
                except HflowError:
                    raise
                except Exception as error:
                    raise ConfigError(
                        f"{_name(observer)} cannot start: {_error(error)}; correct its settings, or remove it"
                    ) from error
                started.callback(_end_failed, observer)
            started.pop_all()
        self._thread.start()

    def send(self, method: str, *arguments: Any) -> None:
        """Call a method of every observer, later."""
        self._calls.put(lambda observer: getattr(observer, method)(*arguments))

    def failures(self) -> Iterator[str]:
        """Yield a warning for each observer that has failed since the last call."""
        while not self._failures.empty():
            yield self._failures.get()

    def close(self, reason: str) -> None:
        """Call `on_end`, and wait until the observers have taken everything; safe to call twice."""
        if self._is_closed:
            return
        self._is_closed = True
        self.send("on_end", reason)
        self._calls.put(None)
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            names = ", ".join(map(_name, self._observers))
            self._failures.put(
                f"{names} did not finish within {CLOSE_SECONDS:.0f} s; what was not sent is lost"
            )

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            for observer in tuple(self._observers):
                try:
                    call(observer)
                except Exception as error:  # noqa: BLE001 - a user's observer may raise anything
                    self._observers.remove(observer)
                    self._failures.put(f"{_name(observer)} failed and is off: {_error(error)}")


def _end_failed(observer: Observer) -> None:
    """End an observer because another cannot start; that error is the one to report."""
    with suppress(Exception):
        observer.on_end("failed")


def _name(observer: Observer) -> str:
    return observer.key if isinstance(observer, Tracker) else type(observer).__name__


def _error(error: Exception) -> str:
    return shorten(error_line(error), MAX_ERROR)
