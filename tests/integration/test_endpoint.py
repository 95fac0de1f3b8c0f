"""OpenAI's client talks to the policy over real HTTP, and its conversations become trajectories."""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import episode_kit
import openai
import pytest
from endpoint_kit import ADD, ASK, CALLS, client_of, find_calling_sample, play, serve
from episode_kit import Gated, Heard, check_tokens, driving, episode, heard, new_effects, new_engine, until
from openai import AsyncOpenAI

from hflow.base.errors import ConfigError, EpisodeError, HflowError, RecipeError, RunError
from hflow.data.text.tokenizer import TextTokenizer
from hflow.engines.embedded.engine import EmbeddedEngine
from hflow.engines.interface import GenerationResult
from hflow.episodes.endpoint.conversations import EpisodeEndpoint
from hflow.episodes.endpoint.server import EndpointServer
from hflow.episodes.episode_engine import EpisodeEngine
from hflow.episodes.journal import Journal
from hflow.launch.checkpoints.serve import CheckpointResponder
from hflow.testing import ScriptedEngine
from hflow.types import Endpoint, ToolCall, Trajectory
from hflow.weights.incoming import IncomingWeights

plain = pytest.fixture(episode_kit.plain_tokenizer, scope="module")
chat = pytest.fixture(episode_kit.chat_tokenizer, scope="module")
shared_driver = pytest.fixture(episode_kit.heard_driver, scope="module")

Message = dict[str, Any]


@pytest.fixture
def driver(shared_driver: Heard) -> Heard:
    shared_driver.heard.clear()
    return shared_driver


def weights_of(engine: EmbeddedEngine, factor: float = 1.0) -> IncomingWeights:
    """The weights of another engine."""
    weights = {name: factor * tensor.detach() for name, tensor in engine._module.named_parameters()}
    return IncomingWeights.of_tensors(weights.items)


def sent_back(reply: Any) -> Message:
    """The message of a reply, as agents append it to their conversation."""
    message: Message = reply.choices[0].message.model_dump()
    return message


def test_a_chat_is_the_completion_that_an_episode_gets(chat: TextTokenizer, driver: Heard) -> None:
    direct = asyncio.run(episode(driver, chat, new_effects(), sample=3).complete(ASK))

    async def ask(client: AsyncOpenAI, endpoint: Endpoint) -> tuple[Any, Trajectory]:
        assert endpoint.base_url.startswith("http://127.0.0.1:")
        assert [model.id async for model in client.models.list()] == ["actor"] == [endpoint.model]
        reply = await client.chat.completions.create(
            model=endpoint.model, messages=ASK, logprobs=True, temperature=1.0, user="me"
        )
        return reply, endpoint.trajectory

    reply, talk = play(ask, driver, chat, sample=3)
    assert talk == direct
    (choice,) = reply.choices
    assert (choice.message.content, choice.finish_reason) == (direct.completion, direct.stop_reason)
    num_prompt = len(direct.input_ids) - direct.num_tokens
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (num_prompt, direct.num_tokens)
    logprobs = tuple(token.logprob for token in choice.logprobs.content)
    assert logprobs == direct.behav_logprobs[num_prompt:]
    tokens = [token.token for token in choice.logprobs.content]
    assert tokens == [chat.decode_token(token) for token in direct.input_ids[num_prompt:]]


async def use_tools(client: AsyncOpenAI, endpoint: Endpoint) -> Trajectory:
    """An agent: two turns, with a call of the tool if the model makes one."""
    messages: list[Any] = [*ASK]
    reply = await client.chat.completions.create(model=endpoint.model, messages=messages, tools=[ADD])
    messages.append(sent_back(reply))
    for call in reply.choices[0].message.tool_calls or ():
        assert call.function.name == "add"
        content = json.loads(call.function.arguments)["text"][:3]
        messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
    if messages[-1]["role"] == "assistant":
        messages.append({"role": "user", "content": "no"})
    await client.chat.completions.create(model=endpoint.model, messages=messages, tools=[ADD])
    return endpoint.trajectory


@pytest.fixture(scope="module")
def calling_sample(chat: TextTokenizer, shared_driver: Heard) -> int:
    return find_calling_sample(chat, shared_driver)


