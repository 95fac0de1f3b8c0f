"""An engine in a process of its own, of a library that is not vLLM."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import counting_stepper
import psutil
import pytest
from torch_kit import SETTINGS

from hflow.base.errors import BackendError, WorkerFailureError
from hflow.engines.interface import EngineSetup, GenerationResult, SamplingParams
from hflow.engines.process.engine import EngineLaunch, ProcessEngine
from hflow.types.engine import SleepLevel
from hflow.weights.incoming import IncomingWeights


@pytest.fixture
def engine() -> Iterator[ProcessEngine]:
    def arguments(directory: str, max_length: int) -> dict[str, int]:
        assert (Path(directory) / "config.json").exists()
        return {"scale": max_length}

    path = os.pathsep.join([str(Path(counting_stepper.__file__).parent), *sys.path])
    environment = {"COUNTING_ERROR": "no nine", "PYTHONPATH": path}
    launch = EngineLaunch("counting", "counting_stepper:CountingStepper", environment, arguments)
    subject = ProcessEngine(EngineSetup(SETTINGS, {"max_model_len": 20}), launch)
    yield subject
    subject.close()


def finish(engine: ProcessEngine) -> dict[int, GenerationResult]:
    results: dict[int, GenerationResult] = {}
    while engine.num_unfinished:
        results.update(engine.step())
    return results


def test_requests_weights_and_sleep_pass_to_the_stepper(engine: ProcessEngine) -> None:
    engine.set_version(3)
    engine.add(0, [4, 1], SamplingParams(max_tokens=4))
    engine.add(1, [1], SamplingParams(stop_ids=(5,)))
    engine.add(2, [1], SamplingParams())
    engine.cancel(2)
    found = finish(engine)
    assert found[0] == GenerationResult((2, 3, 4, 5), (-20.0,) * 4, (3,) * 4, "length")
    assert (found[1].ids, found[1].stop_reason) == ((2, 3, 4, 5), "stop")
    with pytest.raises(BackendError, match="a prompt has 20 tokens, but the engine takes 1 to 19"):
        engine.add(3, [1] * 20, SamplingParams())
    with pytest.raises(BackendError, match="1 ranks have no weights"):
        engine.load_weights([IncomingWeights.of_tensors(lambda: iter(()))], 4)
    assert engine.interrupt() == []
    engine.sleep(SleepLevel.KEEP_WEIGHTS)
    engine.wake_weights()
    engine.wake_cache()
    engine.add(4, [3], SamplingParams(max_tokens=1))
    assert finish(engine)[4].ids == (4,)


def test_an_error_of_the_library_names_it(engine: ProcessEngine) -> None:
    engine.add(0, [7], SamplingParams())
    with pytest.raises(BackendError, match="'actor': counting failed with ValueError: no nine"):
        finish(engine)


def test_a_killed_process_is_named(engine: ProcessEngine) -> None:
    directory = engine._process.directory
    psutil.Process(engine._process._process.pid).kill()
    engine.add(0, [1], SamplingParams())
    with pytest.raises(
        WorkerFailureError, match=r"the counting engine of 'actor' \(process \d+\) was killed"
    ):
        finish(engine)
    engine.close()
    assert not directory.exists()
