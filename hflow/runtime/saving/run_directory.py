"""The directory of one run and the paths of its files.

OUT/NAME/20260131-142500/     OUT/NAME/latest -> 20260131-142500
    config.yaml  plan.json  inputs.json  metrics.jsonl  trace.json  ledger.sqlite  summary.json, or error.txt
    metrics.columns (of each 100 rows)
    bodies.log (if a body printed something, or failed)  services.json (what requests to services have cost)
    engines/REPLICA-WORKER.log (of engines in processes of their own)
    samples/step-N.jsonl (later steps-A-B.jsonl.gz)  tensorboard/
    weights/ (while it runs: weights that engines load from disk)
    sample_log/ (while it runs: copies of samples that are on one worker only)
    checkpoints/step-280/MODEL/    checkpoints/latest -> step-280    checkpoints/best -> step-240
    trace-1.json (of the part before the run was resumed)  lock, activity.json (while it runs)  trackers.json
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hflow.base.durable_files import WriteError, replace_text
from hflow.base.errors import ConfigError
from hflow.base.json_text import parse_json
from hflow.runtime.saving.checkpoint import replace_link


@dataclass(frozen=True)
class RunDirectory:
    """The paths in a run's directory `path`."""

    path: Path

    @classmethod
    def create(cls, out: str | Path, name: str, config: str, plan: str) -> RunDirectory:
        """Make the directory `OUT/NAME/TIME` of a run that starts now.

        It appears with its configuration and plan, so that a run which is killed at once can be resumed.
        `config` and `plan` are the contents of `config.yaml` and `plan.json`.

        Raises:
            ConfigError: when `name` contains a slash, or the directory cannot be made.
        """
        if Path(name).name != name:
            raise ConfigError(f"name={name!r} is not the name of a directory. Remove the '/'.")
        parent = Path(out) / name
        try:
            parent.mkdir(parents=True, exist_ok=True)
            return cls(_make_fresh(parent / time.strftime("%Y%m%d-%H%M%S"), config, plan))
        except OSError as error:
            reason = error.strerror or str(error)
            raise ConfigError(
                f"cannot make a directory in out={str(out)!r}: {reason}. Set out to a directory that you can "
                "write to."
            ) from error

    def write_plan(self, config: str, plan: str) -> None:
        """Replace the configuration and the plan.

        Raises:
            WriteError: when a file cannot be written.
        """
        replace_text(self.config, config)
        replace_text(self.plan, plan)

    def link_latest(self) -> None:
        """Make `OUT/NAME/latest` link to this run, which begins now."""
        replace_link(self.path.parent / "latest", self.path.name)

    def remove(self) -> None:
        """Delete the directory, and `OUT/NAME` if it has no other run."""
        shutil.rmtree(self.path)
        if not any(self.path.parent.iterdir()):
            self.path.parent.rmdir()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other runs out of the directory.

        Raises:
            ConfigError: while a run uses it.
        """
        with (self.path / "lock").open("a+", encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                file.seek(0)
                raise ConfigError(
                    f"the run in {self.path} is still going (process {file.read().strip()}); stop it before "
                    "you resume it"
                ) from None
            file.truncate(0)
            file.write(f"{os.getpid()}\n")
            file.flush()
            yield

    @property
    def is_running(self) -> bool:
        """Whether a process works on the run."""
        file = self.path / "lock"
        if not file.is_file():
            return False
        with file.open(encoding="utf-8") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError:
                return True
        return False

    def keep_trace(self) -> None:
        """Rename the trace of the run's last part, so that the next part can write its own."""
        if self.trace.is_file():
            number = 1 + sum(1 for _ in self.path.glob("trace-*.json"))
            self.trace.rename(self.path / f"trace-{number}.json")

    @property
    def weights(self) -> Path:
        """Directory of weights that engines load from disk; each file is deleted after it is loaded."""
        return self.path / "weights"

    @property
    def sample_log(self) -> Path:
        """Directory of samples on workers that only generate, for the process that takes a worker's place."""
        return self.path / "sample_log"

    @property
    def config(self) -> Path:
        """The composed configuration as YAML."""
        return self.path / "config.yaml"

    @property
    def plan(self) -> Path:
        """The plan file: recipe, configuration and plan, as `hflow run --plan` reads it."""
        return self.path / "plan.json"

    @property
    def inputs(self) -> Path:
        """Fingerprints of the files that the run reads, see `launch.checkpoints.fingerprints`."""
        return self.path / "inputs.json"

    @property
    def metrics(self) -> Path:
        """The metrics, one JSON object per step."""
        return self.path / "metrics.jsonl"

    @property
    def tensorboard(self) -> Path:
        """Directory of TensorBoard event files."""
        return self.path / "tensorboard"

    @property
    def trace(self) -> Path:
        """What each worker did and when, as a Chrome trace."""
        return self.path / "trace.json"

    @property
    def activity(self) -> Path:
        """What the run does now, while it runs; a run that was killed leaves what it did last."""
        return self.path / "activity.json"

    @property
    def ledger(self) -> Path:
        """The history of every sample, as an SQLite database."""
        return self.path / "ledger.sqlite"

    @property
    def bodies(self) -> Path:
        """What bodies have printed and logged, and their tracebacks, see `records.body_log`."""
        return self.path / "bodies.log"

    @property
    def engine_logs(self) -> Path:
        """Directory of what engines in processes of their own have logged, a file for each."""
        return self.path / "engines"

    @property
    def services(self) -> Path:
        """What the run has spent at remote services, as JSON. No resume takes it back."""
        return self.path / "services.json"

    @property
    def samples(self) -> Path:
        """Directory of the texts of some samples, see `sample_texts`."""
        return self.path / "samples"

    @property
    def summary(self) -> Path:
        """The results, written when the run ends."""
        return self.path / "summary.json"

    @property
    def error(self) -> Path:
        """The error with which the run failed, if it did."""
        return self.path / "error.txt"

    @property
    def checkpoints(self) -> Path:
        """Directory of checkpoints."""
        return self.path / "checkpoints"

    def write_summary(self, values: Mapping[str, Any]) -> None:
        """Write `summary.json`.

        Raises:
            WriteError: when it cannot be written.
        """
        replace_text(self.summary, json.dumps(values, indent=2) + "\n")

    def write_error(self, text: str) -> None:
        """Write `error.txt`, unless the disk is full: what ended the run is more important."""
        with suppress(WriteError):
            replace_text(self.error, text + "\n")


