"""The history of one sample, from the ledger's tables."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hflow.base.errors import ConfigError, nearest, shorten
from hflow.runtime.ledger.schema import COLUMNS, MAX_INTEGER, reading, survives

MAX_DIGITS = 100
"""Digits of the longest number that is looked up."""


@dataclass(frozen=True)
class NodeOutput:
    """A node was done with the sample or its group."""

    node: str
    field: str | None
    value: float | None
    """The number that it reported for the sample."""
    at: float
    """Seconds since the run's start."""


@dataclass(frozen=True)
class GroupMember:
    """Another member of the sample's group."""

    id: int
    end: str | None
    reason: str | None


@dataclass(frozen=True)
class WeightsUsed:
    """Weights that generated some of its tokens."""

    version: int
    replica: str
    digest: str
    """Checksum of the weights."""


@dataclass(frozen=True)
class SampleTrajectory:
    """One of the trajectories of a sample whose episode returned a list."""

    length: int
    """All its tokens."""
    tokens: int
    """Tokens that were generated, without those that an earlier trajectory has."""
    turns: int
    oldest: int | None
    newest: int | None


@dataclass(frozen=True)
class SampleRestart:
    """The sample was interrupted: its worker had failed, or its episode was replayed or began again."""

    at: float
    """Seconds since the run's start."""
    reason: str


@dataclass(frozen=True)
class SampleHistory:
    """What happened to one sample. Times are seconds since the run's start."""

    sample: Mapping[str, Any]
    """The sample's row of the view `samples`."""
    dataset: str | None
    segments: tuple[tuple[int, int], ...]
    """Consecutive tokens that one version generated: (version, number of tokens)."""
    weights: tuple[WeightsUsed, ...]
    """The versions that generated its tokens, on every generation replica that held them."""
    computed: tuple[NodeOutput, ...]
    mates: tuple[GroupMember, ...]
    bound_at: float | None
    """When its batch was formed."""
    max_lag: int | None
    """The largest lag that the plan lets a trained token have."""
    closing: str | None
    """How the run ended; None: it is not over, or was killed."""
    restarts: tuple[SampleRestart, ...] = ()
    drawn: str | None = None
    """Why a sampler chose its row; None: there was no sampler."""
    trajectories: tuple[SampleTrajectory, ...] = ()
    """The members of a sample whose episode returned a list, in its order."""

    def to_json(self) -> dict[str, Any]:
        """Return one object: the columns of the sample's row, and the other attributes."""
        attributes = asdict(self)
        row = dict(attributes.pop("sample"))
        return {**row, **attributes, "segments": [{"version": v, "tokens": n} for v, n in self.segments]}


def read_history(path: Path, name: str) -> SampleHistory:
    """Return the history of a sample: of an id of the trained stream, or of `STREAM/ID`.

    Raises:
        ConfigError: when there is no ledger, or no such sample in it.
    """
    with reading(path) as database:
        return _read(database, *_find(database, name))


def _find(database: sqlite3.Connection, name: str) -> tuple[int, int]:
    """Return the index of the stream and the sample's id."""
    stream_name, _, number = name.rpartition("/")
    streams = dict(database.execute("SELECT name, id FROM streams ORDER BY is_trained DESC, id"))
    if not (number.isascii() and number.isdecimal()) or len(number) > MAX_DIGITS:
        raise ConfigError(f"{shorten(name, 80)!r} is not a sample. Use a number, or STREAM/NUMBER.")
    stream_name = stream_name or next(iter(streams))
    if stream_name not in streams:
        hint = nearest(stream_name, streams)
        raise ConfigError(f"there is no stream {shorten(stream_name, 80)!r} among {', '.join(streams)}{hint}")
    sample = min(int(number), MAX_INTEGER)
    of_stream = f"FROM issued AS i WHERE stream = {streams[stream_name]} AND {survives('i')}"
    if database.execute(f"SELECT 1 {of_stream} AND sample = ?", (sample,)).fetchone() is None:
        first, last = database.execute(f"SELECT MIN(sample), MAX(sample) {of_stream}").fetchone()
        has = ": it has no samples yet" if first is None else f". It has samples {first} to {last}."
        raise ConfigError(f"{stream_name} has no sample {number}{has}")
    return streams[stream_name], sample


