"""vLLM's call by tokens: ids in, ids and log-probs out. The client encodes its conversation itself."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from hflow.episodes.endpoint.dialects.interface import event
from hflow.episodes.endpoint.dialects.openai import openai_error
from hflow.episodes.endpoint.replies import Reply, ReplyPart
from hflow.episodes.endpoint.requests import (
    CompletionRequest,
    RequestRefused,
    TokenPrompt,
    read_number,
    read_options,
    read_sampling,
    read_stops,
    read_value,
    shown,
)

_OPTIONS = ("model", "request_id", "sampling_params", "stream", "token_ids")
_LABELS = ("cache_salt", "priority")
"""The order of requests is the engine's."""
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "content_parts": ([],),
    "ec_transfer_params": (),
    "features": (),
    "kv_transfer_params": (),
    "output_mode": ("tokens",),
    "reasoning_ended": (),
    "reasoning_parser_kwargs": (),
    "return_token_ids": (False,),
    "stream_options": ({},),
    "token_offsets": (),
}
_SAMPLING = (
    "logprobs",
    "max_tokens",
    "min_p",
    "seed",
    "stop",
    "stop_token_ids",
    "temperature",
    "top_k",
    "top_p",
)
_SAMPLING_LABELS = (
    "detokenize",
    "flat_logprobs",
    "include_stop_str_in_output",
    "output_kind",
    "routed_experts_prompt_start",
    "skip_special_tokens",
    "spaces_between_special_tokens",
)
"""Options of the text and of routed experts, which the reply does not have, and of its form in the engine."""
_SAMPLING_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "allowed_token_ids": (),
    "bad_words": ([],),
    "extra_args": ({},),
    "frequency_penalty": (0,),
    "ignore_eos": (False,),
    "logit_bias": ({},),
    "min_tokens": (0,),
    "n": (1,),
    "presence_penalty": (0,),
    "prompt_logprobs": (),
    "repetition_penalty": (1,),
    "structured_outputs": (),
}


class TokensDialect:
    """`/inference/v1/generate`."""

    path = "/inference/v1/generate"

    def parse(self, body: Any, headers: Mapping[str, str]) -> CompletionRequest:
        """Read a request."""
        options = read_options(body, _OPTIONS, _LABELS, _NEUTRAL)
        sampling = read_options(
            read_value(options, "sampling_params", dict, {}), _SAMPLING, _SAMPLING_LABELS, _SAMPLING_NEUTRAL
        )
        if sampling.get("top_k") == -1:
            del sampling["top_k"]  # all tokens
        num_logprobs = read_value(sampling, "logprobs", int, None)
        if num_logprobs not in (None, 0, 1):
            raise RequestRefused(
                f"logprobs={num_logprobs} asks for alternatives to the sampled tokens, which are not "
                "recorded; set logprobs=1 for the sampled tokens only",
                param="logprobs",
            )
        return CompletionRequest(
            model=read_value(options, "model", str, ""),
            prompt=TokenPrompt(_ids(options, "token_ids", 1)),
            max_tokens=read_number(sampling, "max_tokens", int, 1),
            stop=read_stops(sampling, "stop"),
            stop_ids=_ids(sampling, "stop_token_ids", 0),
            **read_sampling(sampling),
            seed=read_number(sampling, "seed", int, 0),
            with_logprobs=num_logprobs is not None,
            is_streamed=read_value(options, "stream", bool, False),
            options=options,
        )

    def reply_json(self, reply: Reply, request: CompletionRequest) -> dict[str, Any]:
        """Return the tokens of a reply."""
        choice = {**_choice(reply, request), "finish_reason": reply.finish_reason, "stop_reason": reply.stop}
        header = {**_header(reply.reply_id, request), "model": request.model, "created": int(time.time())}
        return {**header, "choices": [choice], "usage": reply.usage}

    def writer(self, request: CompletionRequest) -> TokenWriter:
        """Return the writer of streamed tokens."""
        return TokenWriter(request)

    def error_json(self, refusal: RequestRefused) -> dict[str, Any]:
        """Return an error, as OpenAI's APIs write it."""
        return openai_error(refusal)


class TokenWriter:
    """Writes the tokens of each part."""

    def __init__(self, request: CompletionRequest) -> None:
        self._request = request
        self._header: dict[str, Any] = {}

    def begin(self, reply_id: str, num_prompt_tokens: int) -> str:
        """Return nothing: the first part begins the stream."""
        self._header = _header(reply_id, self._request)
        return ""

    def add(self, part: ReplyPart) -> str:
        """Return the tokens of a part."""
        choice = {**_choice(part, self._request), "finish_reason": None}
        return event({**self._header, "choices": [choice]}) if part.ids else ""

    def end(self, reply: Reply) -> str:
        """Return the reason why the reply ended."""
        choice = {
            "index": 0,
            "token_ids": [],
            "finish_reason": reply.finish_reason,
            "stop_reason": reply.stop,
        }
        return event({**self._header, "choices": [choice], "usage": reply.usage}) + "data: [DONE]\n\n"

    def fail(self, refusal: RequestRefused) -> str:
        """Return the error."""
        return event(openai_error(refusal))


def _ids(options: Mapping[str, Any], name: str, least: int) -> tuple[int, ...]:
    found = options.get(name, [])
    if not isinstance(found, list) or len(found) < least or not all(type(i) is int and i >= 0 for i in found):
        wanted = "token ids" if least else "token ids, or empty"
        raise RequestRefused(f"{name} must be a list of {wanted}, but it is {shown(found)}", param=name)
    return tuple(found)


def _header(reply_id: str, request: CompletionRequest) -> dict[str, Any]:
    return {"request_id": request.options.get("request_id", reply_id), "output_mode": "tokens"}


def _choice(part: Reply | ReplyPart, request: CompletionRequest) -> dict[str, Any]:
    tokens = [
        {"token": f"token_id:{token}", "token_id": token, "logprob": logprob, "rank": None}
        for token, logprob in zip(part.ids, part.logprobs, strict=True)
    ]
    content = [{**token, "top_logprobs": [token]} for token in tokens]
    logprobs = {"content": content} if request.with_logprobs else None
    return {"index": 0, "token_ids": list(part.ids), "logprobs": logprobs}
