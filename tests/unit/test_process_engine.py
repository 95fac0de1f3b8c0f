"""An engine in a process of its own, of a library that is not vLLM."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
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
def launch() -> EngineLaunch:
    def arguments(directory: str, max_length: int) -> dict[str, int]:
        assert (Path(directory) / "config.json").exists()
        return {"scale": max_length}

    path = os.pathsep.join([str(Path(counting_stepper.__file__).parent), *sys.path])
    environment = {"COUNTING_ERROR": "no nine", "PYTHONPATH": path}
    return EngineLaunch("counting", "counting_stepper:CountingStepper", environment, arguments)


@pytest.fixture
def engine(launch: EngineLaunch) -> Iterator[ProcessEngine]:
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


def test_models_on_one_base_have_one_process(launch: EngineLaunch) -> None:
    """Each gets its own answers and versions, while both threads wait, and both hear that it has failed."""
    guest = EngineSetup(replace(SETTINGS, name="guest"), {"max_model_len": 15})
    owner = ProcessEngine(EngineSetup(SETTINGS, {"max_model_len": 10}, guests=(guest,)), launch)
    other = ProcessEngine(replace(guest, base=owner), launch)
    with pytest.raises(BackendError, match="a prompt has 10 tokens, but the engine takes 1 to 9"):
        owner.add(0, [1] * 10, SamplingParams())
    engines = {4: owner, 7: other}
    with ThreadPoolExecutor() as threads:
        for _ in range(20):
            for version, engine in engines.items():
                engine.add(0, [version - 3], SamplingParams(max_tokens=4))
            list(threads.map(lambda pair: pair[1].set_version(pair[0]), engines.items()))
            for version, found in zip(engines, threads.map(finish, engines.values()), strict=True):
                assert found[0].ids == tuple(range(version - 2, version + 2))
                assert found[0].logprobs == (-15.0,) * 4  # it has room for the longest sequence of all
                assert found[0].versions[-1] == version
    owner.add(1, [1], SamplingParams(max_tokens=3))
    other.close()  # the process is the owner's
    assert finish(owner)[1].ids == (2, 3, 4)
    other.add(2, [8], SamplingParams())
    with pytest.raises(BackendError, match="no nine"):
        finish(other)
    with pytest.raises(BackendError, match="no nine"):
        owner.set_version(1)
    owner.close()
