"""The clients of OpenAI's Responses API and of Anthropic, and streams of all APIs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import episode_kit
import httpx
import openai
import pytest
from endpoint_kit import ADD, ASK, CALLS, client_of, find_calling_sample, play, serve
from episode_kit import Gated, Heard, check_tokens, episode, heard, new_effects, until
from openai import AsyncOpenAI

from hflow.data.text.tokenizer import TextTokenizer
from hflow.episodes.endpoint.server import EndpointServer
from hflow.launch.checkpoints.serve import CheckpointResponder
from hflow.testing import ScriptedEngine
from hflow.types import Endpoint, ToolCall, Trajectory

if TYPE_CHECKING:
    from anthropic import AsyncAnthropic  # which takes two seconds: every process of tests collects this file

plain = pytest.fixture(episode_kit.plain_tokenizer, scope="module")
chat = pytest.fixture(episode_kit.chat_tokenizer, scope="module")
shared_driver = pytest.fixture(episode_kit.heard_driver, scope="module")

RESPONSES_ADD: Any = {"type": "function", "strict": False, **ADD["function"]}
ANTHROPIC_ADD: Any = {
    "name": "add",
    "description": "Add numbers.",
    "input_schema": ADD["function"]["parameters"],
}


@pytest.fixture(scope="module")
def calling_sample(chat: TextTokenizer, shared_driver: Heard) -> int:
    return find_calling_sample(chat, shared_driver)


@pytest.fixture
def driver(shared_driver: Heard) -> Heard:
    shared_driver.heard.clear()
    return shared_driver


@asynccontextmanager
async def claude_of(endpoint: Endpoint) -> AsyncIterator[AsyncAnthropic]:
    from anthropic import AsyncAnthropic

    async with AsyncAnthropic(
        base_url=endpoint.server_url, api_key=endpoint.api_key, timeout=60, max_retries=0
    ) as client:
        yield client


async def talk_by_responses(client: AsyncOpenAI, endpoint: Endpoint) -> None:
    items: list[Any] = [{"role": "user", "content": "1+1="}]
    for _ in range(3):
        response = await client.responses.create(model="actor", instructions="ab", input=items)
        assert response.output_text is not None
        items += response.output
        items.append({"role": "user", "content": [{"type": "input_text", "text": "no"}]})


async def talk_by_messages(client: AsyncOpenAI, endpoint: Endpoint) -> None:
    messages: list[Any] = [{"role": "user", "content": "1+1="}]
    async with claude_of(endpoint) as claude:
        for _ in range(3):
            message = await claude.messages.create(
                model="actor", system="ab", messages=messages, max_tokens=12
            )
            messages.append({"role": "assistant", "content": message.content})
            messages.append({"role": "user", "content": [{"type": "text", "text": "no"}]})


async def talk_by_chat(client: AsyncOpenAI, endpoint: Endpoint) -> None:
    messages: list[Any] = [{"role": "system", "content": "ab"}, {"role": "user", "content": "1+1="}]
    for _ in range(3):
        reply = await client.chat.completions.create(model="actor", messages=messages)
        messages += [reply.choices[0].message.model_dump(), {"role": "user", "content": "no"}]


TALKS = [talk_by_chat, talk_by_responses, talk_by_messages]


def test_all_apis_make_the_same_trajectory(chat: TextTokenizer, driver: Heard) -> None:
    """It has the tokens that were drawn, none of which was encoded again."""
    found = []
    for talk in TALKS:
        driver.heard.clear()

        async def body(client: AsyncOpenAI, endpoint: Endpoint, talk: Any = talk) -> Trajectory:
            await talk(client, endpoint)
            return endpoint.trajectory

        found.append(play(body, driver, chat, sample=5))
        check_tokens(found[-1], driver.heard)
    assert found[0] == found[1] == found[2]
    assert found[0].num_turns == 3
    drawn = driver.heard[0][1].ids
    assert tuple(chat.encode(chat.decode(drawn))) != drawn, "encoding again must change something"


def test_calls_and_results_of_responses() -> None:
    async def agent(engine: ScriptedEngine) -> Trajectory:
        async with client_of(engine) as (client, endpoint):
            items: list[Any] = [{"type": "message", "role": "user", "content": "1+1"}]
            request: Any = {"model": "scripted", "tools": [RESPONSES_ADD]}
            first = await client.responses.create(**request, input=items)
            calls = [item for item in first.output if item.type == "function_call"]
            assert [(call.name, json.loads(call.arguments)) for call in calls] == [
                ("add", {"text": "1"}),
                ("add", {"text": "2"}),
            ]
            assert len(first.output) == 2
            items += [item.to_dict() for item in first.output]
            for call, result in zip(calls, "34", strict=True):
                items.append({"type": "function_call_output", "call_id": call.call_id, "output": result})
            second = await client.responses.create(**request, input=items, include=[])
            assert (second.output_text, second.status) == ("It is 7.", "completed")
            assert second.usage is not None
            assert second.usage.output_tokens == len("It is 7.") + 1
            return endpoint.trajectory

    engine = ScriptedEngine([[ToolCall("add", {"text": "1"}), ToolCall("add", {"text": "2"})], "It is 7."])
    talk = asyncio.run(agent(engine))
    assert [message["role"] for message in talk.messages] == [
        "user",
        "assistant",
        "tool",
        "tool",
        "assistant",
    ]
    ids = [message["tool_call_id"] for message in talk.messages if message["role"] == "tool"]
    assert len(set(ids)) == 2
    assert all(len(call_id) == 9 and call_id.isalnum() for call_id in ids)


def test_calls_and_results_of_anthropic() -> None:
    async def agent(engine: ScriptedEngine) -> Trajectory:
        async with engine.endpoint() as endpoint, claude_of(endpoint) as client:
            messages: list[Any] = [{"role": "user", "content": "1+1"}]
            request: Any = {"model": "scripted", "tools": [ANTHROPIC_ADD], "max_tokens": 50}
            first = await client.messages.create(**request, messages=messages)
            (call,) = first.content
            assert first.stop_reason == "tool_use"
            assert call.type == "tool_use"
            assert (call.name, call.input) == ("add", {"text": "1"})
            result = {"type": "tool_result", "tool_use_id": call.id, "content": "no", "is_error": True}
            messages += [
                {"role": "assistant", "content": first.content},
                {"role": "user", "content": [result, {"type": "text", "text": "why"}]},
            ]
            second = await client.messages.create(**request, messages=messages)
            assert second.content[0].type == "text"
            assert second.content[0].text == "Oh."
            assert (second.stop_reason, second.usage.output_tokens) == ("end_turn", len("Oh.") + 1)
            return endpoint.trajectory

    engine = ScriptedEngine([ToolCall("add", {"text": "1"}), "Oh."])
    talk = asyncio.run(agent(engine))
    assert [m["content"] for m in talk.messages[2:4]] == ["error: no", "why"]
    assert talk.num_turns == 2


REFUSED_RESPONSES: list[tuple[dict[str, Any], str]] = [
    (
        {"previous_response_id": "resp_1"},
        "previous_response_id is not supported, as responses are not stored",
    ),
    ({"store": True}, "store=true is not supported; set it to false"),
    ({"temperature": 0.2}, "temperature=0.2 differs from the generate node's"),
    ({"reasoning": {"effort": "low"}}, "reasoning={"),
    ({"text": {"format": {"type": "json_object"}}}, "text={"),
    ({"truncation": "auto"}, 'truncation="auto" is not supported'),
    ({"include": ["file_search_call.results"]}, "include="),
    ({"tool_choice": "required"}, 'tool_choice="required" is not supported'),
    ({"tools": [{"type": "web_search"}]}, "only tools of type function are supported"),
    (
        {"tools": [{**RESPONSES_ADD, "parameters": {"type": "dict"}}]},
        "the parameters of tools[0] are no JSON schema: 'dict' is not valid",
    ),
    ({"tools": [{**RESPONSES_ADD, "defer_loading": True}]}, "tools[0].defer_loading is not supported"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, 'input[0] is of type "item_reference"'),
    ({"input": [{"type": "reasoning", "id": "x", "summary": []}]}, 'input[0] is of type "reasoning"'),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0] must be text"),
    ({"input": [{"role": "user", "content": "1", "weight": 2}]}, "input[0].weight is not supported"),
    ({"input": [{"type": "function_call", "name": "x", "arguments": "{"}]}, "is text, but not JSON"),
    ({"input": []}, "input must be a list with at least one message"),
    ({"input": 3}, "input must be a text or a list of items"),
    (
        {"extra_body": {"temprature": 1}},
        "'temprature' is unknown to this endpoint; did you mean 'temperature'",
    ),
]
REFUSED_MESSAGES: list[tuple[dict[str, Any], str]] = [
    ({"extra_body": {"temperature": 0.2}}, "temperature=0.2 differs from the generate node's"),
    ({"extra_body": {"max_tokens": None}}, "max_tokens is missing; set it"),
    ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, "thinking={"),
    (
        {"tool_choice": {"type": "any"}},
        'tool_choice={"type": "any"} is not supported; set it to {"type": "auto"}',
    ),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "only tools with name and input_schema"),
    (
        {"tools": [{**ANTHROPIC_ADD, "input_schema": {"type": "dict"}}]},
        "the parameters of tools[0] are no JSON schema: 'dict' is not valid",
    ),
    ({"tools": [{**ANTHROPIC_ADD, "input_examples": [{}]}]}, "tools[0].input_examples is not supported"),
    ({"system": [{"type": "image"}]}, "system must be text"),
    ({"stop_sequences": [""]}, "stop_sequences must be a text or a list of texts"),
    ({"messages": [{"role": "system", "content": "x"}]}, "messages[0] must have role (user or assistant)"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0] is"),
    ({"messages": [*ASK, {"role": "assistant", "content": "2"}]}, "the last message is the assistant's"),
    ({"messages": []}, "messages must be a list with at least one message"),
    ({"extra_body": {"top_q": 1}}, "'top_q' is unknown to this endpoint; did you mean 'top_"),
]


def test_what_cannot_be_honoured_is_refused_in_the_form_of_the_api(
    chat: TextTokenizer, driver: Heard
) -> None:
    import anthropic

    async def ask(client: AsyncOpenAI, endpoint: Endpoint) -> None:
        for options, message in REFUSED_RESPONSES:
            with pytest.raises(openai.BadRequestError) as refusal:
                await client.responses.create(**{"model": "actor", "input": "1", **options})
            body: Any = refusal.value.body
            assert message in body["message"], (options, body)
            assert body["type"] == "invalid_request_error"
        async with claude_of(endpoint) as claude:
            for options, message in REFUSED_MESSAGES:
                request: Any = {"model": "actor", "messages": ASK, "max_tokens": 3, **options}
                with pytest.raises(anthropic.BadRequestError) as wrong:
                    await claude.messages.create(**request)
                error: Any = wrong.value.body
                assert error["type"] == "error"
                assert error["error"]["type"] == "invalid_request_error"
                assert message in error["error"]["message"], (options, error)
                assert "\n" not in error["error"]["message"]
            with pytest.raises(anthropic.NotFoundError, match="there is no model 'claude' here"):
                await claude.messages.create(model="claude", messages=ASK, max_tokens=3)
            with pytest.raises(anthropic.AuthenticationError, match="the API key is wrong or missing"):
                await claude.with_options(api_key="x").messages.create(
                    model="actor", messages=ASK, max_tokens=3
                )
        assert endpoint.trajectories == ()

    play(ask, driver, chat)


Collected = tuple[str, list[tuple[str, Any]], int]
"""The text of a stream, its calls, and the number of its parts."""


async def chat_stream(client: AsyncOpenAI, endpoint: Endpoint, tools: bool) -> Collected:
    options: Any = {"tools": [ADD]} if tools else {}
    request: Any = {"model": "actor", "messages": ASK, "stream": True, **options}
    texts, calls = [], []
    async for chunk in await client.chat.completions.create(**request):
        delta = chunk.choices[0].delta
        texts += [delta.content] if delta.content else []
        calls += [(c.function.name, json.loads(c.function.arguments)) for c in delta.tool_calls or ()]
    return "".join(texts), calls, len(texts)


async def responses_stream(client: AsyncOpenAI, endpoint: Endpoint, tools: bool) -> Collected:
    options: Any = {"tools": [RESPONSES_ADD]} if tools else {}
    num_parts, text = 0, ""
    async with client.responses.stream(model="actor", input="1+1=", **options) as stream:
        async for event in stream:
            if event.type == "response.output_text.delta":
                num_parts, text = num_parts + 1, text + event.delta
            if event.type in ("response.completed", "response.incomplete"):
                response = event.response
    assert response.output_text == text
    calls = [item for item in response.output if item.type == "function_call"]
    return text, [(call.name, json.loads(call.arguments)) for call in calls], num_parts


async def messages_stream(client: AsyncOpenAI, endpoint: Endpoint, tools: bool) -> Collected:
    options: Any = {"tools": [ANTHROPIC_ADD]} if tools else {}
    request: Any = {"model": "actor", "messages": ASK, "max_tokens": 60, **options}
    async with claude_of(endpoint) as claude, claude.messages.stream(**request) as stream:
        parts = [part async for part in stream.text_stream]
        message = await stream.get_final_message()
    text = "".join(block.text for block in message.content if block.type == "text")
    assert text == "".join(parts)
    assert message.usage.input_tokens > 0
    calls = [(block.name, block.input) for block in message.content if block.type == "tool_use"]
    return text, calls, len(parts)


STREAMS: list[Callable[..., Any]] = [chat_stream, responses_stream, messages_stream]


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("has_tools", [False, True])
def test_a_stream_says_what_the_reply_says(
    chat: TextTokenizer,
    driver: Heard,
    calling_sample: int,
    stream: Callable[..., Any],
    has_tools: bool,
) -> None:
    """With tools, the text has nothing of a call."""

    async def ask(client: AsyncOpenAI, endpoint: Endpoint) -> tuple[Collected, Trajectory]:
        return await stream(client, endpoint, has_tools), endpoint.trajectory

    (text, calls, num_parts), talk = play(ask, driver, chat, sample=calling_sample, **CALLS)
    assert calls == [(call.name, call.arguments) for call in talk.tool_calls]
    assert bool(calls) == has_tools
    assert text == (talk.completion.rpartition("[")[0] if has_tools else talk.completion)
    assert has_tools or num_parts > 3


@pytest.mark.parametrize("is_checkpoint", [False, True])
def test_tokens_are_sent_while_later_ones_are_drawn(chat: TextTokenizer, is_checkpoint: bool) -> None:
    """Also by `hflow serve`; and an interrupted engine sends no token twice."""
    engine = Gated(episode_kit.model_settings(chat.num_tokens), {"max_model_len": 1000}, None, chat.decode)

    async def ask(base_url: str, api_key: str) -> str:
        async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            engine.num_allowed = 3
            stream: Any = await client.chat.completions.create(
                model="actor", messages=ASK, stream=True, max_tokens=30
            )
            chunks = aiter(stream)
            text = ""
            while len(text) < 2:
                text += (await anext(chunks)).choices[0].delta.content
            await until(lambda: engine.num_allowed == 0)
            assert driver.heard == []
            driver.interrupt()
            driver.resume()
            engine.num_allowed = 1000
            async for chunk in chunks:
                text += chunk.choices[0].delta.content or ""
            return text

    async def body(server: EndpointServer) -> str:
        if is_checkpoint:
            responder = CheckpointResponder("actor", driver, chat, 1000, lambda _: None)
            async with server.admit(responder) as key:
                return await ask(server.url, key)
        async with episode(driver, chat, new_effects(), sample=4, server=server).endpoint() as endpoint:
            return await ask(endpoint.base_url, endpoint.api_key)

    with heard(engine) as driver:
        text = serve(body)
        (_, drawn) = driver.heard[0]
    assert text == chat.decode_answer(drawn.ids)
    assert len(drawn.ids) > 3


@pytest.mark.parametrize("ends", ["client", "episode"])
def test_a_stream_that_ends_early_is_cancelled(chat: TextTokenizer, ends: str) -> None:
    engine = Gated(episode_kit.model_settings(chat.num_tokens), {"max_model_len": 1000}, None, chat.decode)

    async def body(server: EndpointServer) -> None:
        async with AsyncOpenAI(base_url="http://x", api_key="x", max_retries=0) as client:
            async with episode(driver, chat, new_effects(), sample=4, server=server).endpoint() as endpoint:
                client = client.with_options(base_url=endpoint.base_url, api_key=endpoint.api_key)
                engine.num_allowed = 2
                stream: Any = await client.chat.completions.create(model="actor", messages=ASK, stream=True)
                chunks = aiter(stream)
                await anext(chunks)
                if ends == "client":
                    await stream.close()
                    await until(lambda: engine.num_unfinished == 0)
                    assert endpoint.trajectories == ()
            if ends == "episode":
                with pytest.raises(openai.APIError, match="its episode has ended"):
                    [chunk async for chunk in chunks]
        await until(lambda: engine.num_unfinished == 0)

    with heard(engine) as driver:
        serve(body)


def test_an_error_before_the_first_token_is_no_stream(chat: TextTokenizer, driver: Heard) -> None:
    import anthropic

    long: Any = [{"role": "user", "content": "1" * 3000}]

    async def ask(client: AsyncOpenAI, endpoint: Endpoint) -> None:
        with pytest.raises(openai.BadRequestError, match="the engine takes 1 to 999"):
            await client.chat.completions.create(model="actor", messages=long, stream=True)
        async with claude_of(endpoint) as claude:
            with pytest.raises(anthropic.BadRequestError, match="the engine takes 1 to 999"):
                await claude.messages.create(model="actor", messages=long, max_tokens=3, stream=True)

    play(ask, driver, chat)


def test_stop_sequences_are_named(chat: TextTokenizer, driver: Heard) -> None:
    async def ask(client: AsyncOpenAI, endpoint: Endpoint) -> tuple[Any, Any]:
        async with claude_of(endpoint) as claude:
            request: Any = {"model": "actor", "messages": ASK, "max_tokens": 40}
            whole = (await claude.messages.create(**request)).content[0].text
        return whole, None

    whole, _ = play(ask, driver, chat, sample=5, max_tokens=40)
    stop = whole[3:5]

    async def ask_with_stop(client: AsyncOpenAI, endpoint: Endpoint) -> Any:
        async with claude_of(endpoint) as claude:
            request: Any = {"model": "actor", "messages": ASK, "max_tokens": 40, "stop_sequences": [stop]}
            async with claude.messages.stream(**request) as stream:
                return await stream.get_final_message()

    message = play(ask_with_stop, driver, chat, sample=5, max_tokens=40)
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)
    assert message.content[0].text == whole[: whole.index(stop)]


async def by_tokens(endpoint: Endpoint, ids: Any, session: str | None = None, **options: Any) -> Any:
    """Call an endpoint by tokens, and return status and JSON."""
    body = {"model": "actor", "token_ids": list(ids), **options}
    headers = {"Authorization": f"Bearer {endpoint.api_key}"}
    headers |= {} if session is None else {"X-Session-ID": session}
    async with httpx.AsyncClient(timeout=60) as client:
        reply = await client.post(f"{endpoint.server_url}/inference/v1/generate", json=body, headers=headers)
        return reply.status_code, reply.json()


def test_a_client_by_tokens_makes_exact_trajectories(chat: TextTokenizer, driver: Heard) -> None:
    """Each session is a conversation. Tokens that are not those of its turns begin another one."""
    start = tuple(chat.template().prompt(ASK))
    more = tuple(chat.encode("[user]no\n[ai]"))
    sampling = {
        "logprobs": 1,
        "stop_token_ids": list(chat.stop_ids),
        "skip_special_tokens": False,
        "top_k": -1,
    }

    async def ask(client: AsyncOpenAI, endpoint: Endpoint) -> tuple[Trajectory, ...]:
        ends = {}
        for session in ("a", "b"):
            status, reply = await by_tokens(
                endpoint, start, session, sampling_params=sampling, request_id=session, cache_salt="0"
            )
            (choice,) = reply["choices"]
            assert (status, reply["request_id"]) == (200, session)
            drawn = driver.heard[-1][1]
            assert tuple(choice["token_ids"]) == drawn.ids
            assert tuple(entry["token_id"] for entry in choice["logprobs"]["content"]) == drawn.ids
            assert tuple(entry["logprob"] for entry in choice["logprobs"]["content"]) == drawn.logprobs
            assert choice["finish_reason"] == drawn.stop_reason
            assert reply["usage"]["prompt_tokens"] == len(start)
            ends[session] = (*start, *drawn.ids)
        await by_tokens(endpoint, ends["a"] + more, "a")
        await by_tokens(endpoint, ends["b"] + more, "b")
        await by_tokens(endpoint, ends["b"] + more, "a")
        return endpoint.trajectories

    first, second, third = play(ask, driver, chat)
    check_tokens(first, [driver.heard[0], driver.heard[2]])
    check_tokens(second, [driver.heard[1], driver.heard[3]])
    check_tokens(third, [driver.heard[4]])
    assert first.num_turns == second.num_turns == 2
    assert first.input_ids[: len(start)] == start


def test_a_chat_continues_conversations_of_its_session_only(chat: TextTokenizer, driver: Heard) -> None:
    async def ask(client: AsyncOpenAI, endpoint: Endpoint) -> tuple[Any, Any]:
        async def say(session: str, messages: Any) -> Any:
            headers = {"X-Session-ID": session}
            reply = await client.chat.completions.create(
                model="actor", messages=messages, extra_headers=headers
            )
            return reply.choices[0].message

        longer = [*ASK, await say("a", ASK), *ASK]
        await say("b", longer)
        await say("a", longer)
        return endpoint.sessions, endpoint.trajectories

    sessions, (first, second) = play(ask, driver, chat)
    assert sessions == ("a", "b")
    assert (first.num_turns, second.num_turns) == (2, 1)


def test_calls_by_tokens_are_refused_in_one_line(chat: TextTokenizer, driver: Heard) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"token_ids": []}, "token_ids must be a list of token ids"),
        ({"token_ids": ["a"]}, "token_ids must be a list of token ids"),
        ({"token_ids": [10_000]}, "the model's vocabulary has"),
        ({"features": {}}, "features={} is not supported"),
        ({"output_mode": "text"}, 'output_mode="text" is not supported'),
        ({"sampling_params": {"logprobs": 5}}, "logprobs=5 asks for alternatives"),
        (
            {"sampling_params": {"stop_token_ids": [9]}},
            "stop_token_ids has 9, but the model's turns end at [2]",
        ),
        ({"sampling_params": {"temperature": 0.2}}, "temperature=0.2 differs"),
        ({"sampling_params": {"min_p": 0.2}}, "min_p=0.2 differs from the generate node's min_p=0"),
        ({"sampling_params": {"temprature": 1}}, "did you mean 'temperature'"),
    ]

    async def ask(client: AsyncOpenAI, endpoint: Endpoint) -> None:
        for options, message in cases:
            status, reply = await by_tokens(endpoint, options.pop("token_ids", [5]), **options)
            assert status == 400
            assert message in reply["error"]["message"], options
        assert endpoint.trajectories == ()

    play(ask, driver, chat)


def test_tokens_are_streamed_and_served(chat: TextTokenizer, driver: Heard) -> None:
    async def body(server: EndpointServer) -> list[Any]:
        responder = CheckpointResponder("actor", driver, chat, 1000, lambda _: None)
        async with server.admit(responder) as key, httpx.AsyncClient() as client:
            request = {
                "model": "actor",
                "token_ids": [5, 6],
                "sampling_params": {"max_tokens": 9},
                "stream": True,
            }
            url = f"{server.url.removesuffix('/v1')}/inference/v1/generate"
            reply = await client.post(url, json=request, headers={"x-api-key": key})
            return reply.text.strip().split("\n\n")

    *events, done = serve(body)
    assert done == "data: [DONE]"
    choices = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events]
    (prompt, drawn) = driver.heard[0]
    assert prompt == (5, 6)
    assert tuple(token for choice in choices for token in choice["token_ids"]) == drawn.ids
    assert choices[-1]["finish_reason"] == drawn.stop_reason