def read_metrics(path: Path) -> list[dict[str, float | None]]:
    """Return the rows of a `metrics.jsonl` in the order in which they were written.

    A last line without an end, which a run is writing or was killed in, is left out.

    Raises:
        ConfigError: for a line that is not a row; names it.
    """
    *lines, _ = path.read_bytes().split(b"\n")
    return [metrics_row(path, line, number) for number, line in enumerate(lines, start=1)]


def metrics_row(path: Path, line: bytes, number: int) -> dict[str, float | None]:
    """Return the row of metrics in a line.

    Raises:
        ConfigError: for a line that is not a row; names it.
    """
    try:
        row = parse_json(line)
        damage = "" if _is_metrics_row(row) else "it must be an object of numbers with a step"
    except ValueError as error:
        damage = str(error)
    if damage:
        raise ConfigError(f"{path}:{number} is not a row of metrics: {damage}; remove the line")
    return dict(row)


def _is_metrics_row(row: Any) -> bool:
    return (
        isinstance(row, dict)
        and type(row.get("step")) is int
        and all(value is None or type(value) in (int, float) for value in row.values())
    )


def _make_fresh(path: Path, config: str, plan: str) -> Path:
    """Make `path`, or `path-2`, `path-3` ... if runs have started in the same second."""
    hidden = RunDirectory(path.with_name(f".{path.name}-{os.getpid()}"))
    shutil.rmtree(hidden.path, ignore_errors=True)  # of a process that was killed here and had the same id
    hidden.path.mkdir()
    try:
        hidden.tensorboard.mkdir()
        hidden.checkpoints.mkdir()
        hidden.write_plan(config, plan)
        return _renamed(hidden.path, path)
    except BaseException:
        shutil.rmtree(hidden.path, ignore_errors=True)
        raise


def _renamed(hidden: Path, path: Path) -> Path:
    candidate, number = path, 1
    while True:
        try:
            return hidden.rename(candidate)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
            number += 1
            candidate = path.with_name(f"{path.name}-{number}")
