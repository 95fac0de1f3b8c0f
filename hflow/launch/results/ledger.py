"""`hflow why` and `hflow samples`: find the ledger of a run and query it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hflow.base.errors import ConfigError
from hflow.launch.targets import resolve
from hflow.runtime.ledger.query import QueryResult, count, select
from hflow.runtime.ledger.sample_history import SampleHistory, read_history
from hflow.runtime.ledger.schema import COLUMNS
from hflow.runtime.records.body_log import LoggedLine, read_body_lines
from hflow.runtime.records.sample_text_files import (
    SampleKey,
    SampleRow,
    by_sample,
    read_around,
    read_hundreds,
)
from hflow.runtime.saving.run_directory import RunDirectory


@dataclass(frozen=True)
class SampleTextsFound:
    """Samples that a query found, with their texts."""

    samples: QueryResult
    """Only those whose text was kept, hundred by hundred of the steps. If the limit ends the search, `total`
    leaves out later steps."""
    texts: Mapping[SampleKey, Sequence[SampleRow]]
    """Stream and id of each of them -> its texts, one for each of its trajectories."""
    total: int
    """How many samples meet the condition, with or without text."""

    def to_json(self) -> list[dict[str, Any]]:
        """Return one object per sample: its columns, and its `texts` by stream."""
        return [
            {**row, "texts": {text["stream"]: text["turns"] for text in self.texts[row["stream"], row["id"]]}}
            for row in self.samples.to_json()
        ]


SAMPLE_COLUMNS = {name: description for name, (_, description) in COLUMNS.items()}
"""Column of the view `samples` -> its description."""


def why(run: str, sample: str) -> SampleHistory:
    """Return the history of one sample, by its id in the trained stream or `STREAM/ID`.

    Raises:
        ConfigError: if there is no such run or sample.
    """
    return read_history(_find_ledger(run).ledger, sample)


def samples(run: str, where: str | None = None, limit: int | None = None) -> QueryResult:
    """Return at most `limit` samples of a run that meet an SQL condition on columns of the view `samples`.

    Raises:
        ConfigError: if there is no such run, or the SQL is invalid.
    """
    return select(_find_ledger(run).ledger, where, limit)


def why_texts(run: str, history: SampleHistory) -> list[SampleRow]:
    """Return the kept texts of the sample of a history; empty if its text was not kept."""
    texts = by_sample(read_around(_find_ledger(run).samples, history.sample["step"]))
    return texts.get((history.sample["stream"], history.sample["id"]), [])


def why_output(run: str, history: SampleHistory) -> list[LoggedLine]:
    """Return the lines that bodies have printed for a history's sample or its group, with tracebacks."""
    sample = history.sample
    found = read_body_lines(_find_ledger(run).bodies, sample["stream"], sample["id"], sample["group_id"])
    return list(found)


def samples_with_text(run: str, where: str | None = None, limit: int | None = None) -> SampleTextsFound:
    """Return those samples that meet a condition, as `samples`, whose text was kept.

    Raises:
        ConfigError: for the reasons of `samples`, and if the run kept no text at all.
    """
    directory = _find_ledger(run)
    rows: list[tuple[Any, ...]] = []
    texts: dict[SampleKey, list[SampleRow]] = {}
    total, is_exact, part = 0, True, None
    for part in map(by_sample, read_hundreds(directory.samples)):
        if limit is not None and len(rows) >= limit:
            is_exact = False
            break
        found = select(directory.ledger, where, None if limit is None else limit - len(rows), among=part)
        keys = [(row["stream"], row["id"]) for row in found.to_json()]
        rows, total = [*rows, *found.rows], total + found.total
        texts |= {key: part[key] for key in keys}
    if part is None:
        raise ConfigError(
            f"{directory.path} has no texts of samples (samples/step-N.jsonl); run the recipe with "
            "report.samples=8, and wait for its first step"
        )
    samples = QueryResult(tuple(rows), total, is_exact)
    return SampleTextsFound(samples, texts, count(directory.ledger, where))


def count_samples(run: str, where: str | None = None) -> int:
    """Return the number of samples that `samples` finds. Arguments and errors are those of `samples`."""
    return count(_find_ledger(run).ledger, where)


def _find_ledger(run: str) -> RunDirectory:
    """Return the directory of a run that has a ledger."""
    directory = resolve(run).require_run()
    if not directory.ledger.is_file():
        raise ConfigError(f"the run in {directory.path} has no {directory.ledger.name}; name another run")
    return directory
