"""Tools in episodes on a real engine: turns, errors, counts, unchanged tokens."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import episode_kit
import pytest
import sandboxed_tools
from episode_kit import Heard, Written, check_tokens, episode, new_effects
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hflow import sandbox
from hflow.base.errors import EpisodeError, RecipeError
from hflow.data.text.tokenizer import TextTokenizer
from hflow.engines.interface import SamplingParams
from hflow.engines.request import new_request, stop_reason
from hflow.types import ToolCall, Trajectory

plain = pytest.fixture(episode_kit.plain_tokenizer, scope="module")
chat = pytest.fixture(episode_kit.chat_tokenizer, scope="module")
driver = pytest.fixture(episode_kit.heard_driver, scope="module")


calculator = sandbox(timeout=5.0)(sandboxed_tools.calculator)
"""A tool of a module that imports little, as the server of its calls imports it."""


async def later(key: str) -> dict[str, Any]:
    await asyncio.sleep(0)
    return {"key": key, "pair": (1, 2)}


def broken(key: str) -> str:
    raise LookupError(f"no {key}")


TEXTS = st.text("ab0123456789+= ?", max_size=8)
TURN = st.tuples(st.integers(1, 14), st.lists(TEXTS, max_size=2), st.sampled_from(["tool", "user"]))


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    prompt=TEXTS.filter(bool),
    turns=st.lists(TURN, min_size=1, max_size=4),
    sample=st.integers(0, 10**6),
    style=st.sampled_from(["[]", "+=?", "hermes", "none"]),
)
def test_tokens_are_only_appended(
    prompt: str,
    turns: list[tuple[int, list[str], str]],
    sample: int,
    style: str,
    plain: TextTokenizer,
    chat: TextTokenizer,
    driver: Heard,
) -> None:
    """Whatever the turns are, no generated token is encoded again."""
    is_chat = style in ("hermes", "none")
    offered = [] if style == "none" else [calculator]
    driver.heard.clear()

    async def play() -> Trajectory:
        effects = new_effects()
        engine = episode(
            driver,
            chat if is_chat else plain,
            effects,
            sample=sample,
            tools=None if is_chat else style,
        )
        talk = None
        for max_tokens, added, role in turns:
            before: Any = [{"role": "user", "content": prompt}] if is_chat else prompt
            if talk is not None:
                for text in added:
                    before = talk = talk.add(role, text)
                before = talk
            talk = await engine.complete(before, tools=offered or None, max_tokens=max_tokens)
        assert talk is not None
        return talk

    talk = asyncio.run(play())
    assert talk.num_turns == len(turns) == len(driver.heard)
    check_tokens(talk, driver.heard)


def test_the_tokenizer_does_not_round_trip(plain: TextTokenizer, driver: Heard) -> None:
    """Otherwise `test_tokens_are_only_appended` would not notice that a text is encoded again."""

    async def play() -> list[Trajectory]:
        effects = new_effects()
        runs = (episode(driver, plain, effects, sample=i, max_tokens=40).complete("1=") for i in range(8))
        return list(await asyncio.gather(*runs))

    drawn = [talk.input_ids[3:] for talk in asyncio.run(play())]
    assert any(tuple(plain.encode(plain.decode(ids))) != tuple(i for i in ids if i > 3) for ids in drawn)


@pytest.fixture(scope="module")
def calling(plain: TextTokenizer, driver: Heard) -> tuple[int, Trajectory]:
    """Return a sample in which the random model happens to write `[...]`."""

    async def play() -> list[Trajectory]:
        engines = [
            episode(driver, plain, new_effects(), sample=sample, tools="[]", max_tokens=60)
            for sample in range(200)
        ]
        return list(await asyncio.gather(*(engine.complete("1=", tools=[later]) for engine in engines)))

    return next((sample, talk) for sample, talk in enumerate(asyncio.run(play())) if talk.tool_calls)


def test_a_marked_call_ends_the_turn(plain: TextTokenizer, calling: tuple[int, Trajectory]) -> None:
    _, talk = calling
    drawn = talk.input_ids[len(plain.encode_prompt("1=")) :]
    text = plain.decode(drawn)
    assert talk.stop_reason == "tool_calls"
    (call,) = talk.tool_calls
    assert call == ToolCall("later", {"key": text.partition("]")[0].rpartition("[")[2]})
    assert talk.completion == text
    assert "]" not in plain.decode(drawn[:-1])
    assert talk.tools == (later,)


def test_tools_remain_offered_and_errors_become_results(
    plain: TextTokenizer, driver: Heard, calling: tuple[int, Trajectory]
) -> None:
    sample, first = calling

    async def play() -> tuple[Trajectory, list[Any], dict[str, int]]:
        effects = new_effects()
        engine = episode(driver, plain, effects, sample=sample, tools="[]?", max_tokens=60)
        talk = await engine.complete("1=", tools=[later])
        results = [
            await engine.call(later, **talk.tool_calls[0].arguments),
            await engine.call(later, other="x"),
            await engine.call(calculator, expression="6 * 7"),
            await engine.call(calculator, expression="1 / 0"),
        ]
        longer = await engine.complete(talk.add("tool", "12"), max_tokens=3)
        return longer, results, dict(effects.counts)

    talk, results, counts = asyncio.run(play())
    assert results == [{"key": first.tool_calls[0].arguments["key"], "pair": [1, 2]}, "?", "42", "?"]
    malformed = counts.pop("malformed_calls")
    assert counts == {"tool_calls": 4, "tool_errors": 2}
    assert malformed >= 0
    assert talk.input_ids[: len(first.input_ids)] == first.input_ids
    assert talk.tools == (later,)
    added = plain.encode("12")
    assert list(talk.input_ids[len(first.input_ids) :][: len(added)]) == added


def test_errors_of_other_functions_are_raised(plain: TextTokenizer, driver: Heard) -> None:
    async def play() -> list[Any]:
        effects = new_effects()
        engine = episode(driver, plain, effects, tools="[]")
        with pytest.raises(LookupError, match="no x"):
            await engine.call(broken, key="x")
        with pytest.raises(RuntimeError, match="<lambda> raised StopIteration"):
            await asyncio.wait_for(engine.call(lambda: next(iter(()))), 10)
        with pytest.raises(TypeError, match=r"what <lambda> returned cannot be recorded"):
            await engine.call(lambda: {1j})
        with pytest.raises(TypeError, match=r"the arguments of later cannot be recorded"):
            await engine.call(later, key=object())
        await engine.complete("1=", tools=[broken], max_tokens=1)
        return [await engine.call(broken, key="x")]

    assert asyncio.run(play()) == ["error: LookupError: no x"]


def test_a_template_describes_the_tools(chat: TextTokenizer, driver: Heard) -> None:
    async def play() -> list[Trajectory]:
        effects = new_effects()
        engine = episode(driver, chat, effects, max_tokens=4)
        first = await engine.complete("1+1", tools=[calculator])
        return [first, await engine.complete(first.add("tool", "2")), await engine.complete("1+1")]

    first, second, bare = asyncio.run(play())
    opening = chat.encode("<calculator>[user]1+1\n[ai]")
    assert list(first.input_ids[: len(opening)]) == opening
    text = chat.decode(second.input_ids[len(first.input_ids) :])
    assert text.startswith("\n[tool]2\n[ai]")
    assert list(bare.input_ids[:3]) == chat.encode_prompt("1+1")


def test_calls_and_thoughts_in_special_tokens_are_read(tmp_path: Path) -> None:
    """The text of a turn keeps them for the parser and for rewards of the format, and drops what ended it."""
    (tmp_path / "config.json").write_text('{"model_type": "qwen2", "eos_token_id": 263}')
    template = (
        "{% for m in messages %}{{ m.role }}:{{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    tokenizer = episode_kit.byte_tokenizer(tmp_path, template)
    text = '<think>add</think><tool_call>{"name": "calculator", "arguments": {"expression": "1"}}</tool_call>'
    driver = Written(tokenizer.encode(f"{text}<|im_end|>"), tokenizer.encode("1<|im_end|>"))

    async def play() -> list[Trajectory]:
        engine = episode(driver, tokenizer, new_effects(), stop=("</stop>",))
        first = await engine.complete("1", tools=[calculator])
        assert engine.text_before_calls(first) == "<think>add</think>"
        return [first, await engine.complete(first.add("tool", "1"))]

    first, second = asyncio.run(play())
    assert first.completion == text
    assert first.tool_calls == (ToolCall("calculator", {"expression": "1"}),)
    assert second.completion == "1"
    assert tokenizer.decode_with_special(second.input_ids) == (
        f"user:1<|im_end|>assistant:{text}<|im_end|>tool:1<|im_end|>assistant:1<|im_end|>"
    )
    assert {params.stop_ids for _, params in driver.requests} == {(257, 263)}


MISTRAL = (  # as Mistral 7B 0.3 writes results
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if m.tool_call_id is not defined or m.tool_call_id|length != 9 %}"
    "{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}"
    "[TOOL_RESULTS]{{ m.content }}:{{ m.tool_call_id }}[/TOOL_RESULTS]"
    "{% elif m.role == 'user' %}[INST]{{ m.content }}[/INST]{% else %}{{ m.content }}<|im_end|>{% endif %}"
    "{% endfor %}{# [TOOL_CALLS] #}"
)


@pytest.mark.parametrize(
    ("calls", "ids"),
    [
        ('[TOOL_CALLS] [{"name": "later", "arguments": {"key": "a"}, "id": "abCD12345"}]', ["abCD12345"]),
        ('[TOOL_CALLS] [{"name": "later", "arguments": {"key": "a"}}]', ["c00000000"]),
        ('[TOOL_CALLS]later[CALL_ID]xyz987654[ARGS]{"key": "a"}', ["xyz987654", "c00000001"]),
    ],
)
def test_results_for_mistral_have_the_ids_of_their_calls(tmp_path: Path, calls: str, ids: list[str]) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen2", "eos_token_id": 263}')
    tokenizer = episode_kit.byte_tokenizer(tmp_path, MISTRAL)
    driver = Written(tokenizer.encode(f"{calls}<|im_end|>"), tokenizer.encode("1<|im_end|>"))

    async def play() -> Trajectory:
        talk = await episode(driver, tokenizer, new_effects()).complete("1", tools=[later])
        for _ in ids:
            talk = talk.add("tool", "r")
        return await episode(driver, tokenizer, new_effects()).complete(talk)

    results = "".join(f"[TOOL_RESULTS]r:{result_id}[/TOOL_RESULTS]" for result_id in ids)
    text = tokenizer.decode_with_special(asyncio.run(play()).input_ids)
    assert text == f"[INST]1[/INST]{calls}<|im_end|>{results}1<|im_end|>"


def test_a_stop_string_may_be_a_special_token(tmp_path: Path) -> None:
    tokenizer = episode_kit.byte_tokenizer(tmp_path)
    params = SamplingParams(stop=("</tool_call>",))
    request = new_request(0, tokenizer.encode("1"), params, 99, 999, tokenizer.decode_answer)
    request.ids += tokenizer.encode("<tool_call>{}")
    assert stop_reason(request, tokenizer.decode_answer) is None
    request.ids += tokenizer.encode("</tool_call>")
    assert stop_reason(request, tokenizer.decode_answer) == "stop"


def test_a_message_that_cannot_be_encoded_is_an_episode_error(plain: TextTokenizer, driver: Heard) -> None:
    async def play() -> None:
        effects = new_effects()
        engine = episode(driver, plain, effects, tools="[]")
        talk = await engine.complete("1=", max_tokens=2)
        with pytest.raises(EpisodeError, match=r"a message that the episode added cannot be encoded: .*'É'"):
            await engine.complete(talk.add("tool", "É"))
        with pytest.raises(RecipeError, match="offers one tool"):
            await engine.complete("1=", tools=[later, broken])

    asyncio.run(play())
