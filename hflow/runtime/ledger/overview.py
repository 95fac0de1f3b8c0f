"""`read_overview`: what a run refused and why, how often it went back, and some of its samples."""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hflow.runtime.ledger.query import select
from hflow.runtime.ledger.schema import COLUMNS, reading, survives

MAX_SAMPLES = 160
"""Samples of each stream that an overview holds: whole groups, at equal distances over the run."""


@dataclass(frozen=True)
class RefusedRow:
    """Samples that were refused or dropped for one reason."""

    stream: str
    node: str
    kind: str
    """`refused` or `dropped`."""
    reason: str
    count: int
    message: str
    """One of the errors; empty if there is none."""


@dataclass(frozen=True)
class RewindRow:
    """The run went back to a checkpoint."""

    step: int
    """Completed steps of the checkpoint."""
    steps_lost: int
    """Steps that had been completed after it."""


@dataclass(frozen=True)
class LedgerOverview:
    """What a report shows of a ledger."""

    ends: Mapping[str, int]
    """End -> samples; those without an end are `in flight`."""
    refused: tuple[RefusedRow, ...]
    """The most frequent first."""
    rewinds: tuple[RewindRow, ...]
    samples: tuple[Mapping[str, Any], ...]
    """Column -> value, of the chosen samples or of whole groups at equal distances over the run."""


def read_overview(path: Path, among: Collection[tuple[str, int]] = ()) -> LedgerOverview:
    """Return the overview of a ledger, also while its run writes it.

    Args:
        path: path of the ledger.
        among: stream and id of the samples to return; empty: some of all.

    Raises:
        ConfigError: when there is no ledger, or it is damaged.
    """
    with reading(path) as database:
        ends = database.execute(
            f"SELECT kind, COUNT(*) FROM ends AS e WHERE {survives('e')} GROUP BY kind ORDER BY 2 DESC"
        ).fetchall()
        (num_issued,) = database.execute(f"SELECT COUNT(*) FROM issued AS i WHERE {survives('i')}").fetchone()
        in_flight = num_issued - sum(count for _, count in ends)
        refused = database.execute(
            f"""
            SELECT s.name, COALESCE(n.name, ''), e.kind, COALESCE(e.reason, ''), COUNT(*),
                COALESCE(MAX(e.message), '')
            FROM ends AS e JOIN streams AS s ON s.id = e.stream LEFT JOIN nodes AS n ON n.id = e.node
            WHERE e.kind IN ('refused', 'dropped') AND {survives("e")}
            GROUP BY 1, 2, 3, 4 ORDER BY 5 DESC"""
        ).fetchall()
        rewinds = database.execute(
            """
            SELECT r.step, COALESCE((SELECT MAX(s.step) + 1 FROM steps AS s WHERE s.seq < r.seq
                AND NOT EXISTS (SELECT 1 FROM rewinds AS w WHERE w.seq < r.seq AND s.seq > w.position
                    AND s.seq < w.seq)), r.step) - r.step
            FROM rewinds AS r ORDER BY r.seq"""
        ).fetchall()
        return LedgerOverview(
            ends={**dict(ends), **({"in flight": in_flight} if in_flight else {})},
            refused=tuple(RefusedRow(*row) for row in refused),
            rewinds=tuple(RewindRow(step, max(0, lost)) for step, lost in rewinds),
            samples=tuple(select(path, among=among).to_json() if among else _samples(database)),
        )


def _samples(database: sqlite3.Connection) -> list[Mapping[str, Any]]:
    """Return whole groups of each stream, at equal distances over the run."""
    names = ", ".join(f'"{name}"' for name in COLUMNS)
    found: list[Mapping[str, Any]] = []
    for stream, name, size in database.execute(
        "SELECT id, name, group_size FROM streams ORDER BY is_trained DESC, id"
    ).fetchall():
        (num_groups,) = database.execute(
            "SELECT COALESCE(MAX(group_id) + 1, 0) FROM issued WHERE stream = ?", (stream,)
        ).fetchone()
        distance = max(1, -(-num_groups * size // MAX_SAMPLES))
        rows = database.execute(
            f"SELECT {names} FROM samples WHERE stream = ? AND group_id % ? = ? ORDER BY id",
            (name, distance, max(0, num_groups - 1) % distance),
        )
        found += [dict(zip(COLUMNS, row, strict=True)) for row in rows]
    return found
