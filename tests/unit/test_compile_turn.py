"""Equal engines on a machine: the first compiles alone, and the others build together after it."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import pytest

from hflow.engines.vllm.compile_turn import compile_turn

LOG = logging.getLogger("engine")


class Engine(threading.Thread):
    """Is built in its turn, beside others that are built at the same time."""

    def __init__(self, key: str, directory: Path, together: threading.Barrier) -> None:
        super().__init__(daemon=True)
        self.key, self.directory, self.together = key, directory, together
        self.is_built = False
        self.start()

    def run(self) -> None:
        with compile_turn(self.key, self.directory, LOG):
            self.together.wait(60)
            self.is_built = True


def test_others_wait_for_the_first_and_not_for_each_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    alone, together = threading.Barrier(1), threading.Barrier(2)
    with compile_turn("same", tmp_path / "locks", LOG):
        engines = [Engine("same", tmp_path / "locks", together) for _ in range(2)]
        Engine("other", tmp_path / "locks", alone).join(60)
        while caplog.text.count("waiting until") < 2:
            assert not any(engine.is_built for engine in engines)
    for engine in engines:
        engine.join(60)
        assert engine.is_built
    assert caplog.text.count("has compiled; building") == 2
    with compile_turn("same", tmp_path / "locks", LOG):
        assert caplog.text.count("waiting until") == 2


def test_an_engine_that_fails_ends_its_turn(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), compile_turn("same", tmp_path, LOG):
        raise RuntimeError
    with compile_turn("same", tmp_path, LOG):
        pass