def test_turns_with_a_tool_are_never_encoded_again(
    chat: TextTokenizer, driver: Heard, calling_sample: int
) -> None:
    effects = new_effects()
    talk = play(use_tools, driver, chat, effects, sample=calling_sample, **CALLS)
    assert talk.num_turns == len(driver.heard) == 2
    check_tokens(talk, driver.heard)
    (first_prompt, first), (second_prompt, _) = driver.heard
    assert second_prompt[: len(first_prompt) + len(first.ids)] == first_prompt + first.ids
    assert [message["role"] for message in talk.messages] == ["user", "assistant", "tool", "assistant"]
    assert effects.counts["malformed_calls"] >= 0
    encoded = chat.encode(chat.decode(first.ids))
    assert tuple(encoded) != first.ids, "a test in which encoding again changes nothing shows nothing"


def test_tool_calls_are_returned_in_openais_form(
    chat: TextTokenizer, driver: Heard, calling_sample: int
) -> None:
    async def ask(client: AsyncOpenAI, endpoint: Endpoint) -> list[Any]:
        request: Any = {"model": endpoint.model, "messages": ASK, "tools": [ADD]}
        replies = [await client.chat.completions.create(**request)]
        stream = await client.chat.completions.create(**request, stream=True)
        replies.append([chunk async for chunk in stream])
        return [*replies, endpoint.trajectories]

    reply, _, talks = play(ask, driver, chat, sample=calling_sample, **CALLS)
    (choice,) = reply.choices
    assert choice.finish_reason == talks[0].stop_reason == "tool_calls"
    (call,) = choice.message.tool_calls
    (expected,) = talks[0].tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == (expected.name, expected.arguments)
    head = talks[0].completion.rpartition("[")[0]
    assert choice.message.content == (head or None)


def test_without_a_choice_of_tools_a_call_stays_text(
    chat: TextTokenizer, driver: Heard, calling_sample: int
) -> None:
    async def ask(client: AsyncOpenAI, endpoint: Endpoint) -> Any:
        return await client.chat.completions.create(
            model=endpoint.model, messages=ASK, tools=[ADD], tool_choice="none"
        )

    (choice,) = play(ask, driver, chat, sample=calling_sample, **CALLS).choices
    assert choice.message.tool_calls is None
    assert choice.finish_reason in ("stop", "length")


def test_new_weights_between_turns_and_in_a_turn(chat: TextTokenizer) -> None:
    """Tokens keep the version that drew them, and the agent notices nothing."""
    engine = Gated(episode_kit.model_settings(chat.num_tokens), {"max_model_len": 1000}, None, chat.decode)

    def load(driver: Heard, version: int) -> None:
        driver.interrupt()
        driver.load([weights_of(new_engine(chat, seed=version))], version)
        driver.resume()

    async def talk_twice(client: AsyncOpenAI, endpoint: Endpoint) -> Trajectory:
        engine.num_allowed = 1000
        reply = await client.chat.completions.create(model=endpoint.model, messages=ASK)
        load(driver, 5)
        engine.num_allowed = 4
        messages: Any = [*ASK, sent_back(reply), {"role": "user", "content": "no"}]
        task = asyncio.create_task(
            client.chat.completions.create(model=endpoint.model, messages=messages, max_tokens=30)
        )
        await until(lambda: engine.num_allowed == 0)
        load(driver, 7)
        engine.num_allowed = 1000
        await task
        return endpoint.trajectory

    with heard(engine) as driver:
        talk = play(talk_twice, driver, chat, sample=4)
        check_tokens(talk, driver.heard)
    (_, first), (_, second) = driver.heard
    assert set(first.versions) == {0}
    assert second.versions == (5,) * 4 + (7,) * (len(second.ids) - 4)
    assert len(second.ids) > 4


def test_only_the_key_of_an_open_episode_is_admitted(chat: TextTokenizer, driver: Heard) -> None:
    async def body(server: EndpointServer) -> None:
        engines = [episode(driver, chat, new_effects(), sample=i, server=server) for i in range(2)]
        async with client_of(engines[0]) as (one, first), client_of(engines[1]) as (two, second):
            assert first.base_url == second.base_url
            assert first.api_key != second.api_key
            for client in (one, two):
                await client.chat.completions.create(model="actor", messages=ASK)
            assert first.trajectory != second.trajectory
            for wrong in ("x", first.api_key[:-1]):
                with pytest.raises(
                    openai.AuthenticationError, match=r"the API key is wrong or missing; send"
                ):
                    await one.with_options(api_key=wrong).models.list()
        async with AsyncOpenAI(base_url=first.base_url, api_key=first.api_key) as late:
            with pytest.raises(openai.AuthenticationError):
                await late.chat.completions.create(model="actor", messages=ASK)

    serve(body)


