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
from wrong_result_bodies import (
    awaited,
    called,
    case_of,
    group_kept,
    numbered,
    result_of,
    scored,
    talked,
    viewed,
)

from hflow.base.errors import DataError, RecipeError, RunError
from hflow.engines.embedded.engine import EmbeddedEngine
from hflow.launch.planning.compile import compile_recipe
from hflow.launch.running.worker_setup import make_setup
from hflow.types import Engine, Tokenizer, Trajectory
from hflow.types.engine import SleepLevel
from hflow.workers.inproc import InprocWorkers
from hflow.workers.interface import Failed, SampleReady, WorkerSetup

GEN = "actor_gen"
SFT = Path(__file__).parents[2] / "recipes" / "sft.py"


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
    await workers.open_groups(0, kit.group_tasks(GEN, range(groups)))
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
    ended = with_workers(changed, lambda workers: generated(workers, 1))
    assert all("must return a trajectory with tokens, not '" in ended[s].message for s in (0, 1))


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
    await workers.open_groups(0, kit.group_tasks("sft_view", groups, size))
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

    with_workers(kit.with_program(sft(), "sft_view", body=pair), work)


def test_a_group_of_another_size_is_refused() -> None:
    async def work(workers: InprocWorkers) -> None:
        ended = await written(workers, range(2), 3)
        assert len(ended) == 6
        assert all("returned 2 trajectories for a group of 3" in event.message for event in ended.values())

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


# ---------------------------------------------------------------------------- wrong results
GROUPS = 24


def check_ends(ended: dict[int, Any], cases: list[int], words: str = "must ") -> None:
    """What is right has its value, and of the others each is refused for what it is."""
    assert len(set(cases)) > 5, "or the test shows nothing"
    for key, case in enumerate(cases):
        event = ended[key]
        assert isinstance(event, Failed) == (case != 0), (case, event)
        if case:
            assert event.reason == "failed"
            assert words in event.message or "is nan, not a finite number" in event.message
            assert "Traceback" not in event.message
            assert "\n" not in event.message


async def computed(workers: InprocWorkers, tasks: list[Any]) -> dict[int, Any]:
    await workers.compute(0, tasks)
    return {event.key: event for event in await kit.collect(workers, 0, len(tasks))}


def test_a_wrong_result_refuses_what_an_exception_would(setup: WorkerSetup) -> None:
    """Bodies of samples, of groups, asynchronous ones, and encode bodies of samples."""
    samples = range(2 * GROUPS)

    async def rewards(workers: InprocWorkers) -> None:
        await generated(workers, GROUPS)
        cases = [case_of(answer) for answer in read(workers, GEN, "answer", samples)]
        ended = await computed(workers, kit.sample_tasks("score", samples))
        check_ends(ended, cases, "'reward' must be a number, the body returned ")
        assert {event.value for event in ended.values() if not isinstance(event, Failed)} == {0.7}
        right = [sample for sample in samples if not cases[sample]]
        assert read(workers, GEN, "reward", right) == [0.7] * len(right)
        assert not any(workers._worker._store.has(GEN, "hint", s) for s in samples if cases[s])

    async def others(workers: InprocWorkers) -> None:
        await generated(workers, GROUPS)
        cases = [case_of(answer) for answer in read(workers, GEN, "answer", samples)]
        ended = await computed(workers, kit.sample_tasks("score", samples))
        assert [ended[sample].value for sample in samples] == cases, "a tensor with a gradient is its number"
        check_ends(await computed(workers, kit.sample_tasks("judged", samples)), cases)
        check_ends(await computed(workers, kit.group_of("long_enough", range(GROUPS))), cases[::2])
        ended = await computed(workers, kit.sample_tasks("view", samples))
        check_ends(ended, cases, "must return a trajectory with tokens, not ")

    with_workers(kit.with_program(setup, "score", body=scored), rewards)
    changed = setup
    for node, body in (
        ("score", numbered),
        ("judged", awaited),
        ("long_enough", group_kept),
        ("view", viewed),
    ):
        changed = kit.with_program(changed, node, body=body)
    with_workers(changed, others)


def test_a_wrong_result_of_a_source_refuses_its_sample(setup: WorkerSetup) -> None:
    """Episodes, what they call, and encode bodies of dataset rows."""

    async def episodes(workers: InprocWorkers) -> None:
        ended = await generated(workers, GROUPS)
        cases = [case_of(prompt) for prompt in prompts for _ in range(2)]
        check_ends(ended, cases, "must return a trajectory with tokens, not ")

    async def calls(workers: InprocWorkers) -> None:
        ended = await generated(workers, GROUPS)
        for sample, event in ended.items():
            case = case_of(prompts[sample // 2])
            # NaN and a nested list can be recorded; that keys become strings is what a replay reads.
            assert isinstance(event, Failed) == (case not in (0, 1, 4, 5)), (case, event)
            if isinstance(event, Failed):
                assert "what result_of returned cannot be recorded in the episode's journal" in event.message

    async def rows(workers: InprocWorkers) -> None:
        ended = await written(workers, range(GROUPS), 1)
        failed = [event for event in ended.values() if isinstance(event, Failed)]
        assert 0 < len(failed) < GROUPS
        assert all("must return a trajectory with tokens, not " in event.message for event in failed)

    async def all_prompts(workers: InprocWorkers) -> list[str]:
        await generated(workers, GROUPS)
        return read(workers, GEN, "prompt", range(0, 2 * GROUPS, 2))

    prompts = with_workers(setup, all_prompts)
    with_workers(kit.with_program(setup, GEN, body=talked), episodes)
    with_workers(kit.with_program(setup, GEN, body=called), calls)
    with_workers(kit.with_program(sft(), "sft_view", body=viewed), rows)


PROBLEMS = ("must be a tensor", "so its shape must", "but declares")


def test_a_wrong_result_of_a_whole_batch_ends_the_run_in_one_line(setup: WorkerSetup) -> None:
    """As an exception would: no sample can leave a batch that is formed."""
    wrong: list[Any] = []
    """The result to return in the place of the right one."""
    nodes = ("view_inf", "view_mean", "recheck", "advantage", "learn")

    def either(body: Any) -> Any:
        return lambda **arguments: wrong[0] if wrong else body(**arguments)

    async def work(workers: InprocWorkers) -> None:
        await generated(workers, 4)
        for node in ("score", "judged", "view"):
            await computed(workers, kit.sample_tasks(node, range(8)))
        await workers.sleep("actor@gen", SleepLevel.KEEP_WEIGHTS)
        for node in nodes:
            for result in (*(result_of(case, 0.5) for case in range(8)), torch.ones(3), "text", (1, 2, 3, 4)):
                wrong[:] = [result]
                with pytest.raises(RunError) as caught:
                    await workers.run({0: kit.task(node, tuple(range(8)))})
                message = str(caught.value)
                assert message.startswith(f"node '{node}', step 1, worker 0: "), message
                assert "\n" not in message
                assert any(words in message for words in PROBLEMS), message
            wrong.clear()
            await workers.run({0: kit.task(node, tuple(range(8)))})
            if node == "advantage":
                await workers.run({0: kit.task("shifted", tuple(range(8)))})

    changed = setup
    for node in nodes:
        changed = kit.with_program(changed, node, body=either(setup.programs[node].body))
    with_workers(changed, work)
