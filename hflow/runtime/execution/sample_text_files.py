"""The files `samples/step-N.jsonl` of a run's directory: the texts of a few samples of each batch.

N is the number of completed steps, as in `metrics.jsonl` and in the names of checkpoints: the batch of step k
is in `step-(k + 1).jsonl`, with the evaluation of version k + 1 and with what was refused during step k.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Container, Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from hflow.errors import ConfigError

SampleRow = Mapping[str, Any]
"""A line: `root`, `stream`, `id`, `group` and `step` of the sample as in the ledger, the `turns` of its text
(`role`, `text`, `trained`), and its numbers, such as the reward, as `values`. A sample with several
trajectories has a row for each; `root` is the stream whose ids the ledger uses. A refused sample has
`refused_by`, the node, too."""


SampleKey = tuple[str, int]
"""Root stream and id."""


def write_samples(directory: Path, number: int, rows: Sequence[SampleRow]) -> None:
    """Write rows to the file of `number` completed steps.

    Earlier rows of the same streams are replaced: refused ones by refused ones, and the others by the others.
    """
    directory.mkdir(exist_ok=True)
    path = directory / f"step-{number}.jsonl"
    replaced = {_kind(row) for row in rows}
    kept = [row for row in _read(path) if _kind(row) not in replaced] if path.is_file() else []
    _write(path, (*kept, *rows))


def read_samples(directory: Path) -> list[SampleRow]:
    """Return the rows of all files, in the order of steps.

    Raises:
        ConfigError: for a file that is damaged.
    """
    paths = directory.glob("step-*.jsonl")
    return [row for path in sorted(paths, key=_number) for row in _read(path)]


def by_sample(rows: Iterable[SampleRow]) -> dict[SampleKey, list[SampleRow]]:
    """Return root stream and id of each sample -> its rows."""
    found: dict[SampleKey, list[SampleRow]] = {}
    for row in rows:
        found.setdefault(_key(row), []).append(row)
    return found


def drop_samples_after(directory: Path, number: int) -> None:
    """Delete the files of more than `number` completed steps, as the run takes them again."""
    for path in list(directory.glob("step-*.jsonl")):
        if _number(path) > number:
            path.unlink()


def keep_samples(directory: Path, known_among: Callable[[Set[SampleKey]], Container[SampleKey]]) -> None:
    """Drop the rows of samples that are not known: the run gives their ids to other samples.

    Args:
        directory: of the files.
        known_among: returns which of these samples are known.
    """
    files = {path: _read(path) for path in directory.glob("step-*.jsonl")}
    known = known_among({_key(row) for rows in files.values() for row in rows})
    for path, rows in files.items():
        kept = [row for row in rows if _key(row) in known]
        if len(kept) < len(rows):
            _write(path, kept)


def _write(path: Path, rows: Iterable[SampleRow]) -> None:
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    unfinished = path.with_suffix(".new")
    unfinished.write_text(text, encoding="utf-8", errors="backslashreplace")
    os.replace(unfinished, path)


def _key(row: SampleRow) -> SampleKey:
    return row["root"], row["id"]


def _kind(row: SampleRow) -> tuple[str, bool]:
    return row["stream"], "refused_by" in row


def _number(path: Path) -> int:
    text = path.stem.removeprefix("step-")
    return int(text) if text.isdecimal() else -1


def _read(path: Path) -> list[SampleRow]:
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        return [{**row, "turns": row["turns"], "root": row["root"], "id": row["id"]} for row in rows]
    except (ValueError, KeyError, TypeError, OSError, RecursionError) as error:
        raise ConfigError(f"{path} is damaged: {error}; delete it") from error
