"""A disk that is full: every file of a run is whole, or its error is one line that names it."""

from __future__ import annotations

import json
import resource
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import pytest
from ledger_kit import recorded

from hflow.base.durable_files import WriteError, replace_text
from hflow.base.errors import RunError
from hflow.data.batches.batch import Batch, Column
from hflow.runtime.ledger import audit, rewind
from hflow.runtime.ledger.query import count
from hflow.runtime.records.metrics_log import MetricsLog
from hflow.runtime.records.trace import Trace
from hflow.runtime.saving.checkpoint import Checkpoints, verify_checkpoint
from hflow.runtime.saving.run_directory import read_metrics
from hflow.types import Unit
from hflow.workers.background_writer import BackgroundWriter
from hflow.workers.interface import Span
from hflow.workers.storage.sample_files import SampleFiles
from hflow.workers.storage.sample_store import SampleStore

FIX = "free some space, or write to another disk"


@contextmanager
def full_disk(most_bytes: int) -> Iterator[None]:
    """Let files have this many bytes at most. As on a full disk, a write fails in the middle."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_text_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    replace_text(path, "before")
    with (
        full_disk(10),
        pytest.raises(WriteError, match=rf"^{path} cannot be written: File too large; {FIX}$"),
    ):
        replace_text(path, "x" * 11)
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


def test_a_trace_is_not_cut(tmp_path: Path) -> None:
    trace, path = Trace(), tmp_path / "trace.json"
    trace.add(0, Span("a", "device", 0.0, 1.0))
    trace.write(path)
    trace.add(0, Span("b" * 500, "device", 2.0, 3.0))
    with full_disk(500), pytest.raises(WriteError, match=r"trace.json cannot be written"):
        trace.write(path)
    assert len(json.loads(path.read_text())["traceEvents"]) == 4


@pytest.mark.parametrize(("most_bytes", "file"), [(45, "tensorboard"), (300, "metrics.jsonl")])
def test_metrics_name_the_file_and_continue_with_a_new_row(
    tmp_path: Path, most_bytes: int, file: str
) -> None:
    """The header of TensorBoard's file has 40 bytes."""
    path = tmp_path / "metrics.jsonl"
    first = {f"loss/{number}": 0.5 for number in range(40)}

    def log_a_row() -> None:
        with closing(MetricsLog(path, tmp_path / "tensorboard")) as log:
            log.write(1, first if file == "metrics.jsonl" else {})

    with full_disk(most_bytes), pytest.raises(WriteError, match=rf"/{file} cannot be written: .*; {FIX}$"):
        log_a_row()
    with closing(MetricsLog(path, tmp_path / "again")) as log:
        log.write(2, {"loss": 0.25})
    assert read_metrics(path)[-1] == {"step": 2, "loss": 0.25}
    assert len(read_metrics(path)) == (1 if file == "metrics.jsonl" else 2)


def test_a_checkpoint_without_its_manifest_is_not_there(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    for step in (1, 2):
        (checkpoints.begin(step, "actor") / "weights").write_bytes(b"0123")
        if step == 1:
            checkpoints.finish(step, {}, "digest")
    with full_disk(20), pytest.raises(OSError, match="File too large"):
        checkpoints.finish(2, {}, "digest")
    checkpoints.drop(2)
    assert verify_checkpoint(checkpoints.path(1)) == 1
    assert (checkpoints.steps, (tmp_path / "latest").resolve().name) == ([1], "step-1")
    assert {path.name for path in tmp_path.iterdir()} == {"latest", "step-1"}


def test_samples_that_cannot_be_written_are_one_line(tmp_path: Path) -> None:
    store, writer = SampleStore(), BackgroundWriter()
    rewards = Column(Unit.SEQUENCE, np.arange(100, dtype=np.float32))
    ids = np.arange(100)
    store.put("gen", Batch(ids, ids, np.ones(100, np.int64), {"reward": rewards}))
    files = SampleFiles(
        tmp_path / "samples", "worker-0", {"gen": {"gen": store.stored("gen", range(100))}}, {}
    )
    with full_disk(100):
        writer.start("worker-0", str(tmp_path / "samples"), files.write)
        with pytest.raises(WriteError, match=rf"/samples cannot be written: File too large; {FIX}$"):
            writer.finish("worker-0", str(tmp_path / "samples"))
    writer.close()


def test_a_ledger_that_was_not_begun_is_begun_again(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    with (
        full_disk(20_000),
        pytest.raises(RunError, match=r"ledger.sqlite cannot be written: "),
        recorded(path),
    ):
        pass
    rewind(path, 0, 0)
    with recorded(path) as run:
        run.train(0, 0)
    assert audit(path) == []


def test_a_ledger_keeps_what_it_has_and_continues(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    with recorded(path) as run:
        run.train(0, 0)

    def issue_many() -> None:
        with recorded(path) as run:
            for group in range(1, 2000):
                run.issue(group)

    with full_disk(path.stat().st_size), pytest.raises(RunError, match=r"ledger.sqlite cannot be written: "):
        issue_many()
    num_samples = count(path)
    assert num_samples >= 2
    assert audit(path) == []
    with recorded(path) as run:
        run.issue(5000)
    assert count(path) == num_samples + 2
