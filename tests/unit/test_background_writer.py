"""Files of checkpoints are written in the background, and a full disk is one line."""

from __future__ import annotations

import resource
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch_kit as kit

from hflow.base.errors import RunError
from hflow.data.text.tokenizer import TextTokenizer, TokenizerSettings
from hflow.workers.background_writer import BackgroundWriter

FIX = "free some space, or write to another disk"


@pytest.fixture
def writer() -> BackgroundWriter:
    return BackgroundWriter()


def test_writes_are_finished_by_directory(writer: BackgroundWriter, tmp_path: Path) -> None:
    """A second write of one thing waits for the first, whose files can be asked for later."""
    may_write, order = threading.Event(), []

    def write(step: str) -> list[Path]:
        assert may_write.wait(60)
        order.append(f"wrote {step}")
        path = tmp_path / step / "model" / "file"
        path.parent.mkdir(parents=True)
        path.write_text("123456789")
        return [path]

    writer.start("actor", str(tmp_path / "step-1"), lambda: write("step-1"))
    saving = threading.Thread(target=lambda: (writer.wait("actor"), order.append("copied step-2")))
    saving.start()
    saving.join(0.05)
    assert not order
    may_write.set()
    saving.join()
    writer.start("actor", str(tmp_path / "step-2"), lambda: write("step-2"))
    expected = {"model/file": (9, "cbf43926")}  # the check value of CRC-32
    assert writer.finish("actor", str(tmp_path / "step-2")) == expected
    assert writer.finish("actor", str(tmp_path / "step-1")) == expected
    assert writer.finish("actor", str(tmp_path / "step-1")) == {}
    assert order == ["wrote step-1", "copied step-2", "wrote step-2"]
    writer.close()


def test_an_error_is_raised_where_its_directory_is_finished(writer: BackgroundWriter, tmp_path: Path) -> None:
    writer.start("actor", str(tmp_path / "a"), lambda: [tmp_path / "a" / "absent"])
    writer.start("critic", str(tmp_path / "b"), lambda: 1 // 0)  # type: ignore[arg-type, return-value]
    writer.wait("actor")
    writer.start("actor", str(tmp_path / "c"), list)
    assert writer.finish("actor", str(tmp_path / "c")) == {}
    message = rf"^{tmp_path}/a cannot be written: No such file or directory; check the path, "
    with pytest.raises(RunError, match=message):
        writer.finish("actor", str(tmp_path / "a"))
    with pytest.raises(ZeroDivisionError):  # a mistake in hflow keeps its traceback
        writer.finish("critic", str(tmp_path / "b"))
    writer.close()


@pytest.fixture
def full_disk() -> Iterator[None]:
    """Let files have 200 bytes at most. As on a full disk, a write fails in the middle."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))


def test_a_full_disk_is_one_line(writer: BackgroundWriter, tmp_path: Path, full_disk: None) -> None:
    """Whichever library writes."""
    backend, tokenizer = kit.model(), TextTokenizer(TokenizerSettings(alphabet="0123456789+= "))
    (tmp_path / "actor").mkdir()
    writes = {
        "weights": backend.save(str(tmp_path / "weights")),
        "actor/shards": backend.save_shards(str(tmp_path / "actor" / "shards")),
        "tokenizer": lambda: tokenizer.save(str(tmp_path / "tokenizer")),
    }
    errors = []
    for name, write in writes.items():
        writer.start(name, str(tmp_path / name), write)
        with pytest.raises(RunError) as caught:
            writer.finish(name, str(tmp_path / name))
        errors.append(str(caught.value))
    assert errors == [f"{tmp_path}/{name} cannot be written: File too large; {FIX}" for name in writes]
    writer.close()
