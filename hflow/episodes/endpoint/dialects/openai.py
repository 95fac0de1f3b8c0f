"""OpenAI's chat completions, and completions of texts."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from hflow.base.errors import shorten
from hflow.episodes.endpoint.dialects.interface import event
from hflow.episodes.endpoint.replies import Reply, ReplyPart
from hflow.episodes.endpoint.requests import (
    MAX_SHOWN,
    CompletionRequest,
    RequestRefused,
    read_messages,
    read_number,
    read_options,
    read_sampling,
    read_stops,
    read_tools,
    read_value,
)

_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": (),
    "functions": (),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "moderation": (),
    "n": (1,),
    "parallel_tool_calls": (True,),
    "prediction": (),
    "presence_penalty": (0,),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
    "top_logprobs": (0,),
    "verbosity": (),
    "web_search_options": (),
}
LABELS = ("metadata", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "user")
"""Options of OpenAI's APIs that change no result."""
_COMMON = (
    "model",
    "max_tokens",
    "min_p",
    "seed",
    "stop",
    "stream",
    "stream_options",
    "temperature",
    "top_k",
    "top_p",
)
_CHAT = (*_COMMON, "logprobs", "max_completion_tokens", "messages", "tool_choice", "tools")
_TEXT = (*_COMMON, "logprobs", "prompt")


class ChatDialect:
    """`/v1/chat/completions`."""

    path = "/v1/chat/completions"

    def parse(self, body: Any, headers: Mapping[str, str]) -> CompletionRequest:
        """Read a request."""
        options = read_options(body, _CHAT, LABELS, _NEUTRAL)
        prompt = read_messages(options.get("messages", []), "messages")
        if None not in (options.get("max_tokens"), options.get("max_completion_tokens")):
            raise RequestRefused(
                "max_tokens and max_completion_tokens exclude each other", param="max_tokens"
            )
        return CompletionRequest(
            prompt=prompt,
            tools=read_tools(options.get("tools", []), options.get("tool_choice", "auto")),
            with_logprobs=read_value(options, "logprobs", bool, False),
            **_common(options, "max_completion_tokens" if "max_tokens" not in options else "max_tokens"),
        )

    def reply_json(self, reply: Reply, request: CompletionRequest) -> dict[str, Any]:
        """Return a chat completion."""
        message = {**reply.message, "content": reply.text if reply.text or not reply.tool_calls else None}
        choice = {
            "index": 0,
            "message": message,
            "logprobs": _chat_logprobs(reply) if request.with_logprobs else None,
            "finish_reason": reply.finish_reason,
        }
        header = _header("chat.completion", "chatcmpl", reply.reply_id, request)
        return {**header, "choices": [choice], "usage": reply.usage}

    def writer(self, request: CompletionRequest) -> ChunkWriter:
        """Return the writer of a streamed chat completion."""
        return _ChatWriter(request)

    def error_json(self, refusal: RequestRefused) -> dict[str, Any]:
        """Return an error of OpenAI's APIs."""
        return openai_error(refusal)


class TextDialect:
    """`/v1/completions`."""

    path = "/v1/completions"

    def parse(self, body: Any, headers: Mapping[str, str]) -> CompletionRequest:
        """Read a request."""
        options = read_options(body, _TEXT, LABELS, _NEUTRAL)
        prompt = options.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1:
            (prompt,) = prompt
        if not isinstance(prompt, str):
            raise RequestRefused("prompt must be one text; send one request per prompt", param="prompt")
        num_logprobs = read_value(options, "logprobs", int, None)
        if num_logprobs:
            raise RequestRefused(
                f"logprobs={num_logprobs} asks for alternatives to the sampled tokens, which are not "
                "recorded; set logprobs=0 for the sampled tokens only",
                param="logprobs",
            )
        return CompletionRequest(
            prompt=prompt, with_logprobs=num_logprobs is not None, **_common(options, "max_tokens")
        )

    def reply_json(self, reply: Reply, request: CompletionRequest) -> dict[str, Any]:
        """Return the completion of a text."""
        choice = {
            "index": 0,
            "text": reply.text,
            "logprobs": _text_logprobs(reply, 0) if request.with_logprobs else None,
            "finish_reason": reply.finish_reason,
        }
        header = _header("text_completion", "cmpl", reply.reply_id, request)
        return {**header, "choices": [choice], "usage": reply.usage}

    def writer(self, request: CompletionRequest) -> ChunkWriter:
        """Return the writer of a streamed completion of a text."""
        return _TextWriter(request)

    def error_json(self, refusal: RequestRefused) -> dict[str, Any]:
        """Return an error of OpenAI's APIs."""
        return openai_error(refusal)


