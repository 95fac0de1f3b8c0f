"""Bodies called alone, with the stand-ins of `hflow.testing`."""

import asyncio
from pathlib import Path

import pytest

from hflow.dsl import load_recipe
from hflow.testing import END, CharacterTokenizer, ScriptedEngine
from hflow.types import Engine, Tokenizer, ToolCall

GOOD = Path(__file__).parents[1] / "graphs" / "good"


def test_stand_ins_have_the_types_they_replace():
    assert isinstance(ScriptedEngine([]), Engine)
    assert isinstance(CharacterTokenizer(), Tokenizer)


def test_a_tool_agent_runs_on_a_script():
    agent = load_recipe(GOOD / "tool_agent.py").bodies()["agent"]
    engine = ScriptedEngine([ToolCall("calculator", {"expression": "2 + 3"}), "It is 5."], version=7)
    talk, num_calls = asyncio.run(agent(engine, "2 + 3 = "))
    assert (num_calls, talk.completion, talk.stop_reason, talk.num_turns) == (1, "It is 5.", "stop", 2)
    assert [message["role"] for message in talk.messages] == ["user", "assistant", "tool", "assistant"]
    assert engine.calls == [ToolCall("calculator", {"expression": "2 + 3"})]
    assert engine.prompts[1].endswith("5")
    text = "".join(chr(t) for t, learned in zip(talk.input_ids, talk.loss_mask, strict=True) if learned)
    assert text.endswith(f"It is 5.{chr(END)}")
    learned = set(zip(talk.loss_mask, talk.versions, talk.behav_logprobs, strict=True))
    assert learned == {(True, 7, -1.0), (False, -1, 0.0)}


def test_errors_of_tools_are_answers_and_others_are_raised():
    calculator = load_recipe(GOOD / "tool_agent.py").bodies()["agent"].__globals__["calculator"]

    async def episode(engine: ScriptedEngine) -> list[str]:
        talk = await engine.complete("1 / 0", tools=[int])
        assert (await engine.complete(talk)).tools == (int,)
        with pytest.raises(ZeroDivisionError):
            await engine.call(lambda: 1 / 0)
        return [await engine.call(calculator, expression="1 / 0"), await engine.call(int, x=1)]

    first, second = asyncio.run(episode(ScriptedEngine(["a", "b"])))
    assert first == "error: ZeroDivisionError: division by zero"
    assert second.startswith("error: TypeError: ")


def test_a_game_runs_on_two_scripts():
    game = load_recipe(GOOD / "game.py").bodies()["game"]
    alice, bob = ScriptedEngine(["long"]), ScriptedEngine(["no"])
    first, second, winner = asyncio.run(game(alice, bob, "begin"))
    assert (first.reply, second.reply, winner) == ("long", "no", 1.0)
    assert bob.prompts == ["long"]


def test_the_limit_cuts_and_the_script_ends():
    async def episode(engine: ScriptedEngine) -> None:
        talk = await engine.complete("hi", max_tokens=2)
        assert (talk.completion, talk.stop_reason, talk.num_tokens) == ("lo", "length", 2)
        with pytest.raises(ValueError, match="no reply for completion 2"):
            await engine.complete(talk)

    asyncio.run(episode(ScriptedEngine(["long"])))


def test_effects_are_repeatable():
    first, second = ScriptedEngine([], seed=3), ScriptedEngine([], seed=3)
    assert [first.random(), first.random()] == [second.random(), second.random()]
    assert [first.time(), first.time()] == [1.0, 2.0]


def test_an_encoder_runs_alone():
    view = load_recipe(GOOD / "sft.py").bodies()["sft_view"]
    assert view(CharacterTokenizer(), "1+1=", "2").loss_mask == (False,) * 4 + (True, True)
    chat = load_recipe(GOOD / "tool_agent.py").bodies()["rm_view"]
    talk = chat(
        CharacterTokenizer(), [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    )
    assert (talk.input_ids, talk.loss_mask) == ((97, 98, END), (False, True, True))
