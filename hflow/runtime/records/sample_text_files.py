"""The files of kept texts: `samples/step-N.jsonl` in the run's directory, and `samples/steps-A-B.jsonl.gz`.

N counts steps from 1, as all that a person reads: the file has the batch of step N, with the evaluation of
version N and with what was refused during the step. A hundred steps go into one file when the run is a
hundred steps further, so that long runs do not make tens of thousands of files. What is written about such a
step later is in a file of its own again, which counts.
"""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from hflow.base.errors import ConfigError

STEPS_PER_FILE = 100
MOST_READ = 2_000
"""Steps that `read_some` reads at most, in whole files."""

SampleRow = Mapping[str, Any]
"""A line: `root`, `stream`, `id`, `group` and `step` of the sample as in the ledger, the `turns` of its text
(`role`, `text`, `trained`, and small copies of its `images`), and its numbers, such as the reward, as
`values`. A sample with several trajectories has a row for each; `root` is the stream whose ids the ledger
uses. A refused sample has `refused_by`, the node, too."""


SampleKey = tuple[str, int]
"""Root stream and id."""


def write_samples(directory: Path, number: int, rows: Sequence[SampleRow]) -> None:
    """Write rows to the file of `number` completed steps.

    Earlier rows of the same streams are replaced: refused ones by refused ones, and the others by the others.
    """
    directory.mkdir(exist_ok=True)
    replaced = {_kind(row) for row in rows}
    kept = [row for row in _read_step(directory, number) if _kind(row) not in replaced]
    _write(_single_path(directory, number), (*kept, *rows))
    if number % STEPS_PER_FILE == 0:
        _Files(directory).join_before(number - STEPS_PER_FILE)


def read_samples(directory: Path) -> list[SampleRow]:
    """Return all rows, in the order of steps.

    Raises:
        ConfigError: for a file that is damaged. So do the others.
    """
    return [row for rows in read_hundreds(directory) for row in rows]


def read_hundreds(directory: Path) -> Iterator[list[SampleRow]]:
    """Yield the rows of each hundred of steps that has any, in the order of steps."""
    files = _Files(directory)
    yield from filter(None, map(files.read, files.blocks))


