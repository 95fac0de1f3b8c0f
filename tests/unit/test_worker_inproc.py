"""A whole worker in this process, with real bodies, pool, tokenizer, model and engine."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import worker_kit as kit
from transformers import AutoModelForCausalLM, AutoTokenizer
from worker_kit import read, with_workers

from hflow.base.durable_files import file_checksum
from hflow.base.errors import RunError
from hflow.data_plane.redistribute import Move, Moves
from hflow.engines.interface import EngineSetup
from hflow.types import Sequences, State
from hflow.types.engine import SleepLevel
from hflow.workers.inproc import InprocWorkers
from hflow.workers.interface import ComputeReady, Failed, SampleReady, SavedSamples, Workers, WorkerSetup

GEN = "actor_gen"


@pytest.fixture(scope="module")
def setup() -> WorkerSetup:
    return kit.setup_of("cluster=cpu-1x2")


async def generate(workers: Workers, groups: int = 4) -> list[Any]:
    """Generate groups, half of them for each worker, with weights of version 0."""
    await workers.wake("actor@gen", 0)
    half = groups // 2
    await workers.open_groups(0, kit.group_tasks(GEN, range(half)))
    await workers.open_groups(1, kit.group_tasks(GEN, range(half, groups)))
    events = await kit.collect(workers, 0, 2 * half) + await kit.collect(workers, 1, 2 * (groups - half))
    await workers.sleep("actor@gen", SleepLevel.KEEP_WEIGHTS)
    return events


@pytest.mark.parametrize(("cluster", "receives"), [("cpu-1x1", False), ("cpu-1x2", True)])
def test_an_engine_knows_that_a_route_brings_its_weights(cluster: str, receives: bool) -> None:
    """It does not where the engine reads those of a trainer on the same worker in place."""
    setup = kit.setup_of(f"cluster={cluster}")
    built: list[EngineSetup] = []

    def build(engine: EngineSetup) -> Any:
        built.append(engine)
        return setup.factories["embedded"](engine)

    async def work(workers: Workers) -> None:
        await workers.wake("actor@gen", 0)

    with_workers(dataclasses.replace(setup, factories={**setup.factories, "embedded": build}), work)
    assert {engine.receives_weights for engine in built} == {receives}


async def prepare(workers: Workers) -> tuple[int, ...]:
    """Generate, score, and view eight samples; all on worker 0."""
    await workers.wake("actor@gen", 0)
    await workers.open_groups(0, kit.group_tasks(GEN, range(4)))
    await kit.collect(workers, 0, 8)
    await workers.sleep("actor@gen", SleepLevel.KEEP_WEIGHTS)
    for node in ("score", "judged", "view"):
        await workers.compute(0, kit.sample_tasks(node, range(8)))
        await kit.collect(workers, 0, 8)
    return tuple(range(8))


def test_generated_samples_are_reported_where_they_were_ordered(setup: WorkerSetup) -> None:
    async def work(workers: InprocWorkers) -> None:
        events = await generate(workers)
        assert sorted(event.sample for event in events) == list(range(8))
        assert {event.sample for event in events[:4]} == {0, 1, 2, 3}
        for event in events:
            assert isinstance(event, SampleReady)
            assert event.stream == GEN
            assert (event.oldest, event.newest) == (0, 0)
            assert 1 <= event.num_learned <= 6
            (ids,) = read(workers, GEN, "input_ids", (event.sample,))
            (versions,) = read(workers, GEN, "versions", (event.sample,))
            assert len(ids) == len(versions) == event.length
            assert versions.count(0) == event.num_learned
        prompts = read(workers, GEN, "prompt", (0, 1, 2))
        assert prompts[0] == prompts[1] != prompts[2]
        assert read(workers, GEN, "group", (3,)) == [1]

    with_workers(setup, work)


def test_generated_tokens_are_counted(setup: WorkerSetup) -> None:
    async def work(workers: InprocWorkers) -> None:
        await workers.open_groups(0, kit.group_tasks(GEN, range(4)))
        await workers.wake("actor@gen", 0)
        num_learned = num_generated = num_events = 0
        while num_events < 8:
            report = await workers.poll(0)
            num_events += len(report.events)
            num_learned += sum(event.num_learned for event in report.events)
            num_generated += report.engine_stats.num_tokens
        assert num_generated == num_learned > 8

    with_workers(setup, work)


def test_samples_do_not_depend_on_time_or_worker(setup: WorkerSetup) -> None:
    async def together(workers: InprocWorkers) -> list[Any]:
        await generate(workers)
        return read(workers, GEN, "input_ids", tuple(range(8)))

    async def one_by_one(workers: InprocWorkers) -> list[Any]:
        await workers.wake("actor@gen", 0)
        for task in kit.group_tasks(GEN, range(4)):
            await workers.open_groups(task.group % 2, [task])
            await kit.collect(workers, task.group % 2, 2)
        return read(workers, GEN, "input_ids", tuple(range(8)))

    assert with_workers(setup, together) == with_workers(setup, one_by_one)


def test_an_engine_that_sleeps_keeps_unfinished_samples() -> None:
    async def work(workers: InprocWorkers) -> list[Any]:
        await workers.open_groups(0, kit.group_tasks(GEN, range(4)))
        await workers.wake("actor@gen", 0)
        await workers.sleep("actor@gen", SleepLevel.KEEP_WEIGHTS)
        await workers.wake("actor@gen", 1)
        events = await kit.collect(workers, 0, 8)
        assert all(0 <= event.oldest <= event.newest <= 1 for event in events)
        return read(workers, GEN, "input_ids", tuple(range(8)))

    async def undisturbed(workers: InprocWorkers) -> list[Any]:
        await generate(workers)
        return read(workers, GEN, "input_ids", tuple(range(8)))

    longer = kit.setup_of("cluster=cpu-1x2", "nodes.actor_gen.max_tokens=48")
    assert with_workers(longer, work) == with_workers(longer, undisturbed)


def test_bodies_of_samples_and_groups(setup: WorkerSetup) -> None:
    async def work(workers: InprocWorkers) -> None:
        samples = await prepare(workers)
        completions = read(workers, GEN, "completion", samples)
        rewards = read(workers, GEN, "reward", samples)
        assert rewards == [len(text) + 0.5 for text in completions]
        hints = read(workers, GEN, "hint", samples)
        assert read(workers, GEN, "judged", samples) == [len(hint) for hint in hints]
        await workers.compute(0, kit.group_of("long_enough", range(4)))
        events = await kit.collect(workers, 0, 4)
        most = {g: max(rewards[2 * g : 2 * g + 2]) for g in range(4)}
        kept = {event.key: event.keep for event in events if isinstance(event, ComputeReady)}
        assert kept == {g: most[g] >= 5.0 for g in range(4)}
        answers = read(workers, GEN, "answer", samples)
        lengths = [len(ids) for ids in read(workers, "view", "input_ids", samples)]
        assert read(workers, "view", "completion", samples) == answers
        assert all(length > len(answer) for length, answer in zip(lengths, answers, strict=True))

    with_workers(kit.with_knobs(setup, "long_enough", least=5.0), work)


def seven_tenths(completion: str, answer: str, num_tokens: int, **_: Any) -> tuple[float, str]:
    return 0.7, "12345678901234"


def identify(hint: str) -> int:
    return int(hint)


def as_tensor(reward: torch.Tensor, seqs: Sequences, **_: Any) -> Any:
    return seqs.widen(reward), reward, {}


def test_numbers_are_exact_until_they_are_a_tensor(setup: WorkerSetup) -> None:
    """`long_enough` keeps the groups whose largest reward is 0.7 or more."""

    async def work(workers: InprocWorkers) -> None:
        samples = await prepare(workers)
        assert set(read(workers, GEN, "judged", samples)) == {12345678901234}
        await workers.compute(0, kit.group_of("long_enough", range(4)))
        assert all(event.keep for event in await kit.collect(workers, 0, 4))
        (result,) = await workers.run({0: kit.task("advantage", samples)})
        assert result.values == (0.7,) * 8

    changed = kit.with_knobs(setup, "long_enough", least=0.7)
    changed = kit.with_program(changed, "score", body=seven_tenths)
    changed = kit.with_program(changed, "advantage", body=as_tensor, reported="baseline")
    with_workers(kit.with_program(changed, "judged", body=identify), work)


def test_a_body_refuses_only_its_own_sample(setup: WorkerSetup) -> None:
    async def work(workers: InprocWorkers) -> None:
        await generate(workers)
        answers = read(workers, GEN, "answer", tuple(range(8)))
        failing, hanging = answers[0], answers[4]
        assert failing != hanging
        await workers.compute(0, kit.sample_tasks("score", range(8)))
        events = {event.key: event for event in await kit.collect(workers, 0, 8)}
        told = {key: event for key, event in events.items() if isinstance(event, Failed)}
        assert {key for key, event in told.items() if event.reason == "failed"} == {
            key for key, answer in enumerate(answers) if answer == failing
        }
        assert f"ValueError: no score for {failing}" in told[0].message
        assert "worker_recipe.py:" in told[0].message
        assert {key for key, event in told.items() if event.reason == "timeout"} == {
            key for key, answer in enumerate(answers) if answer == hanging
        }

    async def first_answers(workers: InprocWorkers) -> list[str]:
        await generate(workers)
        return read(workers, GEN, "answer", (0, 4))

    failing, hanging = with_workers(setup, first_answers)
    with_workers(kit.with_knobs(setup, "score", fail=failing, hang=hanging), work)


def test_batch_nodes_in_a_row(setup: WorkerSetup) -> None:
    async def work(workers: InprocWorkers) -> None:
        samples = await prepare(workers)
        halves = {0: kit.task("view_inf", samples[:4]), 1: kit.task("view_inf", samples[4:], dp=1)}
        results = await workers.run(halves)
        assert [(result.worker, result.samples) for result in results] == [(0, samples[:4]), (1, samples[4:])]
        (result,) = await workers.run({0: kit.task("view_mean", samples)})
        means = read(workers, "view", "view_mean", samples)
        assert all(-20 < mean < 0 for mean in means)
        (result,) = await workers.run({0: kit.task("advantage", samples)})
        rewards = read(workers, GEN, "reward", samples)
        baselines = [(rewards[s - s % 2] + rewards[s - s % 2 + 1]) / 2 for s in samples]
        assert read(workers, GEN, "baseline", samples) == baselines
        spread = [abs(reward - base) for reward, base in zip(rewards, baselines, strict=True)]
        assert result.metrics["spread"] == pytest.approx(sum(spread) / 8)
        lengths = [len(ids) for ids in read(workers, GEN, "input_ids", samples)]
        assert result.metrics["longest.max"] == max(lengths)
        await workers.run({0: kit.task("shifted", samples)})
        assert read(workers, GEN, "shifted", samples) == [base + 1 for base in baselines]
        sums = await workers.summarize(0, GEN, samples)
        assert sums["actor_gen/reward"] == (pytest.approx(sum(rewards)), 8)
        assert sums["view/view_mean"] == (pytest.approx(sum(means)), 8)

    with_workers(setup, work)


def test_the_engine_generates_with_trained_weights(setup: WorkerSetup) -> None:
    async def work(workers: InprocWorkers) -> tuple[list[Any], list[Any]]:
        samples = await prepare(workers)
        await workers.run({0: kit.task("advantage", samples)})
        await workers.run({0: kit.task("shifted", samples)})
        before = read(workers, GEN, "behav_logprobs", samples)
        halves = {0: kit.task("learn", samples[:4]), 1: kit.task("learn", samples[4:], dp=1)}
        for result in await workers.run(halves):
            assert result.metrics["grad_norm"] > 0
        await workers.release(0, samples, GEN, None)
        assert workers._worker._store.num_values() == 0
        await workers.wake("actor@gen", 1)
        await workers.open_groups(0, kit.group_tasks(GEN, range(4)))
        events = await kit.collect(workers, 0, 8)
        assert {(event.oldest, event.newest) for event in events} == {(1, 1)}
        after = read(workers, GEN, "behav_logprobs", samples)
        await workers.run({0: kit.task("recheck", samples)})
        for drawn, theta in zip(after, read(workers, GEN, "theta_logprobs", samples), strict=True):
            assert drawn == pytest.approx(theta, abs=1e-4)
        return before, after

    before, after = with_workers(setup, work)
    assert before != after


def test_a_body_that_raises_in_a_batch_node_is_named(setup: WorkerSetup) -> None:
    async def work(workers: InprocWorkers) -> None:
        samples = await prepare(workers)
        with pytest.raises(RunError) as caught:
            await workers.run({0: kit.task("advantage", samples, step=3)})
        message = str(caught.value)
        assert message.startswith("node 'advantage', step 4, worker 0, 1: ZeroDivisionError: by request (")
        assert "worker_recipe.py:" in message

    with_workers(kit.with_knobs(setup, "advantage", raises=True), work)


def bump(state: State) -> tuple[Any, dict[str, float]]:
    state["calls"] = state.get("calls", 0) + 1
    return torch.full((8,), float(state["calls"])), {"calls": float(state["calls"])}


def test_the_state_of_a_node_is_kept_between_calls(setup: WorkerSetup) -> None:
    changed = kit.with_program(
        setup,
        "advantage",
        body=bump,
        reads=(),
        provided=(("state", "state"),),
        returns=(("calls", "sequence"),),
        knobs={},
    )

    async def work(workers: InprocWorkers) -> None:
        samples = await prepare(workers)
        for calls in (1, 2):
            (result,) = await workers.run({0: kit.task("advantage", samples, step=calls)})
            assert result.metrics == {"calls": calls}
            assert json.loads(result.state) == {"calls": calls}
        (result,) = await workers.run({0: kit.task("recheck", samples)})
        assert result.state is None

    with_workers(changed, work)

    async def resumed(workers: InprocWorkers) -> None:
        (result,) = await workers.run({0: kit.task("advantage", await prepare(workers), step=3)})
        assert result.metrics == {"calls": 3}

    with_workers(dataclasses.replace(changed, node_states={"advantage": '{"calls": 2}'}), resumed)


def test_released_samples_are_reported_and_freed(setup: WorkerSetup) -> None:
    async def work(workers: InprocWorkers) -> None:
        await workers.open_groups(0, kit.group_tasks(GEN, range(2)))
        await workers.release(0, (0, 1), GEN, None)
        events = await kit.collect(workers, 0, 2)
        assert {(type(event), event.key) for event in events} == {(Failed, 0), (Failed, 1)}
        await workers.wake("actor@gen", 0)
        assert {event.sample for event in await kit.collect(workers, 0, 2)} == {2, 3}
        await workers.release(0, (2, 3), GEN, None)
        await workers.compute(0, kit.sample_tasks("score", [2]) + kit.sample_tasks("view", [3]))
        events = await kit.collect(workers, 0, 2)
        assert {(type(event), event.key) for event in events} == {(Failed, 2), (Failed, 3)}
        assert workers._worker._store.num_values() == 0

    with_workers(setup, work)


def test_orders_sent_with_one_for_a_released_sample_are_run(setup: WorkerSetup) -> None:
    async def work(workers: InprocWorkers) -> None:
        await generate(workers)
        await workers.release(0, (2,), GEN, None)
        await workers.compute(0, kit.sample_tasks("score", range(4)))
        events = {event.key: type(event) for event in await kit.collect(workers, 0, 4)}
        assert events == {0: ComputeReady, 1: ComputeReady, 2: Failed, 3: ComputeReady}
        assert len(read(workers, GEN, "reward", (0, 1, 3))) == 3

    with_workers(setup, work)


def test_a_saved_model_loads(setup: WorkerSetup, tmp_path: Path) -> None:
    async def work(workers: InprocWorkers) -> None:
        await workers.save("actor", str(tmp_path))
        await workers.finish_save("actor", str(tmp_path))

    with_workers(setup, work)
    loader: Any = AutoTokenizer
    assert loader.from_pretrained(tmp_path).decode([5])
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config.hidden_size == 32


def test_saved_samples_are_read_by_another_worker(setup: WorkerSetup, tmp_path: Path) -> None:
    """Samples with the fields of all nodes and of a derived stream, of which some are read."""
    fields = {
        GEN: ("input_ids", "behav_logprobs", "messages", "reward", "hint", "group"),
        "view": ("input_ids",),
    }
    directory, held = str(tmp_path), (1, 6, 3)

    def values(workers: InprocWorkers) -> list[Any]:
        return [read(workers, stream, field, held) for stream, names in fields.items() for field in names]

    async def save(workers: InprocWorkers) -> list[Any]:
        await prepare(workers)
        await workers.save_samples(1, directory, {GEN: range(1, 9)}, {GEN: (3, 9)})
        saved = await workers.finish_samples(1, directory)
        assert (saved.not_saved, saved.without_journal) == ((), ())
        assert saved.files == {p.name: file_checksum(p) for p in tmp_path.iterdir()}
        await workers.save_samples(0, directory, {}, {})
        assert await workers.finish_samples(0, directory) == SavedSamples()
        return values(workers)

    async def restore(workers: InprocWorkers) -> list[Any]:
        await workers.restore_samples(0, directory, {"worker-1": {GEN: held}})
        with pytest.raises(RunError, match=r"worker-1.json cannot be read: .*it lacks sample 0 of actor_gen"):
            await workers.restore_samples(0, directory, {"worker-1": {GEN: (0,)}})
        restored = values(workers)
        await workers.release(0, held, GEN, None)
        assert workers._worker._store.num_values() == 0
        return restored

    saved = with_workers(setup, save)
    assert with_workers(setup, restore) == saved


def test_nothing_moves_within_one_process(setup: WorkerSetup) -> None:
    async def work(workers: InprocWorkers) -> int:
        await generate(workers)
        return await workers.transfer(Moves.of([Move(0, 1, (0, 1), ("actor_gen/input_ids",))]))

    assert with_workers(setup, work) == 0


def test_spans_show_what_the_device_did(setup: WorkerSetup) -> None:
    async def work(workers: InprocWorkers) -> list[str]:
        await generate(workers)
        await workers.compute(0, kit.sample_tasks("score", [0]))
        report = await workers.poll(0)
        assert report.engine_stats.num_tokens == 0
        return [span.name for span in report.spans]

    assert "generate actor@gen" in with_workers(setup, work)


def test_closing_twice(setup: WorkerSetup) -> None:
    async def main() -> None:
        workers = InprocWorkers()
        await workers.close()
        workers = InprocWorkers()
        await workers.start(setup)
        await workers.close()
        await workers.close()

    asyncio.run(main())


def test_one_device_shares_the_trainers_storage() -> None:
    alone = kit.setup_of("cluster=cpu-1x1")
    assert [route.how for route in alone.plan.weights] == ["shared"]

    async def work(workers: InprocWorkers) -> None:
        samples = await prepare(workers)
        module = workers._worker._backends["actor@train"].shared_module()
        assert module is not None
        engine = kit.engine_module_of(workers)
        storages = [{p.data_ptr() for p in m.parameters()} for m in (module, engine)]
        assert storages[0] == storages[1]
        await workers.run({0: kit.task("advantage", samples)})
        await workers.run({0: kit.task("shifted", samples)})
        (result,) = await workers.run({0: kit.task("learn", samples)})
        assert result.metrics["grad_norm"] > 0
        await workers.wake("actor@gen", 1)
        await workers.open_groups(0, kit.group_tasks(GEN, range(4, 8)))
        events = await kit.collect(workers, 0, 8)
        assert {(event.oldest, event.newest) for event in events} == {(1, 1)}

    with_workers(alone, work)
