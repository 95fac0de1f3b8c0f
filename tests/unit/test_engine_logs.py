"""The log of an engine's process, which outlives it."""

from __future__ import annotations

from pathlib import Path

import pytest

from hflow.engines.interface import EngineSetup
from hflow.models.settings import ModelSettings
from hflow.processes.child import ChildProcess

PROGRAM = """import sys
print("compiling")
if sys.argv[2] == "fail":
    raise ValueError("too large")
"""


def run(monkeypatch: pytest.MonkeyPatch, directory: Path, log: Path, word: str) -> str:
    (directory / "loud.py").write_text(PROGRAM)
    monkeypatch.setenv("PYTHONPATH", str(directory))
    child = ChildProcess("the engine", "loud", "start again", log)
    child.start({}, [word])
    child.wait(60)
    text = str(child.exit_error())
    child.close()
    return text


def test_a_log_outlives_its_process_and_is_continued(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    log = tmp_path / "engines" / "actor@gen-4.log"
    assert run(monkeypatch, tmp_path, log, "fail").endswith("ended with exit code 1: ValueError: too large")
    assert run(monkeypatch, tmp_path, log, "pass").endswith("ended with exit code 0; start again")
    assert log.read_text().count("compiling") == 2


@pytest.mark.parametrize(("log", "level"), [("", "ERROR"), ("engine.log", "INFO")])
def test_vllm_says_what_it_does_where_there_is_a_log(log: str, level: str) -> None:
    pytest.importorskip("vllm")
    from hflow.engines.vllm.launch_options import environment

    setup = EngineSetup(ModelSettings(name="actor", path=None), log=log)
    assert environment(setup)["VLLM_LOGGING_LEVEL"] == level
