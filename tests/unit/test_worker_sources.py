"""Sources on a worker: episodes and encode bodies that succeed, fail, time out or end the run."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import worker_kit as kit
from worker_kit import read, with_workers

from hflow.backends.embedded_engine.engine import EmbeddedEngine
from hflow.errors import DataError, RecipeError, RunError
from hflow.launch.compile import compile_recipe
from hflow.launch.worker_setup import make_setup
from hflow.types import Engine, Tokenizer, Trajectory
from hflow.workers.inproc import InprocWorkers
from hflow.workers.interface import Failed, SampleReady, WorkerSetup

GEN = "actor_gen"
SFT = Path(__file__).parents[2] / "recipes" / "sft.py"


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def setup() -> WorkerSetup:
    return kit.setup_of("cluster=cpu-1x1")


async def slow_or_wrong(engine: Engine, prompt: str) -> Trajectory:
    """Hang on the first prompt, fail on the second."""
    if prompt == FIRST:
        await asyncio.sleep(600)
    if prompt == SECOND:
        raise KeyError("by request")
    return await engine.complete(prompt)


FIRST, SECOND = "", ""


async def generated(workers: InprocWorkers, groups: int) -> dict[int, Any]:
    await workers.open_groups(0, kit.group_orders(GEN, range(groups)))
    await workers.wake("actor@gen", 0)
    events = await kit.collect(workers, 0, 2 * groups)
    return {event.sample if isinstance(event, SampleReady) else event.key: event for event in events}


def test_an_episode_ends_in_time_or_is_refused(setup: WorkerSetup, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = with_workers(setup, lambda workers: _prompts(workers))
    monkeypatch.setitem(globals(), "FIRST", rows[0])
    monkeypatch.setitem(globals(), "SECOND", rows[1])
    changed = kit.with_program(setup, GEN, body=slow_or_wrong, options={"timeout": 0.3})
    ended = with_workers(changed, lambda workers: generated(workers, 4))
    assert [ended[s].reason for s in (0, 1, 2, 3)] == ["timeout", "timeout", "failed", "failed"]
    assert ended[0].message == "took longer than its timeout of 0.3 s"
    assert ended[2].message.startswith("KeyError: 'by request' (")
    assert all(isinstance(ended[sample], SampleReady) for sample in range(4, 8))


async def _prompts(workers: InprocWorkers) -> list[str]:
    await generated(workers, 2)
    return [read(workers, GEN, "prompt", [sample])[0] for sample in (0, 2)]


_tries: dict[str, int] = {}


async def second_time(engine: Engine, prompt: str) -> Trajectory:
    _tries[prompt] = _tries.get(prompt, 0) + 1
    if _tries[prompt] == 1:
        raise ConnectionError("not yet")
    return await engine.complete(prompt)


def test_an_episode_is_retried(setup: WorkerSetup) -> None:
    changed = kit.with_program(setup, GEN, body=second_time, options={"retries": 1, "concurrency": 1})
    ended = with_workers(changed, lambda workers: generated(workers, 2))
    assert all(isinstance(event, SampleReady) for event in ended.values())
    assert sorted(_tries.values()) == [3, 3]


def lookup(key: str) -> str:
    return key


async def with_tools(engine: Engine, prompt: str) -> Trajectory:
    return await engine.complete(prompt, tools=[lookup])


def test_tools_that_cannot_be_offered_end_the_run(setup: WorkerSetup) -> None:
    changed = kit.with_program(setup, GEN, body=with_tools)
    with pytest.raises(RecipeError, match=r"no chat template to describe tools with; set .* tool_format"):
        with_workers(changed, lambda workers: generated(workers, 1))


def test_a_wrong_tool_format_is_refused_before_anything_runs(setup: WorkerSetup) -> None:
    changed = kit.with_program(setup, GEN, options={"tool_format": "xml"})
    with pytest.raises(RecipeError, match="tool_format is 'xml'; set it to"):
        with_workers(changed, lambda workers: generated(workers, 1))


async def nothing(engine: Engine, prompt: str) -> Any:
    return prompt


def test_an_episode_must_return_a_trajectory(setup: WorkerSetup) -> None:
    changed = kit.with_program(setup, GEN, body=nothing)
    with pytest.raises(RecipeError, match="'actor_gen' must return a trajectory with tokens, not str"):
        with_workers(changed, lambda workers: generated(workers, 1))


def only_one(completion: str, answer: str, num_tokens: int, **_: Any) -> float:
    return 1.0


def test_a_body_of_another_shape_ends_the_run(setup: WorkerSetup) -> None:
    async def work(workers: InprocWorkers) -> None:
        await generated(workers, 1)
        await workers.compute(0, kit.sample_orders("score", [0]))
        await kit.collect(workers, 0, 1)

    with pytest.raises(RecipeError, match="'score' returned 1 results, but declares 2"):
        with_workers(kit.with_program(setup, "score", body=only_one), work)


async def hides_what_failed(engine: Engine, prompt: str) -> Trajectory:
    try:
        return await engine.complete(prompt)
    except RunError:
        raise ValueError("something went wrong") from None


def test_an_engine_that_stopped_ends_the_run_even_if_the_body_hides_it(
    setup: WorkerSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    def diverged(self: EmbeddedEngine, logits: torch.Tensor) -> None:
        draw(self, logits * torch.nan)

    draw = EmbeddedEngine._draw
    monkeypatch.setattr(EmbeddedEngine, "_draw", diverged)
    changed = kit.with_program(setup, GEN, body=hides_what_failed)
    with pytest.raises(RunError, match="the generation engine stopped: the model's logits are NaN"):
        with_workers(changed, lambda workers: generated(workers, 1))


# ---------------------------------------------------------------------------- written streams
def pair(tokenizer: Tokenizer, prompt: str, answer: str) -> list[Trajectory]:
    return [tokenizer.join(prompt, answer), tokenizer.join(prompt, answer[::-1])]


async def written(workers: InprocWorkers, groups: range, size: int) -> dict[int, Any]:
    await workers.open_groups(0, kit.group_orders("sft_view", groups, size))
    events = await kit.collect(workers, 0, len(groups) * size)
    return {event.sample if isinstance(event, SampleReady) else event.key: event for event in events}


def sft(*overrides: str) -> WorkerSetup:
    return make_setup(compile_recipe(SFT, ("cluster=cpu-1x1", *overrides)))


def test_written_samples() -> None:
    async def work(workers: InprocWorkers) -> None:
        ended = await written(workers, range(5), 1)
        answers = read(workers, "sft_view", "answer", range(5))
        for sample, answer in enumerate(answers):
            assert (ended[sample].oldest, ended[sample].newest) == (-1, -1)
            assert ended[sample].num_learned == len(answer) + 1
        assert read(workers, "sft_view", "completion", range(5)) == answers

    with_workers(sft(), work)


def test_a_pair_is_a_group_of_two() -> None:
    async def work(workers: InprocWorkers) -> None:
        await written(workers, range(3), 2)
        answers = read(workers, "sft_view", "answer", range(6))
        chosen, rejected = (read(workers, "sft_view", "completion", range(start, 6, 2)) for start in (0, 1))
        assert chosen == answers[::2]
        assert rejected == [answer[::-1] for answer in answers[::2]]
        assert read(workers, "sft_view", "group", range(6)) == [0, 0, 1, 1, 2, 2]

    with_workers(kit.with_program(sft(), "sft_view", body=pair, group=2), work)


def test_a_group_of_another_size_ends_the_run() -> None:
    async def work(workers: InprocWorkers) -> None:
        await written(workers, range(1), 3)

    with pytest.raises(RecipeError, match="returned 2 trajectories for a group of 3"):
        with_workers(kit.with_program(sft(), "sft_view", body=pair), work)


def test_a_row_that_the_tokenizer_cannot_read_ends_the_run(setup: WorkerSetup) -> None:
    message = (
        r"the addition data, row \d+: the tokenizer has no token for '=' \(in '.*='\); add it to the alphabet"
    )
    with pytest.raises(DataError, match=message):
        with_workers(sft("models.actor.alphabet=0123456789+"), lambda workers: written(workers, range(2), 1))
    tokenizers = {"actor": dataclasses.replace(setup.tokenizers["actor"], alphabet="0123456789+")}
    with pytest.raises(DataError, match=message):
        with_workers(dataclasses.replace(setup, tokenizers=tokenizers), lambda workers: generated(workers, 1))


def shy(tokenizer: Tokenizer, prompt: str, answer: str) -> Trajectory:
    if answer.startswith("0"):
        raise ValueError("too small")
    return tokenizer.join(prompt, answer)


def test_an_encode_body_that_raises_refuses_its_sample() -> None:
    async def work(workers: InprocWorkers) -> None:
        ended = await written(workers, range(20), 1)
        failed = [event for event in ended.values() if isinstance(event, Failed)]
        assert 0 < len(failed) < 20
        assert all(event.message.startswith("ValueError: too small (") for event in failed)

    with_workers(kit.with_program(sft(), "sft_view", body=shy), work)


async def leaves(engine: Engine, prompt: str) -> Trajectory:
    raise SystemExit(3)


def test_a_body_that_exits_refuses_its_sample(setup: WorkerSetup) -> None:
    changed = kit.with_program(setup, GEN, body=leaves)
    ended = with_workers(changed, lambda workers: generated(workers, 1))
    assert all(event.message.startswith("SystemExit: 3 (") for event in ended.values())
