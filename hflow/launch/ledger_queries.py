"""`hflow why` and `hflow samples`: finds a run's ledger and asks it."""

from __future__ import annotations

from pathlib import Path

from hflow.config import RunConfig
from hflow.errors import ConfigError, nearest
from hflow.runtime.execution.run_directory import RunDirectory
from hflow.runtime.ledger.query import QueryResult, count, select
from hflow.runtime.ledger.sample_history import SampleHistory, read_history
from hflow.runtime.ledger.schema import COLUMNS

SAMPLE_COLUMNS = {name: says for name, (_, says) in COLUMNS.items()}
"""Columns of the view `samples` -> what they say."""


def why(run: str, sample: str) -> SampleHistory:
    """What became of one sample, and why.

    Args:
        run: a run's directory, or the name of runs under `runs/`, whose latest is meant.
        sample: an id of the trained stream, or `STREAM/ID`.

    Raises:
        ConfigError: when there is no such run or sample.
    """
    return read_history(_ledger(run), sample)


def samples(run: str, where: str | None = None, limit: int | None = None) -> QueryResult:
    """Samples of a run for which SQL on the columns of its ledger's view `samples` holds.

    Args:
        run: as for `why`.
        where: the SQL; None: all samples.
        limit: samples at most.

    Raises:
        ConfigError: when there is no such run, or the SQL is none.
    """
    return select(_ledger(run), where, limit)


def count_samples(run: str, where: str | None = None) -> int:
    """How many samples of a run there are; arguments and errors as of `samples`."""
    return count(_ledger(run), where)


def _ledger(run: str) -> Path:
    out = Path(RunConfig.out)
    for path in (Path(run), Path(run) / "latest", out / run / "latest"):
        ledger = RunDirectory(path).ledger
        if ledger.is_file():
            return ledger
    names = [path.name for path in out.iterdir()] if out.is_dir() else []
    raise ConfigError(
        f"{run!r} is no run with a ledger; give a run's directory, such as {out}/NAME/latest, or the NAME of "
        f"runs in {out}/{nearest(run, names)}"
    )