def _read(database: sqlite3.Connection, stream: int, sample: int) -> SampleHistory:
    names = ", ".join(f'"{name}"' for name in COLUMNS)
    stream_name, dataset, size = database.execute(
        "SELECT name, dataset, group_size FROM streams WHERE id = ?", (stream,)
    ).fetchone()
    values = database.execute(
        f"SELECT {names} FROM samples WHERE stream = ? AND id = ?", (stream_name, sample)
    ).fetchone()
    row = dict(zip(COLUMNS, values, strict=True))
    about = dict(database.execute("SELECT key, value FROM about"))
    return SampleHistory(
        sample=row,
        dataset=dataset,
        segments=tuple(
            database.execute(
                "SELECT version, tokens FROM segments AS g WHERE stream = ? AND sample = ? "
                f"AND {survives('g')} ORDER BY number",
                (stream, sample),
            )
        ),
        weights=_weights(database, stream, sample),
        computed=_computed(database, stream, sample, row["group_id"]),
        mates=_mates(database, stream_name, sample, row["group_id"] * size, size),
        bound_at=_bound_at(database, stream, row),
        max_lag=about["max_lag"],
        closing=_closing(database),
        restarts=tuple(
            SampleRestart(*row)
            for row in database.execute(
                "SELECT time / 1e3, reason FROM restarted AS r WHERE stream = ? AND sample = ? "
                f"AND {survives('r')} ORDER BY seq",
                (stream, sample),
            )
        ),
        drawn=_drawn(database, stream, row["group_id"]),
        trajectories=tuple(
            SampleTrajectory(*row)
            for row in database.execute(
                "SELECT length, tokens, turns, oldest, newest FROM trajectories AS t "
                f"WHERE stream = ? AND sample = ? AND {survives('t')} ORDER BY number",
                (stream, sample),
            )
        ),
    )


def _drawn(database: sqlite3.Connection, stream: int, group: int) -> str | None:
    row = database.execute(
        f"SELECT reason FROM drawn AS d WHERE stream = ? AND group_id = ? AND {survives('d')}",
        (stream, group),
    ).fetchone()
    return str(row[0]) if row else None


def _computed(database: sqlite3.Connection, stream: int, sample: int, group: int) -> tuple[NodeOutput, ...]:
    """Return the nodes that were done with the sample, or with its group while the sample belonged to it.

    Batch nodes of an evaluation are included although they run after the sample's end.
    """
    rows = database.execute(
        f"""
        SELECT n.name, n.field, c.value, c.time / 1e3 FROM nodes AS n JOIN computed AS c ON c.node = n.id
        AND c.key = CASE WHEN n.per_group THEN :group ELSE :sample END AND {survives("c")}
        WHERE n.stream = :stream AND NOT EXISTS (
            SELECT 1 FROM ends AS e WHERE e.stream = :stream AND e.sample = :sample AND e.seq < c.seq
            AND e.kind <> 'evaluated' AND {survives("e")})
        ORDER BY c.seq""",
        {"group": group, "sample": sample, "stream": stream},
    )
    return tuple(NodeOutput(*row) for row in rows)


def _weights(database: sqlite3.Connection, stream: int, sample: int) -> tuple[WeightsUsed, ...]:
    rows = database.execute(
        f"""
        SELECT DISTINCT c.version, c.replica, c.digest FROM commits AS c
        WHERE {survives("c")} AND c.version IN (
            SELECT g.version FROM segments AS g WHERE stream = ? AND sample = ? AND {survives("g")})
        ORDER BY c.version, c.replica""",
        (stream, sample),
    )
    return tuple(WeightsUsed(*row) for row in rows)


def _mates(
    database: sqlite3.Connection, stream: str, sample: int, first: int, size: int
) -> tuple[GroupMember, ...]:
    """Return the other members of a group, whose ids are consecutive."""
    rows = database.execute(
        'SELECT id, "end", reason FROM samples '
        "WHERE stream = ? AND id >= ? AND id < ? AND id <> ? ORDER BY id",
        (stream, first, first + size, sample),
    )
    return tuple(GroupMember(*row) for row in rows)


def _bound_at(database: sqlite3.Connection, stream: int, row: Mapping[str, Any]) -> float | None:
    if row["end"] != "trained":
        return None
    (seconds,) = database.execute(
        f"SELECT time / 1e3 FROM batches AS b WHERE stream = ? AND step = ? AND {survives('b')}",
        (stream, row["step"] - 1),
    ).fetchone()
    return float(seconds)


def _closing(database: sqlite3.Connection) -> str | None:
    row = database.execute(
        f"SELECT reason FROM closings AS c WHERE {survives('c')} ORDER BY seq DESC"
    ).fetchone()
    return str(row[0]) if row else None
