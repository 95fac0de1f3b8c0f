"""Cost of the ledger for the controller's event loop, at 10,000 samples per second.

    python -m benchmarks.speed.ledger

A loop records samples with the calls of the executor: groups of eight, two segments per sample, a reward, a
group node, batches of 512. Between these calls it does other Python work, as a controller does, so that the
writer thread competes for the interpreter lock. CPU seconds of the loop's thread
are compared with those of the same loop without a ledger; `rows` inserts row by row.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.lib import harness
from hflow.runtime.events import Accept, FormBatch, OpenGroup, StepDone
from hflow.runtime.ledger import Header, Ledger, audit, writer
from hflow.runtime.ledger.header import NodeRow, StreamRow
from hflow.workers.interface import ComputeReady, SampleReady

GROUP = 8
BATCH = 64
"""Groups a step."""
TICK = 0.01
"""Seconds from one turn of the loop to the next."""
BUSY = 0.5
"""Part of each turn that the loop computes."""

HEADER = Header(
    streams=(StreamRow("gen", "gen", "train", GROUP, True, True, "score"),),
    nodes=(
        NodeRow("gen", "gen", False),
        NodeRow("score", "gen", False, "reward"),
        NodeRow("advantage", "gen", True),
    ),
    max_lag=8,
)


class Lives:
    """Lives of one group after the other, told to a ledger where there is one."""

    def __init__(self, ledger: Ledger | None, batch: int = BATCH) -> None:
        self._batch = batch
        self._issued: Callable[..., Any] = ledger.record_issued if ledger else _ignore
        self._reported: Callable[..., Any] = ledger.record_result if ledger else _ignore
        self._decided: Callable[..., Any] = ledger.record_instruction if ledger else _ignore
        self.num_groups = 0

    def tell(self) -> None:
        """One group's life."""
        group = self.num_groups
        self.num_groups += 1
        step = group // self._batch
        version = max(0, step - 1)
        samples = tuple(range(group * GROUP, (group + 1) * GROUP))
        self._issued(OpenGroup("gen", group, samples), group, 0, version)
        for sample in samples:
            runs = ((version, 100), (version + 1, 28)) if step else ((0, 128),)
            newest = runs[-1][0]
            self._reported(SampleReady("gen", sample, 160, 128, version, newest, runs, 1))
            self._reported(ComputeReady("score", sample, True, 1.0))
        self._reported(ComputeReady("advantage", group))
        self._decided(Accept("gen", group, samples))
        if self.num_groups % self._batch == 0:
            first = step * self._batch
            batch = tuple(range(first * GROUP, (first + self._batch) * GROUP))
            self._decided(FormBatch("gen", step, batch, tuple(range(first, first + self._batch))))
            self._decided(StepDone(step))


def _ignore(*_: Any) -> None:
    """Where no ledger is kept."""


def turns(rate: int, seconds: float) -> Iterator[int]:
    """Groups to tell of, turn by turn, so that in the end there were `rate` samples a second."""
    total, told = 0, 0
    for turn in range(1, round(seconds / TICK) + 1):
        total = round(turn * TICK * rate / GROUP)
        yield total - told
        told = total


def loop(lives: Lives, rate: int, seconds: float) -> dict[str, float]:
    """Run the loop; CPU seconds of its thread for the lives, and the rate that it reached."""
    cpu, begin = 0.0, time.perf_counter()
    due = begin
    for num_groups in turns(rate, seconds):
        start = time.thread_time()
        for _ in range(num_groups):
            lives.tell()
        told = time.thread_time()
        cpu += told - start
        while time.thread_time() - told < BUSY * TICK:
            sum(range(200))
        due += TICK
        time.sleep(max(0.0, due - time.perf_counter()))
    return {
        "cpu_seconds": cpu,
        "samples_per_second": GROUP * lives.num_groups / (time.perf_counter() - begin),
    }


def measure(kind: str, rate: int, seconds: float) -> dict[str, Any]:
    """One run of the loop: without a ledger, with one, or with one that inserts row by row."""
    num_samples = GROUP * sum(turns(rate, seconds))
    if kind == "without":
        found = loop(Lives(None), rate, seconds)
        return {**found, "loop_us_per_sample": 1e6 * found["cpu_seconds"] / num_samples}
    bulks = writer.BULK_SIZES
    writer.BULK_SIZES = (1,) if kind == "rows" else bulks
    try:
        return _with_ledger(rate, seconds, num_samples)
    finally:
        writer.BULK_SIZES = bulks


def _with_ledger(rate: int, seconds: float, num_samples: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "ledger.sqlite"
        with Ledger(path, HEADER) as ledger:
            whole, own = time.process_time(), time.thread_time()
            found = loop(Lives(ledger), rate, seconds)
            left = len(ledger._writer._waiting)
            beside = (time.process_time() - whole) - (time.thread_time() - own)
            start = time.perf_counter()
            ledger.close("done")
            closing = time.perf_counter() - start
        assert not audit(path), audit(path)
        return {
            **found,
            "loop_us_per_sample": 1e6 * found["cpu_seconds"] / num_samples,
            "writer_us_per_sample": 1e6 * beside / num_samples,
            "notes_left_at_end": left,
            "seconds_to_close": closing,
            "bytes_per_sample": path.stat().st_size / num_samples,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rate", type=int, default=10_000, help="samples a second")
    parser.add_argument("--seconds", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    kinds = ("without", "ledger", "rows")
    rows = harness.interleave(
        {kind: (lambda kind=kind: measure(kind, args.rate, args.seconds)) for kind in kinds}, args.rounds
    )
    for kind, measured in rows.items():
        print(kind, *measured, sep="\n  ")
    summary = harness.compare(rows, "loop_us_per_sample", "without")
    print(harness.write("ledger", {"arguments": harness.numbers(args), "loop_us": summary, "rows": rows}))


if __name__ == "__main__":
    main()
