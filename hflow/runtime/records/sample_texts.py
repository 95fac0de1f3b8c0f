"""The texts of a few samples of each batch, and of a few that nodes refused: which are read, and when.

Invariant: the tokens of a chosen sample stay on the workers until its text is read, and its numbers until
they are read. In this package a step is known by the version that it begins with: the step before's number.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

from hflow.data_plane.locations import DataLocations
from hflow.runtime.events import Refusal, Refuse
from hflow.runtime.execution.node_execution import StepBatch
from hflow.runtime.records.step_metrics import RunEvents
from hflow.workers.interface import SampleText, Workers


class SampleTextLog:
    """Reads the texts of samples when their batch is formed, and their numbers when it is done.

    Of each group, or sample, that a node refused it reads one text, before the data is freed.

    Args:
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
        """Read the text and the numbers of one of the samples, on a worker, that a node refused."""
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
