"""`hflow why` and `hflow samples`: find the ledger of a run and query it."""

from __future__ import annotations

from pathlib import Path

from hflow.launch.find_run import find_run
from hflow.runtime.ledger.query import QueryResult, count, select
from hflow.runtime.ledger.sample_history import SampleHistory, read_history
from hflow.runtime.ledger.schema import COLUMNS

SAMPLE_COLUMNS = {name: description for name, (_, description) in COLUMNS.items()}
"""Column of the view `samples` -> its description."""


def why(run: str, sample: str) -> SampleHistory:
    """Return the history of one sample.

    Args:
        run: a run's directory, or NAME for the latest run in `runs/NAME`.
        sample: an id in the trained stream, or `STREAM/ID`.

    Raises:
        ConfigError: if there is no such run or sample.
    """
    return read_history(_ledger(run), sample)


def samples(run: str, where: str | None = None, limit: int | None = None) -> QueryResult:
    """Return the samples of a run that meet an SQL condition on the columns of the view `samples`.

    Args:
        run: as for `why`.
        where: the SQL condition; None: all samples.
        limit: maximum number of samples.

    Raises:
        ConfigError: if there is no such run, or the SQL is invalid.
    """
    return select(_ledger(run), where, limit)


def count_samples(run: str, where: str | None = None) -> int:
    """Return the number of samples that `samples` finds. Arguments and errors are those of `samples`."""
    return count(_ledger(run), where)


def _ledger(run: str) -> Path:
    return find_run(run, "ledger.sqlite").ledger
