"""Replay of episodes from journals: no effect is performed twice, and a different body is refused."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import episode_kit
import pytest
import sandboxed_tools
from episode_kit import (
    Gated,
    Heard,
    driving,
    episode,
    heard,
    model_settings,
    new_effects,
    new_engine,
    shared_sandboxes,
    until,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hflow import sandbox
from hflow.base.errors import EpisodeError, RecipeError
from hflow.data.text.tokenizer import TextTokenizer
from hflow.engines.driver import EngineDriver
from hflow.engines.interface import GenerationResult
from hflow.episodes.episode_engine import EpisodeEngine
from hflow.episodes.journal import Journal, JournalEntry
from hflow.episodes.recorded_effects import MAX_RESTARTS, RecordedEffects
from hflow.testing import ScriptedEngine
from hflow.types import EpisodeState, Trajectory
from hflow.types.engine import SleepLevel
from hflow.workers.storage.sample_files import SampleFiles, SampleFilesReader

plain = pytest.fixture(episode_kit.plain_tokenizer, scope="module")
driver = pytest.fixture(episode_kit.heard_driver, scope="module")
calls = Counter[str]()


async def oracle(question: str) -> str:
    calls[question] += 1
    return f"{len(question)}{calls[question]}"


double = sandbox(timeout=5.0)(sandboxed_tools.double)
"""A tool of a module that imports little, as the server of its calls imports it."""


async def body(engine: EpisodeEngine) -> tuple[Trajectory, list[Any]]:
    """Run an episode with every kind of effect."""
    talk = await engine.complete("1+2=", max_tokens=9)
    seen: list[Any] = [engine.random(), engine.time()]
    talk = talk.add("tool", await engine.call(oracle, question=talk.reply))
    talk = await engine.complete(talk, stop=["9"])
    seen += [await engine.call(double, number=21), engine.random()]
    with_a_failure = await engine.call(double, number="x" * 2, other=1)
    return await engine.complete(talk.add("user", "7"), max_tokens=5), [*seen, with_a_failure]


def play(
    driver: EngineDriver,
    plain: TextTokenizer,
    journal: Journal | None = None,
    body: Callable[[EpisodeEngine], Any] = body,
) -> tuple[Any, RecordedEffects]:
    async def main() -> tuple[Any, RecordedEffects]:
        effects = new_effects(journal)
        result = await body(episode(driver, plain, effects, tools="[]"))
        effects.finish()
        return result, effects

    return asyncio.run(main())


def moved(journal: Journal) -> Journal:
    """Return the journal as a worker reads it from a checkpoint; an empty one is not written."""
    if not journal.entries:
        return journal
    with TemporaryDirectory() as directory:
        assert SampleFiles(Path(directory), "worker-0", {}, {"gen": {4: journal}}).write()
        read = SampleFilesReader(Path(directory), "worker-0").journal("gen", 4)
    assert read is not None
    return read


def test_a_complete_journal_is_replayed_without_any_effect(driver: Heard, plain: TextTokenizer) -> None:
    (talk, seen), effects = play(driver, plain)
    assert seen[4].startswith("error: TypeError: double() got an unexpected keyword")
    journal = moved(effects.journal)
    assert journal == effects.journal
    assert [effect.kind for effect in journal.entries] == [
        *("complete", "random", "time", "call", "complete", "call", "random", "call", "complete")
    ]
    driver.heard.clear()
    calls.clear()
    (again, seen_again), replayed = play(driver, plain, journal)
    assert (again, seen_again) == (talk, seen)
    assert (driver.heard, calls) == ([], {})
    assert replayed.journal == journal
    assert effects.interruption == ""
    assert replayed.interruption == "the episode was interrupted, and continued by its journal of 9 effects"
    assert replayed.counts == effects.counts == {"tool_calls": 2, "tool_errors": 1, "malformed_calls": 0}


def test_every_prefix_of_a_journal_leads_to_the_same_result(driver: Heard, plain: TextTokenizer) -> None:
    (talk, seen), effects = play(driver, plain)
    whole = effects.journal.entries
    for length in range(len(whole) + 1):
        driver.heard.clear()
        calls.clear()
        calls[
            next(e.request["arguments"]["question"] for e in whole if e.request.get("tool") == "oracle")
        ] = 0
        (again, seen_again), _ = play(driver, plain, Journal(whole[:length]))
        assert again == talk
        seen_again[1] = seen[1] if length <= 2 else seen_again[1]  # the time of a fresh effect is new
        assert seen_again == seen
        kinds = [effect.kind for effect in whole[length:]]
        assert len(driver.heard) == kinds.count("complete")


def test_a_partial_completion_continues_with_the_remaining_tokens(
    driver: Heard, plain: TextTokenizer
) -> None:
    (talk, _), effects = play(driver, plain)
    *before, last = effects.journal.entries
    drawn: GenerationResult = last.outcome
    cut = GenerationResult(drawn.ids[:2], drawn.logprobs[:2], (7, 7), "abort")
    part = dataclasses.replace(last, outcome=cut, is_done=False)
    driver.heard.clear()
    num_before = driver.stats.num_tokens
    (again, _), _ = play(driver, plain, moved(Journal((*before, part))))
    assert again.input_ids == talk.input_ids
    assert again.versions[-len(drawn.ids) :] == (7, 7, *drawn.versions[2:])
    assert driver.stats.num_tokens - num_before == len(drawn.ids) - 2


def test_a_different_effect_is_refused_with_the_reason(driver: Heard, plain: TextTokenizer) -> None:
    _, effects = play(driver, plain)
    whole = effects.journal.entries

    def changed(index: int, **changes: Any) -> Journal:
        return Journal((*whole[:index], dataclasses.replace(whole[index], **changes), *whole[index + 1 :]))

    def asked(index: int, **changes: Any) -> Journal:
        return changed(index, request={**whole[index].request, **changes})

    wrong = {
        r"effect 2 .* is time of 'actor', but the journal has random of 'actor'": changed(2, kind="random"),
        r"effect 0 .* is complete of 'actor', but the journal has complete of 'bob'": changed(0, model="bob"),
        r"effect 4 .* complete with prompt='\w+', but the journal has 'other'": asked(4, prompt="other"),
        r"effect 4 .* complete with max_tokens=12, but the journal has 3": asked(4, max_tokens=3),
        r"effect 3 .* call with tool='oracle', but the journal has 'seer'": asked(3, tool="seer"),
        r"effect 5 .* with arguments=\{'number': 21\}, but the journal": asked(5, arguments={"number": 2}),
        r"ended after 9 effects, but its journal has 10": Journal(
            (*whole, JournalEntry("time", "actor", {}, 1.0))
        ),
    }
    for reason, journal in wrong.items():
        with pytest.raises(EpisodeError, match=reason):
            play(driver, plain, journal)


class Ledger:
    """An environment with a state."""

    opened: ClassVar[list[Ledger]] = []

    def __init__(self, balance: int) -> None:
        self.balance = balance
        self.is_closed = False
        self.opened.append(self)

    def add(self, amount: int) -> int:
        self.balance += amount
        return self.balance

    async def add_later(self, amount: int) -> int:
        balance = self.balance
        await asyncio.sleep(0)
        self.balance = balance + amount
        return self.balance

    def close(self) -> None:
        self.is_closed = True


async def keeping(engine: EpisodeEngine) -> list[Any]:
    ledger = await engine.environment(Ledger, balance=100)
    seen = [await engine.call(ledger.add, amount=1)]
    talk = await engine.complete("1=", max_tokens=2)
    seen += await asyncio.gather(*(engine.call(ledger.add_later, amount=10 * i) for i in range(3)))
    seen.append(await engine.call(ledger.add, amount=1000))
    return [talk, seen, ledger.balance]


def test_an_environment_has_its_state_after_a_replay_from_any_point(
    driver: Heard, plain: TextTokenizer
) -> None:
    expected, effects = play(driver, plain, body=keeping)
    assert expected[1:] == [[101, 101, 111, 131, 1131], 1131]
    whole = moved(effects.journal).entries
    assert [entry.kind for entry in whole] == ["environment", "call", "complete", *["call"] * 4]
    for length in range(len(whole) + 1):
        assert play(driver, plain, Journal(whole[:length]), keeping)[0] == expected


def test_an_environment_that_returns_something_else_is_refused(driver: Heard, plain: TextTokenizer) -> None:
    _, effects = play(driver, plain, body=keeping)
    whole = effects.journal.entries
    other = dataclasses.replace(whole[1], outcome={"result": 7, "failed": False})
    reason = r"effect 1 of the replayed episode, Ledger\.add of an environment, returned 101, but .* has 7\."
    with pytest.raises(EpisodeError, match=reason):
        play(driver, plain, Journal((whole[0], other, *whole[2:])), keeping)


class Search:
    """Results that differ from call to call, as those of a search engine do."""

    replay = "recorded"
    asked: ClassVar[list[str]] = []

    def find(self, text: str) -> int:
        self.asked.append(text)
        return len(self.asked)


class Machine(Search):
    replay = "never"


def searching(kind: Callable[[], Search]) -> Callable[[EpisodeEngine], Awaitable[list[int]]]:
    async def body(engine: EpisodeEngine) -> list[int]:
        search = await engine.environment(kind)
        return [await engine.call(search.find, text=text) for text in "abc"]

    return body


def test_recorded_calls_of_an_environment_without_a_state_are_not_made_again(
    driver: Heard, plain: TextTokenizer
) -> None:
    Search.asked.clear()
    expected, effects = play(driver, plain, body=searching(Search))
    assert expected == [1, 2, 3]
    whole = moved(effects.journal).entries
    again, _ = play(driver, plain, Journal(whole[:3]), searching(Search))
    assert again == [1, 2, 4]
    assert Search.asked == ["a", "b", "c", "c"]


@pytest.mark.parametrize("kind", [Machine, lambda: Machine()], ids=["class", "function"])
def test_an_episode_whose_environment_is_never_replayed_begins_again(
    kind: Callable[[], Search], driver: Heard, plain: TextTokenizer
) -> None:
    Search.asked.clear()
    _, effects = play(driver, plain, body=searching(kind))
    again, after = play(driver, plain, moved(effects.journal), searching(kind))
    assert again == [4, 5, 6]
    assert not after.has_diverged
    assert after.counts["restarts"] == 1
    for _ in range(MAX_RESTARTS - 1):
        _, after = play(driver, plain, moved(after.journal), searching(kind))
    assert after.counts["restarts"] == MAX_RESTARTS
    assert after.interruption.startswith("the episode was interrupted 5 times and began again, as an ")
    with pytest.raises(EpisodeError, match="the episode began again 5 times and was interrupted each time"):
        play(driver, plain, moved(after.journal), searching(kind))


def test_a_way_of_replay_that_does_not_exist_is_refused(driver: Heard, plain: TextTokenizer) -> None:
    odd = type("Odd", (Search,), {"replay": "maybe"})
    with pytest.raises(RecipeError, match=r"Odd\.replay is 'maybe'; it must be one of again, rec"):
        play(driver, plain, body=searching(odd))


def test_environments_are_closed(driver: Heard, plain: TextTokenizer) -> None:
    async def main() -> None:
        effects = new_effects()
        await keeping(episode(driver, plain, effects))
        assert not Ledger.opened[-1].is_closed
        await effects.close_environments()
        assert Ledger.opened[-1].is_closed

    asyncio.run(main())


@pytest.mark.parametrize("engine_kind", ["real", "scripted"])
def test_a_method_of_another_object_is_refused(engine_kind: str, driver: Heard, plain: TextTokenizer) -> None:
    async def losing(engine: EpisodeEngine) -> None:
        await engine.call(Ledger(1).add, amount=1)

    def run() -> None:
        if engine_kind == "real":
            play(driver, plain, body=losing)
        else:
            asyncio.run(losing(ScriptedEngine([])))  # type: ignore[arg-type]

    with pytest.raises(RecipeError, match=r"Ledger\.add\) would lose .* `await engine.environment\(Ledger, "):
        run()


async def two_at_once(engine: EpisodeEngine) -> list[Trajectory]:
    talks = (engine.complete(f"{i}=", max_tokens=3 + 5 * i) for i in (1, 0))
    return list(await asyncio.gather(*talks))


def test_concurrent_effects_are_identified_by_their_order(driver: Heard, plain: TextTokenizer) -> None:
    talks, effects = play(driver, plain, body=two_at_once)
    again, _ = play(driver, plain, moved(effects.journal), two_at_once)
    assert again == talks


async def echo(text: str) -> str:
    return text[::-1]


OPS = st.one_of(
    st.tuples(st.just("complete"), st.integers(1, 6)),
    st.tuples(st.just("call"), st.text("0123456789", max_size=3)),
    st.tuples(st.sampled_from(["random", "time", "two"]), st.just(0)),
)


def acting(ops: list[tuple[str, Any]]) -> Callable[[EpisodeEngine], Any]:
    """Return a body that performs these operations and returns their results, except times."""

    async def body(engine: EpisodeEngine) -> list[Any]:
        talk = await engine.complete("1=", max_tokens=2)
        seen: list[Any] = []
        for what, value in ops:
            match what:
                case "complete":
                    talk = await engine.complete(talk, max_tokens=value)
                case "call":
                    talk = talk.add("tool", await engine.call(echo, text=value))
                case "random":
                    seen.append(engine.random())
                case "time":
                    engine.time()
                case "two":
                    asked = (engine.complete(talk, max_tokens=n) for n in (5, 1))
                    seen += await asyncio.gather(*asked)
        return [talk, *seen]

    return body


@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ops=st.lists(OPS, max_size=6), cut=st.integers(0, 9), num_kept=st.integers(0, 3))
def test_any_episode_is_replayed(
    ops: list[tuple[str, Any]], cut: int, num_kept: int, driver: Heard, plain: TextTokenizer
) -> None:
    """From any prefix of its journal, whose last completion may be partial."""
    expected, effects = play(driver, plain, body=acting(ops))
    kept = list(effects.journal.entries[: cut + 1])
    last = kept[-1]
    if last.kind == "complete" and len(last.outcome.ids) > num_kept:
        whole: GenerationResult = last.outcome
        part = GenerationResult(
            *(row[:num_kept] for row in (whole.ids, whole.logprobs, whole.versions)), "abort"
        )
        kept[-1] = dataclasses.replace(last, outcome=part, is_done=False)
    drawn_before = sum(len(e.outcome.ids) for e in kept if e.kind == "complete")
    num_all = sum(len(e.outcome.ids) for e in effects.journal.entries if e.kind == "complete")
    driver.heard.clear()
    num_before = driver.stats.num_tokens
    again, replayed = play(driver, plain, moved(Journal(tuple(kept))), acting(ops))
    assert [x.input_ids if isinstance(x, Trajectory) else x for x in again] == [
        x.input_ids if isinstance(x, Trajectory) else x for x in expected
    ]
    assert driver.stats.num_tokens - num_before == num_all - drawn_before
    assert len(replayed.journal.entries) == len(effects.journal.entries)


def test_an_episode_is_interrupted_in_every_state(plain: TextTokenizer) -> None:
    """The engine sleeps and wakes while the episode generates, calls a tool, and does neither."""
    may_go_on = asyncio.Event()

    async def wait(seconds: float) -> int:
        await may_go_on.wait()
        return 5

    async def states_of(engine: EpisodeEngine) -> Trajectory:
        talk = await engine.complete("1=", max_tokens=6)
        talk = talk.add("tool", await engine.call(wait, seconds=0.0))
        await may_go_on.wait()
        return await engine.complete(talk, max_tokens=6)

    base = new_engine(plain)
    gated = Gated(model_settings(plain.num_tokens), {"max_model_len": 1000}, None, plain.decode)
    state_counts: Counter[EpisodeState] = Counter()

    async def nap(driver: EngineDriver, effects: RecordedEffects, state: EpisodeState) -> None:
        assert effects.status.state is state
        assert {s: n for s, n in state_counts.items() if n} == {state: 1}
        driver.interrupt()
        driver.sleep(SleepLevel.KEEP_WEIGHTS)
        moved(effects.journal)
        assert effects.status.state is state
        driver.wake_weights()
        driver.wake_cache()
        driver.resume()

    async def main(driver: EngineDriver) -> Trajectory:
        effects = RecordedEffects(shared_sandboxes(), state_counts)
        engine = episode(driver, plain, effects)
        await nap(driver, effects, EpisodeState.PENDING)
        effects.status.begin()
        await nap(driver, effects, EpisodeState.INTERACTING)
        task = asyncio.create_task(states_of(engine))
        gated.num_allowed = 3
        await until(lambda: gated.num_allowed == 0)
        await nap(driver, effects, EpisodeState.GENERATING)
        (part,) = effects.journal.entries
        assert (part.is_done, len(part.outcome.ids), part.outcome.stop_reason) == (False, 3, "abort")
        gated.num_allowed = 1000
        await until(lambda: effects.status.state is not EpisodeState.GENERATING)
        await nap(driver, effects, EpisodeState.PROCESSING_TOOLS)
        may_go_on.set()
        await asyncio.sleep(0)
        talk = await task
        effects.status.end()
        await nap(driver, effects, EpisodeState.TERMINATED)
        return talk

    with driving(gated) as driver:
        talk = asyncio.run(asyncio.wait_for(main(driver), 60))
    with heard(base) as alone:
        undisturbed, _ = play(alone, plain, body=states_of)
    assert talk.input_ids == undisturbed.input_ids
    assert talk.loss_mask == undisturbed.loss_mask