class ChunkWriter:
    """Writes chunks, each of which is a completion with a part of the text."""

    _kind = ""
    _prefix = ""

    def __init__(self, request: CompletionRequest) -> None:
        self._request = request
        self._header: dict[str, Any] = {}

    def begin(self, reply_id: str, num_prompt_tokens: int) -> str:
        """Return nothing: the first part begins the stream."""
        self._header = _header(self._kind, self._prefix, reply_id, self._request)
        return ""

    def add(self, part: ReplyPart) -> str:
        """Return the chunk of a part."""
        is_shown = part.text or (self._request.with_logprobs and part.tokens)
        return self._chunk(self._part_choice(part), None) if is_shown else ""

    def end(self, reply: Reply) -> str:
        """Return the chunks after the last part, such as tool calls."""
        chunks = "".join(self._chunk(choice, reply.finish_reason) for choice in self._last_choices(reply))
        if self._request.with_usage:
            chunks += event({**self._header, "choices": [], "usage": reply.usage})
        return chunks + "data: [DONE]\n\n"

    def fail(self, refusal: RequestRefused) -> str:
        """Return the error."""
        return event(openai_error(refusal))

    def _chunk(self, choice: Mapping[str, Any], finish_reason: str | None) -> str:
        whole = {"index": 0, "logprobs": None, "finish_reason": finish_reason, **choice}
        usage = {"usage": None} if self._request.with_usage else {}
        return event({**self._header, "choices": [whole], **usage})

    def _part_choice(self, part: ReplyPart) -> dict[str, Any]:
        raise NotImplementedError

    def _last_choices(self, reply: Reply) -> list[dict[str, Any]]:
        raise NotImplementedError


class _ChatWriter(ChunkWriter):
    _kind, _prefix = "chat.completion.chunk", "chatcmpl"

    def begin(self, reply_id: str, num_prompt_tokens: int) -> str:
        super().begin(reply_id, num_prompt_tokens)
        return self._chunk({"delta": {"role": "assistant", "content": ""}}, None)

    def _part_choice(self, part: ReplyPart) -> dict[str, Any]:
        logprobs = _chat_logprobs(part) if self._request.with_logprobs else None
        return {"delta": {"content": part.text}, "logprobs": logprobs}

    def _last_choices(self, reply: Reply) -> list[dict[str, Any]]:
        calls = [{"index": i, **call} for i, call in enumerate(reply.tool_calls)]
        with_calls = [{"delta": {"tool_calls": calls}, "finish_reason": None}] if calls else []
        return [*with_calls, {"delta": {}}]


class _TextWriter(ChunkWriter):
    _kind, _prefix = "text_completion", "cmpl"

    def __init__(self, request: CompletionRequest) -> None:
        super().__init__(request)
        self._offset = 0

    def _part_choice(self, part: ReplyPart) -> dict[str, Any]:
        logprobs = _text_logprobs(part, self._offset) if self._request.with_logprobs else None
        self._offset += sum(map(len, part.tokens))
        return {"text": part.text, "logprobs": logprobs}

    def _last_choices(self, reply: Reply) -> list[dict[str, Any]]:
        return [{"text": ""}]


def openai_error(refusal: RequestRefused) -> dict[str, Any]:
    """Return an error of OpenAI's APIs."""
    kinds = {401: "authentication_error", 404: "not_found_error"}
    kind = kinds.get(refusal.status, "invalid_request_error" if refusal.status < 500 else "server_error")
    return {"error": {"message": refusal.message, "type": kind, "param": refusal.param, "code": refusal.code}}


def token_logprobs(part: Reply | ReplyPart) -> list[dict[str, Any]]:
    """Return tokens with their log-probs, as OpenAI's APIs write them."""
    return [
        {"token": token, "logprob": logprob, "bytes": list(token.encode()), "top_logprobs": []}
        for token, logprob in zip(part.tokens, part.logprobs, strict=True)
    ]


def _common(options: Mapping[str, Any], max_tokens: str) -> dict[str, Any]:
    """Return the fields of a request that chats and texts have in common."""
    stream_options = read_value(options, "stream_options", dict, {})
    if unknown := sorted(stream_options.keys() - {"include_usage", "include_obfuscation"}):
        option = shorten(unknown[0], MAX_SHOWN)
        raise RequestRefused(f"stream_options.{option} is not supported", param="stream_options")
    return {
        "model": read_value(options, "model", str, ""),
        "max_tokens": read_number(options, max_tokens, int, 1),
        "stop": read_stops(options, "stop"),
        **read_sampling(options),
        "seed": read_number(options, "seed", int, 0),
        "is_streamed": read_value(options, "stream", bool, False),
        "with_usage": bool(stream_options.get("include_usage")),
    }


def _header(kind: str, prefix: str, reply_id: str, request: CompletionRequest) -> dict[str, Any]:
    return {
        "id": f"{prefix}-{reply_id}",
        "object": kind,
        "created": int(time.time()),
        "model": request.model,
    }


def _chat_logprobs(part: Reply | ReplyPart) -> dict[str, Any]:
    return {"content": token_logprobs(part), "refusal": None}


def _text_logprobs(part: Reply | ReplyPart, offset: int) -> dict[str, Any]:
    offsets = []
    for token in part.tokens:
        offsets.append(offset)
        offset += len(token)
    return {
        "tokens": list(part.tokens),
        "token_logprobs": list(part.logprobs),
        "top_logprobs": None,
        "text_offset": offsets,
    }
