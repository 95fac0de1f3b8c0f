"""Episodes on a real engine: masks, turns, interruption, cancellation, failures."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import episode_kit
import pytest
import torch
from episode_kit import Gated, driving, model_settings, new_effects, until

from hflow.base.errors import BackendError, DataError, EpisodeError, RunError
from hflow.data.text.tokenizer import TextTokenizer, TokenizerSettings
from hflow.engines.driver import EngineDriver
from hflow.engines.embedded.engine import EmbeddedEngine
from hflow.engines.interface import SamplingParams
from hflow.episodes.episode_engine import EpisodeEngine, sample_seed
from hflow.models.settings import ModelSettings
from hflow.types import Engine, Trajectory
from hflow.types.engine import SleepLevel
from hflow.weights.incoming import IncomingWeights

ALPHABET = "0123456789+= abcdefghijklmnop[]\n"
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ '<eos>' if m.role == 'assistant' else '' }}"
    "{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}[ai]{% endif %}"
)
TOKENIZER = TextTokenizer(TokenizerSettings(alphabet=ALPHABET))
CHAT = TextTokenizer(TokenizerSettings(alphabet=ALPHABET + "usrty", chat_template=TEMPLATE))

ASKED = [{"role": "user", "content": "1+1"}]


def model() -> ModelSettings:
    return model_settings(CHAT.num_tokens, num_positions=400)


def new_engine(**options: int) -> EmbeddedEngine:
    return EmbeddedEngine(model(), options, None, TOKENIZER.decode)


def episode(
    driver: EngineDriver, sample: int = 0, tokenizer: TextTokenizer = TOKENIZER, **params: Any
) -> EpisodeEngine:
    return episode_kit.episode(driver, tokenizer, new_effects(), sample=sample, **params)


def run(body: Callable[[EngineDriver], Awaitable[Any]], **options: int) -> Any:
    with driving(new_engine(**options)) as driver:
        return asyncio.run(asyncio.wait_for(body(driver), 60))  # type: ignore[arg-type]


def undisturbed(samples: Sequence[int]) -> list[Trajectory]:
    """Return the trajectories of these episodes without interruption."""

    async def play(driver: EngineDriver) -> list[Trajectory]:
        return await asyncio.gather(*(episode(driver, i).complete(f"{i}+1=") for i in samples))

    talks: list[Trajectory] = run(play)
    return talks


def test_a_completion_has_masks_versions_and_text() -> None:
    talk: Trajectory = run(lambda driver: episode(driver).complete("17+25="))
    prompt = TOKENIZER.encode_prompt("17+25=")
    num_drawn = len(talk.input_ids) - len(prompt)
    assert list(talk.input_ids[: len(prompt)]) == prompt
    assert talk.loss_mask == (False,) * len(prompt) + (True,) * num_drawn
    assert talk.versions == (-1,) * len(prompt) + (0,) * num_drawn
    assert talk.behav_logprobs[: len(prompt)] == (0.0,) * len(prompt)
    assert all(logprob < 0 for logprob in talk.behav_logprobs[len(prompt) :])
    assert talk.completion == TOKENIZER.decode(talk.input_ids[len(prompt) :]) == talk.reply
    assert [m["role"] for m in talk.messages] == ["user", "assistant"]
    assert (talk.num_turns, talk.num_tokens, talk.tool_calls) == (1, num_drawn, ())
    ended = talk.input_ids[-1] == 2
    assert (talk.stop_reason, num_drawn <= 12) == ("stop" if ended else "length", True)


def test_concurrent_episodes_equal_separate_ones() -> None:
    async def all_at_once(driver: EngineDriver) -> list[Trajectory]:
        return await asyncio.gather(*(episode(driver, i).complete(f"{i % 5}+1=") for i in range(40)))

    together: list[Trajectory] = run(all_at_once, max_running=16)
    assert len({talk.input_ids for talk in together}) == 40
    for i in (0, 7, 39):
        alone: Trajectory = run(lambda driver, i=i: episode(driver, i).complete(f"{i % 5}+1="))
        assert together[i].input_ids == alone.input_ids


def test_results_cross_threads_once_per_step() -> None:
    async def counted(driver: EngineDriver) -> int:
        loop = asyncio.get_running_loop()
        crossings, original = 0, loop.call_soon_threadsafe

        def counting(*args: Any, **kwargs: Any) -> Any:
            nonlocal crossings
            crossings += 1
            return original(*args, **kwargs)

        loop.call_soon_threadsafe = counting  # type: ignore[method-assign]
        params = SamplingParams(max_tokens=6)
        await asyncio.gather(*(driver.submit([1, 5 + i % 3], params) for i in range(50)))
        return crossings

    assert run(counted, max_running=64) == 1


def test_turns_encode_only_added_messages() -> None:
    async def play(driver: EngineDriver) -> list[Trajectory]:
        first = await episode(driver).complete("1+1=")
        second = await episode(driver, 1).complete(first.add("user", "no ").add("user", "3="), max_tokens=4)
        return [first, second]

    first, second = run(play)
    added = tuple(TOKENIZER.encode("no 3="))
    start = len(first.input_ids)
    assert second.input_ids[: start + len(added)] == first.input_ids + added
    assert second.loss_mask[: start + len(added)] == first.loss_mask + (False,) * len(added)
    assert second.versions[start : start + len(added)] == (-1,) * len(added)
    assert second.behav_logprobs[:start] == first.behav_logprobs
    assert (second.num_turns, second.pending) == (2, ())
    assert [m["role"] for m in second.messages] == ["user", "assistant", "user", "user", "assistant"]
    assert second.completion == TOKENIZER.decode(second.input_ids[start + len(added) :])


@pytest.mark.parametrize(
    ("prompt", "tools", "message"),
    [
        ([*ASKED, {"role": "assistant", "content": "2"}], None, "the last message is the assistant's"),
        ([{"role": "human", "content": "1+1"}], None, "but it is 'human'; did you mean 'user'"),
        (ASKED, ['{"name": "f"}'], r"tools\[0\] must be a function with a name"),
        (ASKED, [{"name": "f", "parameters": {"properties": {"a": None}}}], "describes the parameter 'a' as"),
    ],
)
def test_conversations_of_bodies_are_those_of_datasets(prompt: Any, tools: Any, message: str) -> None:
    """A body may read them as Json, or make them."""

    async def play(driver: EngineDriver) -> list[Trajectory]:
        return [await episode(driver, 0, CHAT).complete(prompt, tools=tools)]

    with pytest.raises(DataError, match=message):
        run(play)


def test_messages_that_an_episode_adds_are_those_of_datasets() -> None:
    async def play(driver: EngineDriver) -> list[Trajectory]:
        first = await episode(driver, 0, CHAT).complete([{"role": "developer", "content": "1"}, *ASKED])
        for role in ("environment", "assistant"):
            with pytest.raises(EpisodeError, match=r"messages\[0\].role must be|the last message is"):
                await episode(driver, 1, CHAT).complete(first.add(role, "no"))
        return [first]

    (first,) = run(play)
    assert first.messages[0] == {"role": "system", "content": "1"}


def test_turns_of_a_chat_use_the_template() -> None:
    async def play(driver: EngineDriver) -> list[Trajectory]:
        first = await episode(driver, 3, CHAT).complete([{"role": "user", "content": "1+1"}])
        return [first, await episode(driver, 4, CHAT).complete(first.add("user", "no"))]

    first, second = run(play)
    opening = CHAT.encode("[user]1+1\n[ai]")
    assert list(first.input_ids[: len(opening)]) == opening
    end = () if first.input_ids[-1] == 2 else (2,)
    added = (*end, *CHAT.encode("\n[user]no\n[ai]"))
    assert second.input_ids[: len(first.input_ids) + len(added)] == first.input_ids + added
    assert first.messages[0] == {"role": "user", "content": "1+1"}


def test_a_trajectory_cut_by_length_is_continued() -> None:
    async def play(driver: EngineDriver) -> list[Trajectory]:
        whole = await episode(driver).complete("1=", max_tokens=9)
        first = await episode(driver).complete("1=", max_tokens=4)
        return [whole, await episode(driver).complete(first, max_tokens=5)]

    whole, pieces = run(play)
    assert pieces.input_ids[: len(whole.input_ids)] == whole.input_ids
    assert pieces.num_turns == 2


def test_stop_strings_end_the_turn_and_are_not_in_the_completion() -> None:
    async def play(driver: EngineDriver) -> list[Trajectory]:
        free = await episode(driver, 5).complete("1=")
        return [free, await episode(driver, 5).complete("1=", stop=[free.completion[3:5]])]

    free, stopped = run(play)
    cut = free.completion.find(free.completion[3:5])
    assert stopped.completion == free.completion[:cut]
    assert stopped.input_ids == free.input_ids[: len(stopped.input_ids)]
    assert TOKENIZER.decode(stopped.input_ids).endswith(free.completion[3:5])
    assert stopped.stop_reason == "stop"


def started(driver: EngineDriver, num: int) -> list[asyncio.Task[Trajectory]]:
    return [asyncio.create_task(episode(driver, i).complete(f"{i}+1=")) for i in range(num)]


def gated(**options: int) -> Gated:
    return Gated(model(), options)


def test_an_interrupted_episode_sees_one_longer_completion() -> None:
    async def play(driver: EngineDriver, engine: Gated) -> list[Trajectory]:
        tasks = started(driver, 6)
        engine.num_allowed = 5
        await until(lambda: engine.num_allowed == 0)
        driver.interrupt()
        assert engine.num_unfinished == 0
        weights = {name: tensor.clone() for name, tensor in engine._module.named_parameters()}
        driver.load([IncomingWeights.of_tensors(weights.items)], 3)
        driver.sleep(SleepLevel.KEEP_WEIGHTS)
        driver.wake_weights()
        driver.wake_cache()
        engine.num_allowed = 1000
        driver.resume()
        return list(await asyncio.gather(*tasks))

    plain = undisturbed(range(6))
    engine = gated(max_running=4)
    with driving(engine) as driver:
        talks = asyncio.run(asyncio.wait_for(play(driver, engine), 60))
    assert driver.stats.num_tokens == sum(talk.num_tokens for talk in talks)
    for i, (talk, expected) in enumerate(zip(talks, plain, strict=True)):
        assert talk.input_ids == expected.input_ids
        num_drawn = min(5, expected.num_tokens) if i < 4 else None
        stamps = [v for v in talk.versions if v >= 0]
        assert stamps == sorted(stamps)
        if num_drawn is not None:
            assert stamps == [0] * num_drawn + [3] * (len(stamps) - num_drawn)
    assert any(set(talk.versions) >= {0, 3} for talk in talks)


def test_requests_during_an_interruption_wait() -> None:
    async def play(driver: EngineDriver) -> Trajectory:
        driver.interrupt()
        driver.interrupt()
        driver.sleep(SleepLevel.KEEP_WEIGHTS)
        task = asyncio.ensure_future(episode(driver).complete("1="))
        await asyncio.sleep(0.02)
        assert not task.done()
        driver.set_version(2)
        driver.wake_weights()
        driver.wake_cache()
        driver.resume()
        driver.resume()
        return await task

    talk = run(play)
    assert set(talk.versions) == {-1, 2}


def test_the_request_of_a_cancelled_episode_is_cancelled() -> None:
    async def play(driver: EngineDriver, engine: Gated) -> list[Trajectory]:
        tasks = started(driver, 3)
        engine.num_allowed = 2
        await until(lambda: engine.num_allowed == 0)
        tasks[1].cancel()
        await until(lambda: engine.num_unfinished == 2)
        engine.num_allowed = 1000
        return list(await asyncio.gather(tasks[0], tasks[2]))

    engine = gated()
    with driving(engine) as driver:
        talks = asyncio.run(asyncio.wait_for(play(driver, engine), 60))
    assert [talk.input_ids for talk in talks] == [talk.input_ids for talk in undisturbed([0, 2])]


def test_a_refused_prompt_fails_alone() -> None:
    async def play(driver: EngineDriver) -> list[Any]:
        prompts = ["1=", "1" * 500, "2="]
        tasks = (episode(driver, i).complete(prompt) for i, prompt in enumerate(prompts))
        return list(await asyncio.gather(*tasks, return_exceptions=True))

    good, bad, also_good = run(play)
    assert isinstance(good, Trajectory)
    assert isinstance(also_good, Trajectory)
    assert isinstance(bad, BackendError)
    assert "takes 1 to 399" in str(bad)


def test_all_requests_of_a_failed_engine_fail() -> None:
    async def play(driver: EngineDriver) -> list[Any]:
        nan = {name: torch.full_like(p, float("nan")) for name, p in new_engine()._module.named_parameters()}
        driver.load([IncomingWeights.of_tensors(nan.items)], 1)
        tasks = (episode(driver, i).complete("1=") for i in range(3))
        failed = list(await asyncio.gather(*tasks, return_exceptions=True))
        later = await asyncio.gather(episode(driver).complete("1="), return_exceptions=True)
        return [*failed, *later]

    for failure in run(play):
        assert isinstance(failure, RunError)
        assert isinstance(failure.__cause__, BackendError)
        assert "NaN" in str(failure)


def test_wrong_weights_are_refused_in_the_callers_thread() -> None:
    with driving(new_engine()) as driver, pytest.raises(BackendError, match="lacks"):
        driver.load([IncomingWeights.of_tensors({"x": torch.zeros(1)}.items)], 1)


def test_effects_are_seeded_by_the_sample() -> None:
    with driving(new_engine()) as driver:
        one, same, other = (episode(driver, i) for i in (1, 1, 2))
        assert isinstance(one, Engine)
        numbers = [one.random() for _ in range(3)]
        assert numbers == [same.random() for _ in range(3)]
        assert numbers != [other.random() for _ in range(3)]
        assert all(0 <= number < 1 for number in numbers)
        assert one.time() > 1.7e9
    keys = [(0, "g", 1, "a"), (1, "g", 1, "a"), (0, "h", 1, "a"), (0, "g", 2, "a"), (0, "g", 1, "b")]
    assert len({sample_seed(*key) for key in keys}) == 5
    assert sample_seed(0, "g", 1, "a") == sample_seed(0, "g", 1, "a")
