"""The log of a worker's samples: another process restores exactly what is not released."""

from __future__ import annotations

from pathlib import Path

import pytest

from hflow.base.errors import RunError
from hflow.types import Trajectory, Unit
from hflow.workers.storage.sample_log import SampleLog
from hflow.workers.storage.sample_store import SampleStore

FAMILIES = {"gen": ("gen", "view")}
GROUP = (0, 1)


def filled(path: Path) -> tuple[SampleStore, SampleLog]:
    """Two samples that were generated, and scored later."""
    store = SampleStore()
    log = SampleLog(path, store, FAMILIES)
    for sample in GROUP:
        turn = Trajectory((1, 2), (False, True), (0.0, -0.5), (-1, 3), (), "text")
        store.put_trajectory("gen", sample, 0, turn, {"answer": (Unit.TEXT, "7")})
        log.add({"gen": [sample]})
    store.add_value("gen", "reward", Unit.SEQUENCE, GROUP, 0.25)
    store.put_trajectory("view", 1, 0, Trajectory((4,), (True,), (0.0,), (-1,), (), ""), {})
    log.add({"gen": [*GROUP, 99]})
    return store, log


def restored(path: Path) -> tuple[SampleStore, dict[str, tuple[int, ...]]]:
    store = SampleStore()
    return store, SampleLog(path, store, FAMILIES).restore()


def test_everything_is_restored(tmp_path: Path) -> None:
    store, _ = filled(tmp_path)
    again, samples = restored(tmp_path)
    assert samples == {"gen": GROUP}
    for stream in FAMILIES["gen"]:
        assert again.stored(stream, GROUP) == store.stored(stream, GROUP)
    assert again.values("gen", "reward", GROUP) == [0.25, 0.25]


def test_only_what_is_new_is_written(tmp_path: Path) -> None:
    _, log = filled(tmp_path)
    num_files = len(list(tmp_path.iterdir()))
    texts = [path.read_text() for path in tmp_path.glob("*.json")]
    assert sum(text.count('"input_ids"') for text in texts) == 3, "two samples, and the view of one"
    again = SampleLog(tmp_path, SampleStore(), FAMILIES)
    again.restore()
    again.add({"gen": GROUP})
    assert len(list(tmp_path.iterdir())) == num_files
    log.release("gen", [0])
    assert {path.stem for path in tmp_path.iterdir()} == {"2", "3"}
    log.release("gen", [1])
    assert list(tmp_path.iterdir()) == []


def test_the_file_that_was_being_written_is_left_out_and_no_other(tmp_path: Path) -> None:
    filled(tmp_path)
    (tmp_path / "3.safetensors").write_bytes(b"cut")
    store, samples = restored(tmp_path)
    assert samples == {"gen": GROUP}
    assert not store.has("gen", "reward", 0)
    (tmp_path / "1.safetensors").write_bytes(b"cut")
    with pytest.raises(RunError, match=r"1\.safetensors"):
        restored(tmp_path)


def test_a_log_without_a_value_cannot_be_restored(tmp_path: Path) -> None:
    store, log = filled(tmp_path)
    store.add_value("gen", "notes", Unit.JSON, GROUP, {1: "no JSON"})
    log.add({"gen": GROUP})
    with pytest.raises(RunError, match="sample of the worker was lost with it: 0 of gen"):
        restored(tmp_path)