def read_some(directory: Path) -> list[SampleRow]:
    """Return the rows of at most `MOST_READ` steps: of whole hundreds at equal distances, with the last."""
    files = _Files(directory)
    distance = -(-len(files.blocks) * STEPS_PER_FILE // MOST_READ) or 1
    return [row for block in files.blocks[::-1][::distance][::-1] for row in files.read(block)]


def read_newest(directory: Path, num_steps: int) -> list[SampleRow]:
    """Return the rows of the last steps that have any."""
    files = _Files(directory)
    return [row for number in sorted(files.single)[-num_steps:] for row in _read_step(directory, number)]


def read_around(directory: Path, step: int | None) -> list[SampleRow]:
    """Return the rows of a step and of those beside it; None: of the last hundreds."""
    if step is None:
        files = _Files(directory)
        return [row for block in files.blocks[-2:] for row in files.read(block)]
    return [row for number in (step - 1, step, step + 1) for row in _read_step(directory, number)]


def by_sample(rows: Iterable[SampleRow]) -> dict[SampleKey, list[SampleRow]]:
    """Return root stream and id of each sample -> its rows."""
    found: dict[SampleKey, list[SampleRow]] = {}
    for row in rows:
        found.setdefault(_key(row), []).append(row)
    return found


def drop_samples_after(directory: Path, number: int) -> None:
    """Delete the rows of more than `number` completed steps, as the run takes them again."""
    for path, steps in _Files(directory).with_steps():
        if steps.start > number:
            path.unlink()
        elif steps[-1] > number:
            _filter(path, lambda rows: [row for row in rows if row["step"] <= number])


def keep_samples(directory: Path, known_among: Callable[[Set[SampleKey]], Container[SampleKey]]) -> None:
    """Drop the rows of samples that are not known: the run gives their ids to other samples.

    `known_among` returns which of some samples are known. It is called for each file.
    """

    def kept(rows: Sequence[SampleRow]) -> list[SampleRow]:
        known = known_among({_key(row) for row in rows})
        return [row for row in rows if _key(row) in known]

    for path, _ in _Files(directory).with_steps():
        _filter(path, kept)


class _Files:
    """The files of a directory, by step and by hundreds of steps."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.single = {_number(path, "step-"): path for path in directory.glob("step-*.jsonl")}
        """Step -> the file of its own."""
        self._joined = {
            _number(path, "steps-") // STEPS_PER_FILE: path for path in directory.glob("steps-*.jsonl.gz")
        }

    @property
    def blocks(self) -> list[int]:
        """The hundreds that have rows, ascending: 0 is that of the steps 0 to 99."""
        return sorted({*self._joined, *(number // STEPS_PER_FILE for number in self.single)})

    def read(self, block: int) -> list[SampleRow]:
        """Return the rows of a hundred, in the order of steps."""
        rows = [row for row in self._read_joined(block) if row["step"] not in self.single]
        for number in self._single_of(block):
            rows += _rows(self.single[number])
        return sorted(rows, key=lambda row: int(row["step"]))

    def with_steps(self) -> Iterator[tuple[Path, range]]:
        """Yield each file with the steps that it may have."""
        yield from ((path, range(number, number + 1)) for number, path in self.single.items())
        for block, path in self._joined.items():
            yield path, range(block * STEPS_PER_FILE, (block + 1) * STEPS_PER_FILE)

    def join_before(self, end: int) -> None:
        """Join the files of steps before `end`, a multiple of a hundred, into those of hundreds."""
        for block in sorted({number // STEPS_PER_FILE for number in self.single if number < end}):
            _write(_joined_path(self._directory, block), self.read(block))
            for number in self._single_of(block):
                self.single[number].unlink()

    def _single_of(self, block: int) -> list[int]:
        return [number for number in sorted(self.single) if number // STEPS_PER_FILE == block]

    def _read_joined(self, block: int) -> list[SampleRow]:
        return _rows(self._joined[block]) if block in self._joined else []


def _filter(path: Path, kept: Callable[[Sequence[SampleRow]], list[SampleRow]]) -> None:
    """Keep these rows of a file, and no file without rows."""
    rows = _rows(path)
    left = kept(rows)
    if not left:
        path.unlink()
    elif len(left) < len(rows):
        _write(path, left)


def _single_path(directory: Path, number: int) -> Path:
    return directory / f"step-{number}.jsonl"


def _joined_path(directory: Path, block: int) -> Path:
    first = block * STEPS_PER_FILE
    return directory / f"steps-{first}-{first + STEPS_PER_FILE - 1}.jsonl.gz"


def _read_step(directory: Path, number: int) -> list[SampleRow]:
    """Return the rows of a step. It does not look at other files, of which there are more and more."""
    if (single := _single_path(directory, number)).is_file():
        return _rows(single)
    joined = _joined_path(directory, number // STEPS_PER_FILE)
    return [row for row in _rows(joined) if row["step"] == number] if joined.is_file() else []


def _write(path: Path, rows: Iterable[SampleRow]) -> None:
    """Write a file as a whole, or leave what there was."""
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    data = text.encode("utf-8", "backslashreplace")
    unfinished = path.with_suffix(".new")
    unfinished.write_bytes(gzip.compress(data, compresslevel=1, mtime=0) if path.suffix == ".gz" else data)
    os.replace(unfinished, path)


def _key(row: SampleRow) -> SampleKey:
    return row["root"], row["id"]


def _kind(row: SampleRow) -> tuple[str, bool]:
    return row["stream"], "refused_by" in row


def _number(path: Path, prefix: str) -> int:
    """Return the first number of a file's name; -1 if it has none."""
    text = path.name.removeprefix(prefix).partition(".")[0].partition("-")[0]
    return int(text) if text.isdecimal() else -1


def _rows(path: Path) -> list[SampleRow]:
    """Read a file. The step of a row is that of the file's name, or of several what the row says."""
    number = _number(path, "step-")
    try:
        data = path.read_bytes()
        text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8")
        rows = [json.loads(line) for line in text.splitlines()]
        required = ("turns", "root", "id", *(("step",) if number < 0 else ()))
        step = {} if number < 0 else {"step": number}
        return [{**row, **{key: row[key] for key in required}, **step} for row in rows]
    except (ValueError, KeyError, TypeError, EOFError, OSError, RecursionError, zlib.error) as error:
        raise ConfigError(f"{path} is damaged: {error}; delete it") from error
