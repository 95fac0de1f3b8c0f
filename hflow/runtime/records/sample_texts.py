"""The texts of a few samples of each batch, and of a few that nodes refused: which are read, and their files.

Invariant: the tokens of a chosen sample stay on the workers until its text is read, and its numbers until
they are read.

The files are `samples/step-N.jsonl` in the run's directory. N counts steps from 1, as all that a person
reads: the file has the batch of step N, with the evaluation of version N and with what was refused during the
step. In this package a step is known by the version that it begins with, N - 1.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Container, Iterable, Mapping, Sequence, Set
from pathlib import Path
from random import Random
from typing import Any

from hflow.base.errors import ConfigError
from hflow.data_plane.locations import DataLocations
from hflow.runtime.events import Refusal, Refuse
from hflow.runtime.execution.node_execution import StepBatch
from hflow.runtime.records.step_metrics import RunEvents
from hflow.workers.interface import SampleText, Workers


class SampleTextLog:
    """Reads the texts of samples when their batch is formed, and their numbers when it is done.

    Of each group, or sample, that a node refused it reads one text, before the data is freed.

    Args:
        workers: hold the samples.
        observer: receives the rows.
        num_samples: samples of each batch, and most refused ones of each step; 0: none.
    """

    def __init__(self, workers: Workers, observer: RunEvents, num_samples: int) -> None:
        self._workers = workers
        self._observer = observer
        self._num_samples = num_samples
        self._texts: dict[tuple[str, int], asyncio.Future[list[SampleText]]] = {}
        self._num_refused = 0
        """Refused samples of this step that are read or were read."""
        self._refused: list[tuple[SampleText, Refuse, Mapping[str, float]]] = []

    def add_batch(self, batch: StepBatch) -> None:
        """Expect that the texts of a batch are read."""
        if self._num_samples:
            self._texts[batch.stream, batch.step] = asyncio.get_running_loop().create_future()

    async def read(self, batch: StepBatch, locations: DataLocations) -> None:
        """Read the texts of some samples of a batch, chosen at random, the same in every run."""
        if not self._num_samples:
            return
        count = min(self._num_samples, len(batch.samples))
        chosen = sorted(Random(batch.step).sample(batch.samples, count))
        parts = await asyncio.gather(
            *(
                self._workers.sample_texts(worker, batch.stream, samples)
                for worker, samples in locations.by_home(chosen).items()
            )
        )
        self._texts[batch.stream, batch.step].set_result([text for part in parts for text in part])

    async def wait_until_read(self, batch: StepBatch) -> None:
        """Wait until the tokens of a batch are not needed any more."""
        if (texts := self._texts.get((batch.stream, batch.step))) is not None:
            await asyncio.shield(texts)

    async def finish(self, batch: StepBatch, locations: DataLocations, *, is_trained: bool) -> None:
        """Read the numbers of the chosen samples, and report the rows."""
        if not self._num_samples:
            return
        texts = await self._texts.pop((batch.stream, batch.step))
        samples = sorted({text.sample for text in texts})
        parts = await asyncio.gather(
            *(
                self._workers.sample_values(worker, batch.stream, ids)
                for worker, ids in locations.workers_of(samples).items()
            )
        )
        values: dict[int, dict[str, float]] = {sample: {} for sample in samples}
        for part in parts:
            for sample, numbers in part.items():
                values[sample].update(numbers)
        number = batch.step + is_trained
        rows = [_row(text, batch.stream, number, values[text.sample]) for text in texts]
        self._observer.on_samples(number, sorted(rows, key=lambda row: row["id"]))

    async def read_refused(self, refusal: Refuse, worker: int) -> None:
        """Read the text and the numbers of one of the samples that a node refused.

        Args:
            refusal: refusals of samples whose data has not been freed.
            worker: the worker that holds the samples.
        """
        is_told = refusal.reason in (Refusal.KEEP, Refusal.FAILED, Refusal.TIMEOUT)
        if not is_told or self._num_refused >= self._num_samples:
            return
        self._num_refused += 1
        sample = refusal.samples[:1]
        texts, values = await asyncio.gather(
            self._workers.sample_texts(worker, refusal.stream, sample),
            self._workers.sample_values(worker, refusal.stream, sample),
        )
        self._refused += [(text, refusal, values.get(text.sample, {})) for text in texts]

    def report_refused(self, step: int) -> None:
        """Report the rows of what was refused since the last call, when a step is done or the run ends."""
        refused, self._refused, self._num_refused = self._refused, [], 0
        rows = [
            {**_row(text, refusal.stream, step + 1, values), "refused_by": refusal.node}
            for text, refusal, values in refused
        ]
        self._observer.on_samples(step + 1, sorted(rows, key=lambda row: (row["root"], row["id"])))


def _row(text: SampleText, root: str, step: int, values: Mapping[str, float]) -> dict[str, Any]:
    turns: Sequence[Mapping[str, Any]] = [
        {
            "role": turn.role,
            "text": turn.text,
            "trained": turn.is_trained,
            **({"tokens": turn.tokens} if turn.tokens else {}),
            **({"images": turn.images} if turn.images else {}),
        }
        for turn in text.turns
    ]
    return {
        "root": root,
        "stream": text.stream,
        "id": text.sample,
        "group": text.group,
        "step": step,
        "turns": turns,
        "values": dict(sorted(values.items())),
    }


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
    path = directory / f"step-{number}.jsonl"
    replaced = {_kind(row) for row in rows}
    kept = [row for row in _read(path) if _kind(row) not in replaced] if path.is_file() else []
    _write(path, (*kept, *rows))


def read_samples(directory: Path, num_files: int | None = None) -> list[SampleRow]:
    """Return the rows of files, in the order of steps.

    Args:
        directory: the directory of the files.
        num_files: read so many of the last ones; None: all.

    Raises:
        ConfigError: for a file that is damaged.
    """
    paths = sorted(directory.glob("step-*.jsonl"), key=_number)
    return [row for path in paths[-num_files if num_files else 0 :] for row in _read(path)]


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
        directory: the directory of the files.
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
        required = ("turns", "root", "id")
        return [{**row, **{key: row[key] for key in required}, "step": _number(path)} for row in rows]
    except (ValueError, KeyError, TypeError, OSError, RecursionError) as error:
        raise ConfigError(f"{path} is damaged: {error}; delete it") from error
