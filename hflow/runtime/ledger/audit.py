"""`audit` checks that a ledger is consistent, and that its run kept what the plan certifies."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

from hflow.runtime.ledger.schema import open_ledger, survives

NUM_EXAMPLES = 3
"""Samples that the text of a violation names."""

SAMPLE_TABLES = ("finished", "segments", "trajectories", "accepted", "ends")


def audit(path: Path) -> list[str]:
    """Return the violations of what holds for every run, in words; empty if there are none.

    - A sample is issued once, and all other rows of it come later.
    - It has at most one end; once the run is over, exactly one.
    - Samples that are trained or evaluated were finished and accepted before, and their step is complete.
    - No sample trains with a larger lag than the plan certifies.
    - Refusals and drops have a reason and a node.
    - Segments are numbered without gaps and have ascending versions, from the oldest to the newest.

    Rows that a rewind removed are ignored.

    Raises:
        ConfigError: when there is no ledger.
    """
    database = open_ledger(path)
    try:
        return [*_violations(database)]
    finally:
        database.close()


def _violations(database: sqlite3.Connection) -> Iterator[str]:
    for violation, sql in {**VIOLATIONS, **_not_issued(), **_without_end(database)}.items():
        samples = database.execute(f"SELECT DISTINCT stream, sample FROM ({sql}) ORDER BY 1, 2").fetchall()
        if samples:
            examples = (f"{_stream_name(database, s)}/{sample}" for s, sample in samples[:NUM_EXAMPLES])
            more = f" and {len(samples) - NUM_EXAMPLES} more" if len(samples) > NUM_EXAMPLES else ""
            yield f"{violation}: {', '.join(examples)}{more}"


def _stream_name(database: sqlite3.Connection, stream: int) -> str:
    (name,) = database.execute("SELECT name FROM streams WHERE id = ?", (stream,)).fetchone()
    return str(name)


def _not_issued() -> dict[str, str]:
    """Return the queries for samples with rows from before they were issued."""
    return {
        f"{table}, but not issued before": f"""
        SELECT stream, sample FROM {table} AS t WHERE {survives("t")} AND NOT EXISTS (
            SELECT 1 FROM issued AS i WHERE i.stream = t.stream AND i.sample = t.sample
            AND i.seq < t.seq AND {survives("i")})"""
        for table in SAMPLE_TABLES
    }


def _without_end(database: sqlite3.Connection) -> dict[str, str]:
    """Return the query for samples without an end; none while the run is not over."""
    is_over = "SELECT 1 FROM closings AS c WHERE c.seq > (SELECT COALESCE(MAX(seq), 0) FROM rewinds)"
    if not database.execute(is_over).fetchone():
        return {}
    return {
        "no end": f"""
        SELECT stream, sample FROM issued AS i WHERE {survives("i")} AND NOT EXISTS (
            SELECT 1 FROM ends AS e WHERE e.stream = i.stream AND e.sample = i.sample AND {survives("e")})"""
    }


def _lacks(table: str) -> str:
    """Return SQL for whether the end `e` has no row of a table before it."""
    return f"""NOT EXISTS (SELECT 1 FROM {table} AS t WHERE t.stream = e.stream AND t.sample = e.sample
        AND t.seq < e.seq AND {survives("t")})"""


def _repeated(table: str, *key: str) -> str:
    columns = ", ".join(("stream", "sample", *key))
    return f"SELECT * FROM {table} AS t WHERE {survives('t')} GROUP BY {columns} HAVING COUNT(*) > 1"


_USED = f"SELECT * FROM ends AS e WHERE e.kind IN ('trained', 'evaluated') AND {survives('e')}"
_SEGMENTS = f"""
    SELECT g.*, f.oldest, f.newest,
        LAG(g.number, 1, -1) OVER run AS before, LAG(g.version, 1, -1) OVER run AS older
    FROM segments AS g JOIN finished AS f ON f.stream = g.stream AND f.sample = g.sample AND f.seq = g.seq
    WHERE {survives("g")} WINDOW run AS (PARTITION BY g.stream, g.sample, g.seq ORDER BY g.number)"""

VIOLATIONS = {
    "issued twice": _repeated("issued"),
    "finished twice": _repeated("finished"),
    "accepted twice": _repeated("accepted"),
    "more than one end": _repeated("ends"),
    "used, but not finished before": f"{_USED} AND {_lacks('finished')}",
    "used, but not accepted before": f"{_USED} AND {_lacks('accepted')}",
    "accepted after its end": f"""
        SELECT a.stream, a.sample FROM accepted AS a JOIN ends AS e
        ON e.stream = a.stream AND e.sample = a.sample AND e.seq < a.seq
        WHERE {survives("a")} AND {survives("e")}""",
    "trained at a step that was not completed": f"""
        {_USED} AND e.kind = 'trained' AND NOT EXISTS (
            SELECT 1 FROM steps AS s WHERE s.step = e.step AND s.seq <= e.seq AND {survives("s")})""",
    "trained with a larger lag than the plan certifies": f"""
        SELECT e.stream, e.sample FROM ends AS e JOIN finished AS f
        ON f.stream = e.stream AND f.sample = e.sample JOIN streams AS s ON s.id = e.stream
        WHERE s.ages AND e.kind = 'trained' AND {survives("e")} AND {survives("f")}
        AND e.step - f.oldest > (SELECT value FROM about WHERE key = 'max_lag')""",
    "refused or dropped without a reason": f"""
        SELECT * FROM ends AS e WHERE {survives("e")} AND e.kind IN ('refused', 'dropped', 'unused')
        AND (e.reason IS NULL OR e.kind <> 'unused' AND e.node IS NULL)""",
    "segments whose numbers have gaps or whose versions do not ascend": f"""
        SELECT stream, sample FROM ({_SEGMENTS})
        WHERE number <> before + 1 OR version <= older OR tokens < 1""",
    "segments that do not reach from the oldest to the newest version": f"""
        SELECT stream, sample FROM ({_SEGMENTS}) GROUP BY stream, sample, seq
        HAVING MIN(version) <> oldest OR MAX(version) <> newest""",
}
"""Violation -> SQL that finds its samples, as (stream, sample)."""