SYSTEM = {"role": "system", "content": "a"}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"temperature": 0.2}, "temperature=0.2 differs from the generate node's temperature=1; leave it out"),
    ({"top_p": 0.9}, "top_p=0.9 differs from the generate node's top_p=1"),
    ({"extra_body": {"top_k": 5}}, "top_k=5 differs from the generate node's top_k=0"),
    ({"n": 2}, "n=2 is not supported; set it to 1, or leave it out"),
    ({"seed": 3}, "seed is not supported, as the sample has one"),
    ({"presence_penalty": 0.5}, "presence_penalty=0.5 is not supported; set it to 0"),
    ({"frequency_penalty": 0.5}, "frequency_penalty=0.5 is not supported; set it to 0"),
    ({"logit_bias": {"5": 1}}, 'logit_bias={"5": 1} is not supported'),
    ({"response_format": {"type": "json_object"}}, "response_format="),
    ({"top_logprobs": 2, "logprobs": True}, "top_logprobs=2 is not supported"),
    ({"parallel_tool_calls": False, "tools": [ADD]}, "parallel_tool_calls=false is not supported"),
    ({"tool_choice": "required", "tools": [ADD]}, 'tool_choice="required" is not supported; set it to auto'),
    (
        {"extra_body": {"temprature": 1}},
        "'temprature' is unknown to this endpoint; did you mean 'temperature'",
    ),
    ({"max_tokens": 0}, "max_tokens is 0; it must be a whole number from 1 to"),
    ({"top_p": 0}, "top_p is 0; it must be more than 0 and at most 1"),
    ({"top_p": 1.5}, "top_p is 1.5; it must be more than 0 and at most 1"),
    (
        {"max_tokens": 3, "max_completion_tokens": 3},
        "max_tokens and max_completion_tokens exclude each other",
    ),
    ({"stop": [""]}, "stop must be a text or a list of texts"),
    ({"tools": [{"type": "web_search"}]}, "tools[0] must be a function with a name"),
    ({"tools": [{"type": "function", "function": {"name": "x", "parameters": [1]}}]}, "tools[0] must be a"),
    ({"messages": [{"role": "assistant", "tool_calls": 3}, *ASK]}, "messages[0].tool_calls is not supported"),
    ({"messages": [{"role": "assistant", "tool_calls": [3]}, *ASK]}, "tool_calls[0] must be a function call"),
    ({"messages": [{"role": "user", "audio": "x"}]}, "messages[0].audio is not supported; leave it out"),
    ({"messages": []}, "messages must be a list with at least one message"),
    ({"messages": [{"role": "critic", "content": ""}]}, "messages[0].role must be one of system, developer"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages[0].content must be text",
    ),
    ({"messages": [*ASK, {"role": "assistant", "content": "2"}]}, "the last message is the assistant's"),
    ({"messages": [{"role": "user", "content": "1" * 3000}]}, "the engine takes 1 to 999"),
]


def test_what_cannot_be_honoured_is_refused_in_one_line(chat: TextTokenizer, driver: Heard) -> None:
    async def ask(client: AsyncOpenAI, endpoint: Endpoint) -> None:
        for options, message in REFUSED:
            request: Any = {"model": "actor", "messages": ASK, **options}
            with pytest.raises(openai.BadRequestError) as refusal:
                await client.chat.completions.create(**request)
            body: Any = refusal.value.body
            assert message in body["message"], options
            assert "\n" not in body["message"]
            assert body["type"] == "invalid_request_error"
        with pytest.raises(openai.NotFoundError, match=r"there is no model 'gpt-4' here; set model='actor'"):
            await client.chat.completions.create(model="gpt-4", messages=ASK)
        with pytest.raises(openai.NotFoundError, match="there is no POST /v1/embeddings here; use /v1/chat"):
            await client.embeddings.create(model="actor", input="1")
        assert endpoint.trajectories == ()
        with pytest.raises(EpisodeError, match=r"no trajectory, as its agent completed no request"):
            _ = endpoint.trajectory
        neutral: Any = {
            "n": 1,
            "presence_penalty": 0.0,
            "logit_bias": {},
            "response_format": {"type": "text"},
        }
        await client.chat.completions.create(model="actor", messages=ASK, **neutral)
        assert endpoint.trajectory.num_turns == 1

    play(ask, driver, chat)


