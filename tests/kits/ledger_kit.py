"""A random run that keeps a ledger, and `LedgerScript`, which writes chosen histories into one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

from state_driver import Generating, World
from state_script import grpo

from hflow.graph.ir import Level
from hflow.planner.plan.rows import Schedule
from hflow.runtime import events as ev
from hflow.runtime.ledger import Ledger
from hflow.runtime.ledger.header import schedule_header
from hflow.runtime.ledger.query import select
from hflow.runtime.ledger.schema import open_ledger
from hflow.workers.interface import ComputeReady, SampleReady


class LedgerWorld(World):
    """Records in a ledger what the executor would record."""

    def __init__(self, schedule: Schedule, random: Random, rows: dict[str, int], ledger: Ledger, **more: Any):
        super().__init__(schedule, random, rows, **more)
        self.ledger = ledger
        self.issued: set[tuple[str, int]] = set()
        self.drawn: dict[tuple[str, int], list[int]] = {}
        self.position = 0
        self.saved_issued: set[tuple[str, int]] = set()

    def feed(self, event: ev.Event) -> None:
        match event:
            case ev.SampleDone(stream, sample):
                self.ledger.record_result(self._sample_ready(stream, sample))
            case ev.NodeDone(node, key, keep) if self.nodes[node].level is not Level.BATCH:
                self.ledger.record_result(ComputeReady(node, key, keep, float(key)))
        super().feed(event)

    def on_instruction(self, instruction: ev.Instruction) -> None:
        self.ledger.record_instruction(instruction)
        if isinstance(instruction, ev.TakeCheckpoint):
            self.position, self.saved_issued = self.ledger.position(), set(self.issued)
        if isinstance(instruction, ev.OpenGroup) and not instruction.is_continued:
            stream = instruction.stream
            row = instruction.group - self.base[stream]
            if row < self.rows.get(stream, 10**9):
                self.issued |= {(stream, sample) for sample in instruction.samples}
                self.ledger.record_issued(instruction, row, 0, self.state.parts.engine_version(stream))

    def _tick(self, entry: Generating) -> None:
        super()._tick(entry)
        if not entry.aborted and self.streams[entry.stream].replicas:
            version = min(self.version[replica] for replica in self.streams[entry.stream].replicas)
            self.drawn.setdefault((entry.stream, entry.sample), []).append(version)

    def _sample_ready(self, stream: str, sample: int) -> SampleReady:
        versions = self.drawn.pop((stream, sample), [])
        runs = [(version, versions.count(version)) for version in dict.fromkeys(versions)]
        oldest, newest = min(versions, default=-1), max(versions, default=-1)
        return SampleReady(stream, sample, 3 + len(versions), len(versions), oldest, newest, tuple(runs), 1)


@contextmanager
def kept(path: Path, schedule: Schedule) -> Iterator[Ledger]:
    """Open the ledger of a schedule, new or continued."""
    with Ledger(path, schedule_header(schedule)) as ledger:
        yield ledger


def ends_of(path: Path) -> dict[tuple[str, int], tuple[str, int]]:
    """Return (stream, sample) -> its end and step."""
    database = open_ledger(path)
    rows = database.execute('SELECT stream, id, "end", step FROM samples').fetchall()
    database.close()
    found = {(stream, sample): (end, step) for stream, sample, end, step in rows}
    assert len(found) == len(rows)
    return found


class LedgerScript:
    """Records histories of groups of two samples on the stream `gen`, scored by `score`."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger

    def issue(self, group: int, version: int = 0) -> None:
        self.ledger.record_issued(ev.OpenGroup("gen", group, self.members(group)), 10 + group, 0, version)

    def ready(self, sample: int, *runs: tuple[int, int], interruption: str = "") -> None:
        versions = [version for version, _ in runs]
        tokens = sum(num for _, num in runs)
        event = SampleReady("gen", sample, 7 + tokens, tokens, min(versions), max(versions), runs, 1)
        self.ledger.record_result(replace(event, interruption=interruption))

    def score(self, sample: int, value: float) -> None:
        self.ledger.record_result(ComputeReady("score", sample, True, value))

    def accept(self, group: int, *samples: int) -> None:
        self.ledger.record_result(ComputeReady("advantage", group))
        self.ledger.record_instruction(ev.Accept("gen", group, samples or self.members(group)))

    def form(self, step: int, *groups: int) -> None:
        samples = tuple(sample for group in groups for sample in self.members(group))
        self.ledger.record_instruction(ev.FormBatch("gen", step, samples, groups))

    def refuse(self, *samples: int, node: str, reason: ev.Refusal, message: str = "") -> None:
        self.ledger.record_instruction(ev.Refuse("gen", samples[0] // 2, samples, node, reason, message))

    def train(
        self, step: int, *groups: int, version: int = 0, on_batch: Callable[[], None] | None = None
    ) -> None:
        """Record the whole history of groups that a step trains; `on_batch` records more of the step."""
        for group in groups:
            self.issue(group, version)
            for sample in self.members(group):
                self.ready(sample, (version, 4))
                self.score(sample, 1.0)
            self.accept(group)
        self.form(step, *groups)
        if on_batch is not None:
            on_batch()
        self.ledger.record_instruction(ev.StepDone(step))

    @staticmethod
    def members(group: int) -> tuple[int, ...]:
        return (2 * group, 2 * group + 1)


@contextmanager
def recorded(path: Path, **more: Any) -> Iterator[LedgerScript]:
    """Open a ledger, new or continued, and close it at the end."""
    header = schedule_header(grpo(shared=False, **more))
    (stream,) = header.streams
    score = replace(header.nodes[1], field="reward", place="recipes/grpo.py:17")
    with Ledger(
        path,
        replace(
            header,
            streams=(replace(stream, judge="score", dataset="train"),),
            nodes=(header.nodes[0], score, *header.nodes[2:]),
        ),
    ) as ledger:
        yield LedgerScript(ledger)


def row_of(path: Path, sample: int) -> dict[str, Any]:
    """Return a sample's row of the view `samples`."""
    (row,) = select(path, f"id = {sample}").to_json()
    return row