def test_a_stream_has_the_turn(chat: TextTokenizer, driver: Heard) -> None:
    async def ask(client: AsyncOpenAI, endpoint: Endpoint) -> tuple[list[Any], Trajectory]:
        request: Any = {"model": "actor", "messages": ASK, "logprobs": True, "max_tokens": 5}
        stream = await client.chat.completions.create(
            **request, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        messages: Any = [*ASK, {"role": "assistant", "content": text}, {"role": "user", "content": "no"}]
        await client.chat.completions.create(model="actor", messages=messages)
        return chunks, endpoint.trajectory

    chunks, talk = play(ask, driver, chat)
    check_tokens(talk, driver.heard)
    assert talk.num_turns == 2
    assert chunks[0].choices[0].delta.role == "assistant"
    drawn = driver.heard[0][1]
    logprobs = [chunk.choices[0].logprobs for chunk in chunks[:-1] if chunk.choices[0].logprobs]
    assert tuple(token.logprob for part in logprobs for token in part.content) == drawn.logprobs
    assert len(logprobs) > 1
    reasons = [chunk.choices[0].finish_reason for chunk in chunks[:-1]]
    assert reasons == [None] * (len(reasons) - 1) + [drawn.stop_reason]
    assert chunks[-1].usage.completion_tokens == len(drawn.ids)


def test_an_invented_conversation_is_a_trajectory_of_its_own(chat: TextTokenizer, driver: Heard) -> None:
    invented: Any = [*ASK, {"role": "assistant", "content": "2"}, {"role": "user", "content": "3?"}]

    async def ask(client: AsyncOpenAI, endpoint: Endpoint) -> tuple[Trajectory, ...]:
        await client.chat.completions.create(model="actor", messages=ASK)
        await client.chat.completions.create(model="actor", messages=invented)
        with pytest.raises(EpisodeError, match=r"made 2 trajectories: messages\[1\] .* of role 'assistant'"):
            _ = endpoint.trajectory
        return endpoint.trajectories

    first, second = play(ask, driver, chat)
    check_tokens(first, driver.heard[:1])
    check_tokens(second, driver.heard[1:])
    assert driver.heard[1][0] == tuple(chat.template().prompt(invented))


def test_a_branch_begins_with_the_tokens_of_the_turn_that_it_continues(
    chat: TextTokenizer, driver: Heard
) -> None:
    async def ask(client: AsyncOpenAI, endpoint: Endpoint) -> tuple[Trajectory, ...]:
        reply = await client.chat.completions.create(model="actor", messages=ASK)
        messages: Any = [*ASK, sent_back(reply), {"role": "user", "content": "no"}]
        for _ in range(2):
            await client.chat.completions.create(model="actor", messages=messages)
        with pytest.raises(EpisodeError, match="a request was sent twice"):
            _ = endpoint.trajectory
        return endpoint.trajectories

    first, second = play(ask, driver, chat)
    (_, opening), (prompt, one), (same_prompt, other) = driver.heard
    assert prompt == same_prompt
    assert one.ids != other.ids, "a repeated request has a seed of its own"
    check_tokens(first, driver.heard[:2])
    check_tokens(second, [driver.heard[0], driver.heard[2]])
    assert first.num_turns == second.num_turns == 2
    assert first.num_tokens == len(opening.ids) + len(one.ids)


def test_requests_at_the_same_time_are_branches(chat: TextTokenizer, driver: Heard) -> None:
    async def ask(client: AsyncOpenAI, endpoint: Endpoint) -> tuple[Trajectory, ...]:
        request: Any = {"model": "actor", "messages": ASK}
        await asyncio.gather(*(client.chat.completions.create(**request) for _ in range(4)))
        return endpoint.trajectories

    talks = play(ask, driver, chat)
    assert len({talk.input_ids for talk in talks}) == 4


def test_messages_are_compared_by_what_they_say(chat: TextTokenizer) -> None:
    """Clients may split texts into parts, parse arguments, and add empty fields."""

    async def agent(engine: ScriptedEngine) -> Trajectory:
        async with client_of(engine) as (client, endpoint):
            first: list[Any] = [
                {"role": "developer", "content": "a"},
                {"role": "user", "content": [{"type": "text", "text": "1+"}, {"type": "text", "text": "1"}]},
            ]
            reply = await client.chat.completions.create(model=endpoint.model, messages=first, tools=[ADD])
            call_id = reply.choices[0].message.tool_calls[0].id
            call = {"id": call_id, "function": {"name": "add", "arguments": '{"text":"1", "n": 2}'}}
            rest: list[Any] = [
                {"role": "system", "content": "a"},
                {"role": "user", "content": "1+1", "name": None},
                {"role": "assistant", "content": "", "tool_calls": [{**call, "type": "function"}]},
                {"role": "tool", "tool_call_id": call_id, "content": "2"},
            ]
            await client.chat.completions.create(model=endpoint.model, messages=rest, tools=[ADD])
            return endpoint.trajectory

    engine = ScriptedEngine([ToolCall("add", {"text": "1", "n": 2}), "2."])
    talk = asyncio.run(agent(engine))
    assert (talk.num_turns, talk.completion) == (2, "2.")
    assert engine.prompts[1].endswith("2")


def test_other_tools_start_another_conversation() -> None:
    other = {"type": "function", "function": {"name": "sub"}}

    async def agent(engine: ScriptedEngine) -> list[int]:
        counts = []
        async with client_of(engine) as (client, endpoint):
            messages: list[Any] = [*ASK]
            for tools in ([ADD], [ADD], None, [other]):
                options: Any = {} if tools is None else {"tools": tools}
                reply = await client.chat.completions.create(
                    model=endpoint.model, messages=messages, **options
                )
                messages += [sent_back(reply), {"role": "user", "content": "more"}]
                counts.append(len(endpoint.trajectories))
            with pytest.raises(EpisodeError, match="offers other tools"):
                _ = endpoint.trajectory
        return counts

    assert asyncio.run(agent(ScriptedEngine(["a", "b", "c", "d"]))) == [1, 1, 1, 2]


def test_texts_are_completed_one_by_one(chat: TextTokenizer, plain: TextTokenizer, driver: Heard) -> None:
    async def ask(client: AsyncOpenAI, endpoint: Endpoint) -> tuple[Any, Trajectory]:
        reply = await client.completions.create(model="actor", prompt="1+1=", logprobs=0, stop="3")
        talk = endpoint.trajectory
        stream = await client.completions.create(model="actor", prompt=["2="], stream=True)
        text = "".join([chunk.choices[0].text async for chunk in stream])
        assert text == endpoint.trajectories[1].completion
        for wrong in ({"logprobs": 1}, {"prompt": [[1, 2]]}, {"echo": True}, {"best_of": 2}, {"suffix": "x"}):
            request: Any = {"model": "actor", "prompt": "1=", **wrong}
            with pytest.raises(openai.BadRequestError):
                await client.completions.create(**request)
        return reply, talk

    for tokenizer in (chat, plain):
        driver.heard.clear()
        reply, talk = play(ask, driver, tokenizer, sample=8)
        check_tokens(talk, driver.heard[:1])
        assert reply.choices[0].text == talk.completion
        assert tuple(reply.choices[0].logprobs.token_logprobs) == driver.heard[0][1].logprobs
        assert driver.heard[0][0] == tuple(tokenizer.encode_prompt("1+1="))


def test_a_chat_needs_a_template(plain: TextTokenizer, driver: Heard) -> None:
    async def ask(client: AsyncOpenAI, endpoint: Endpoint) -> None:
        with pytest.raises(openai.BadRequestError, match=r"no chat template, .* set chat_template"):
            await client.chat.completions.create(model="actor", messages=ASK)

    play(ask, driver, plain)


def hide(agent: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[None]]:
    """An agent that hides what goes wrong, as frameworks do."""

    async def hiding(client: AsyncOpenAI, endpoint: Endpoint) -> None:
        with pytest.raises(openai.InternalServerError):
            await agent(client, endpoint)

    return hiding


@pytest.mark.parametrize("is_hidden", [False, True])
def test_a_failed_engine_ends_the_run(chat: TextTokenizer, is_hidden: bool) -> None:
    with driving(new_engine(chat)) as broken:
        broken.load([weights_of(new_engine(chat), float("nan"))], 1)
        with pytest.raises(RunError, match=r"the generation engine stopped: .* NaN"):
            play(hide(use_tools) if is_hidden else use_tools, broken, chat, **CALLS)


def test_a_wrong_recipe_ends_the_run(chat: TextTokenizer, driver: Heard) -> None:
    async def ask(client: AsyncOpenAI, endpoint: Endpoint) -> None:
        await client.chat.completions.create(model="actor", messages=ASK, tools=[ADD, ADD])

    with pytest.raises(RecipeError, match="offers one tool, not 2"):
        play(hide(ask), driver, chat, tools="[]")


@pytest.mark.parametrize("ends", ["client", "episode", "timeout"])
def test_requests_that_no_one_waits_for_are_cancelled(chat: TextTokenizer, ends: str) -> None:
    engine = Gated(episode_kit.model_settings(chat.num_tokens), {"max_model_len": 1000}, None, chat.decode)

    async def ask(client: AsyncOpenAI, endpoint: Endpoint) -> Trajectory | None:
        request: Any = {"model": "actor", "messages": ASK}
        engine.num_allowed = 2
        task = asyncio.create_task(client.chat.completions.create(**request))
        task.add_done_callback(lambda task: task.cancelled() or task.exception())
        if ends == "timeout":
            async with asyncio.timeout(0.2):
                await asyncio.shield(task)
        await until(lambda: engine.num_allowed == 0)
        if ends == "episode":
            return None
        task.cancel()
        await until(lambda: engine.num_unfinished == 0)
        engine.num_allowed = 1000
        await client.chat.completions.create(**request)
        return endpoint.trajectory

    with heard(engine) as driver:
        if ends == "timeout":
            with pytest.raises(TimeoutError):
                play(ask, driver, chat)
        else:
            talk = play(ask, driver, chat)
            if talk is not None:
                check_tokens(talk, driver.heard)
        engine.num_allowed = 1000
        deadline = asyncio.run(asyncio.wait_for(until(lambda: engine.num_unfinished == 0), 10))
        assert deadline is None


def test_an_interrupted_agent_is_replayed(chat: TextTokenizer, driver: Heard, calling_sample: int) -> None:
    """The first turn comes from the journal, the second continues behind its tokens."""
    options: Any = {"sample": calling_sample, **CALLS}
    effects = new_effects()
    undisturbed = play(use_tools, driver, chat, effects, **options)
    first, second = effects.journal.entries
    part: GenerationResult = second.outcome
    num_kept = 2
    assert len(part.ids) > num_kept
    kept = GenerationResult(part.ids[:num_kept], part.logprobs[:num_kept], part.versions[:num_kept], "abort")
    journal = Journal((first, replace(second, outcome=kept, is_done=False)))
    driver.heard.clear()
    replayed = play(use_tools, driver, chat, new_effects(journal), **options)
    assert len(driver.heard) == 1, "the first turn was not generated again"
    assert replayed.input_ids == undisturbed.input_ids
    assert replayed.versions == undisturbed.versions


def test_an_agent_that_asks_something_else_cannot_be_replayed(chat: TextTokenizer, driver: Heard) -> None:
    effects = new_effects()
    play(use_tools, driver, chat, effects, **CALLS)

    async def ask(client: AsyncOpenAI, endpoint: Endpoint) -> None:
        other: Any = [{"role": "user", "content": "2"}]
        with pytest.raises(openai.BadRequestError, match="effect 0 of the replayed episode is complete with"):
            await client.chat.completions.create(model="actor", messages=other, tools=[ADD])

    again = new_effects(effects.journal)
    play(ask, driver, chat, again, **CALLS)
    with pytest.raises(EpisodeError, match="ended after 0 effects"):
        again.finish()


def test_a_port_in_use_is_one_line() -> None:
    async def body(server: EndpointServer) -> None:
        await server.start()
        port = int(server.url.rpartition(":")[2].removesuffix("/v1"))
        with pytest.raises(
            HflowError, match=rf"cannot listen on 127.0.0.1, port {port}: Address already in use"
        ):
            await EndpointServer(port=port).start()

    serve(body)


def test_an_engine_has_several_endpoints(chat: TextTokenizer, driver: Heard) -> None:
    """Their conversations draw with different seeds."""

    async def body(server: EndpointServer) -> list[Trajectory]:
        engine: EpisodeEngine = episode(driver, chat, new_effects(), server=server)
        talks = []
        for _ in range(2):
            async with client_of(engine) as (client, endpoint):
                await client.chat.completions.create(model="actor", messages=ASK)
                talks.append(endpoint.trajectory)
        return talks

    one, other = serve(body)
    assert one.input_ids != other.input_ids


def test_an_agent_that_blocks_runs_on_a_thread(chat: TextTokenizer, driver: Heard) -> None:
    def agent(base_url: str, api_key: str) -> None:
        with openai.OpenAI(base_url=base_url, api_key=api_key) as client:
            client.chat.completions.create(model="actor", messages=ASK)

    async def body(server: EndpointServer) -> Trajectory:
        async with episode(driver, chat, new_effects(), server=server).endpoint() as endpoint:
            await asyncio.to_thread(agent, endpoint.base_url, endpoint.api_key)
            return endpoint.trajectory

    check_tokens(serve(body), driver.heard)


def test_the_address_for_other_machines() -> None:
    async def main() -> None:
        server = EndpointServer("0.0.0.0")
        async with server.admit(EpisodeEndpoint("actor", ScriptedEngine, {}, itertools.count())) as key:
            assert not server.url.startswith("http://0.0.0.0")
            async with AsyncOpenAI(base_url=server.url, api_key=key) as client:
                assert [model.id async for model in client.models.list()] == ["actor"]
        await server.close()

    asyncio.run(main())


def test_a_tool_offered_by_its_schema_is_the_function_of_its_name(chat: TextTokenizer, driver: Heard) -> None:
    """Its errors are results, and its calls are counted."""

    def add(text: str) -> str:
        raise LookupError(text)

    async def body(server: EndpointServer) -> tuple[Any, dict[str, int]]:
        effects = new_effects()
        engine = episode(driver, chat, effects, server=server, tools="[]")
        with pytest.raises(LookupError):
            await engine.call(add, text="1")
        async with client_of(engine) as (client, _):
            await client.chat.completions.create(model="actor", messages=ASK, tools=[ADD])
        return await engine.call(add, text="1"), effects.counts

    result, counts = serve(body)
    assert result == "error: LookupError: 1"
    assert (counts["tool_calls"], counts["tool_errors"]) == (1, 1)


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(
        ConfigError, match=r"needs the package 'uvicorn'; run `pip install 'hflow-rl\[serve\]'`"
    ):
        serve(lambda server: server.start())


EXTREMES: list[tuple[str, int, str]] = [
    ('"temperature": 1e-300', 400, "temperature is 1e-300; it must be from 0.01 to 100, or 0"),
    ('"temperature": 5e-324', 400, "temperature is"),
    ('"temperature": 1e-40', 400, "temperature is 1e-40"),
    ('"temperature": 1e300', 400, "temperature is 1e+300"),
    ('"temperature": 1e999', 400, "1e999 is larger than the largest float"),
    ('"temperature": NaN', 400, "NaN is not a JSON number"),
    ('"temperature": 1' + "0" * 400, 400, "temperature is 1000"),
    ('"temperature": 1' + "0" * 5000, 400, "a whole number of more than 4,300 digits"),
    ('"temperature": 0.01', 200, ""),
    ('"temperature": 100', 200, ""),
    ('"top_p": 5e-324', 200, ""),
    ('"top_p": 1e-30, "top_k": 7', 200, ""),
    ('"top_k": 1000000000', 200, ""),
    ('"top_k": 9223372036854775808', 400, "top_k is 9223372036854775808; it must be a whole number from 0"),
    ('"top_k": 10000000000', 400, "top_k is 10000000000; it must be from 0, which means all"),
    ('"seed": 9223372036854775807', 200, ""),
    ('"seed": 1' + "0" * 30, 400, "seed is 1000"),
    ('"max_tokens": 9223372036854775807, "temperature": 0', 200, ""),
    ('"max_tokens": 1' + "0" * 30, 400, "max_tokens is 1000"),
    ('"n": 1' + "0" * 400, 400, "is not supported; set it to 1"),
    ('"presence_penalty": 1e-300', 400, "presence_penalty=1e-300 is not supported"),
    ('"frequency_penalty": -1e300', 400, "frequency_penalty=-1e+300 is not supported"),
    ('"logit_bias": {"5": 1e300}', 400, "logit_bias="),
    ('"logit_bias": ' + '{"a":' * 300 + "1" + "}" * 300, 400, "nested more than 100 levels deep"),
    ('"logit_bias": ' + "[" * 100_000, 400, "it is nested too deeply"),
    ('"stop": "\\ud800"', 400, "half of a surrogate pair"),
    ('"\\ud800": 1', 400, "half of a surrogate pair"),
    ('"' + "x" * 100_000 + '": 1', 400, "is unknown to this endpoint"),
    ('"stop": ' + "9" * 4000, 400, "stop must be a text"),
    ("".join(f'"a{i}": null, ' for i in range(50_000)) + '"a7": null', 400, "key 'a7' is there twice"),
]


async def exchange(server: EndpointServer, *parts: bytes) -> tuple[int, Message]:
    """Send parts of a request over a connection, and return the status and the JSON of the answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.split(":")[2][:-3]))
    try:
        for part in parts:
            writer.write(part)
            await writer.drain()
        head = await reader.readuntil(b"\r\n\r\n")
        (length,) = (int(line[15:]) for line in head.split(b"\r\n") if line.startswith(b"content-length:"))
        return int(head.split()[1]), json.loads(await reader.readexactly(length))
    finally:
        writer.close()


def post(body: bytes, key: str = "x", length: int | None = None) -> bytes:
    length = len(body) if length is None else length
    lines = ["POST /v1/completions HTTP/1.1", "Host: x", f"Authorization: Bearer {key}"]
    return "\r\n".join([*lines, f"Content-Length: {length}", "", ""]).encode() + body


def completion(options: str) -> bytes:
    return b'{"model": "actor", "prompt": "1+", ' + options.encode() + b"}"


def test_no_value_of_a_request_ends_the_server(plain: TextTokenizer, driver: Heard) -> None:
    failures: list[RunError] = []
    responder = CheckpointResponder("actor", driver, plain, 5, failures.append)

    async def body(server: EndpointServer) -> None:
        async with server.admit(responder, is_open=True):
            for options, status, message in EXTREMES:
                found, answer = await exchange(server, post(completion(options)))
                assert found == status, (options[:80], answer)
                text = answer["error"]["message"] if status != 200 else ""
                assert message in text
                assert len(text) < 400
            assert (await exchange(server, post(completion('"temperature": 1'))))[0] == 200

    serve(body)
    assert failures == []


def test_a_body_that_is_too_large_is_refused(
    plain: TextTokenizer, driver: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hflow.episodes.endpoint.server.MAX_BODY_BYTES", 10_000)
    responder = CheckpointResponder("actor", driver, plain, 1000, lambda _: None)
    large = completion('"user": "' + "x" * 10_000 + '"')
    chunked = post(b"").replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
    chunks = b"1000\r\n" + b" " * 4096 + b"\r\n"

    async def body(server: EndpointServer) -> None:
        async with server.admit(responder, is_open=True):
            for parts in ([post(large)], [post(b"", length=10_001)], [chunked, *[chunks] * 3]):
                status, answer = await exchange(server, *parts)
                assert status == 413
                assert "has more than 10,000 bytes" in answer["error"]["message"]
            fitting = completion('"max_tokens": 1, "user": "' + "x" * 9_000 + '"')
            assert (await exchange(server, post(fitting)))[0] == 200

    serve(body)


HALVES = [b"POST /v1/comp", post(b"", length=5)[:-2], post(b"{", length=5)]


@pytest.mark.parametrize("half", HALVES)
def test_half_a_request_is_dropped(
    half: bytes, plain: TextTokenizer, driver: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hflow.episodes.endpoint.server.REQUEST_SECONDS", 0.05)
    responder = CheckpointResponder("actor", driver, plain, 1000, lambda _: None)

    async def body(server: EndpointServer) -> None:
        async with server.admit(responder, is_open=True):
            status, answer = await exchange(server, half)
            assert (status, answer["error"]["message"][:28]) == (408, "the request did not arrive w")
            reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.split(":")[2][:-3]))
            whole = post(completion('"max_tokens": 1'))
            for part in (whole, whole + half):  # a connection that is idle between requests stays open
                writer.write(part)
                assert await reader.readuntil(b"\r\n") == b"HTTP/1.1 200 OK\r\n"
                await reader.readuntil(b'"total_tokens"')
                await reader.readuntil(b"}}")
                await asyncio.sleep(0.1)
            assert b"408 " in await reader.read()
            writer.close()

    serve(body)


def test_a_key_is_checked_before_the_model_is_ready(plain: TextTokenizer, driver: Heard) -> None:
    responder = CheckpointResponder("actor", driver, plain, 1000, lambda _: None)
    request = completion('"max_tokens": 1')

    async def body(server: EndpointServer) -> list[int]:
        server.announce("right")
        await server.start()
        found = [(await exchange(server, post(request, key)))[0] for key in ("wrong", "right")]
        async with server.admit_key("right", responder):
            found += [(await exchange(server, post(request, key)))[0] for key in ("wrong", "right")]
        return found

    assert serve(body) == [401, 503, 401, 200]
