"""Requests of the embedded engine: admission of waiting ones, and when a running one ends."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hflow.backends.interface import GenerationResult, SamplingParams

Decode = Callable[[Sequence[int]], str]

_TOKENS_PER_CHARACTER = 4
"""Maximum tokens of one character: the bytes of its UTF-8 code."""


@dataclass(eq=False)
class GenerationRequest:
    """A prompt and the tokens drawn after it so far.

    `ids` is the prompt followed by the drawn tokens. `logprobs` and `versions` have entries for drawn tokens
    only.
    """

    request_id: int
    params: SamplingParams
    ids: list[int]
    num_prompt: int
    max_length: int
    """Number of tokens, prompt included, at which the request ends with `length`."""
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    stop_ids: frozenset[int] = frozenset()

    def result(self, stop_reason: str) -> GenerationResult:
        """Return what the request has drawn."""
        return GenerationResult(
            ids=tuple(self.ids[self.num_prompt :]),
            logprobs=tuple(self.logprobs),
            versions=tuple(self.versions),
            stop_reason=stop_reason,
        )


@dataclass(frozen=True)
class PromptGroup:
    """Requests that continue the same tokens, whose prompt is computed once."""

    ids: tuple[int, ...]
    members: tuple[GenerationRequest, ...]


def admit(waiting: deque[GenerationRequest], free_slots: int, token_budget: int) -> list[PromptGroup]:
    """Take requests from the front of `waiting`, in order, and group those with equal prompts.

    Stops at the first request without a free slot, or whose prompt would exceed the budget of distinct prompt
    tokens. The first prompt of a step is admitted regardless of its length.
    """
    groups: dict[tuple[int, ...], list[GenerationRequest]] = {}
    num_tokens = 0
    while waiting and free_slots:
        ids = tuple(waiting[0].ids)
        if ids not in groups:
            if groups and num_tokens + len(ids) > token_budget:
                break
            num_tokens += len(ids)
            groups[ids] = []
        groups[ids].append(waiting.popleft())
        free_slots -= 1
    return [PromptGroup(ids, tuple(members)) for ids, members in groups.items()]


def stop_reason(request: GenerationRequest, decode: Decode | None) -> str | None:
    """Return `stop` or `length` if the token just drawn ends the request, else None."""
    if request.ids[-1] in request.stop_ids:
        return "stop"
    if request.params.stop and decode is not None and _ends_with_stop(request, decode):
        return "stop"
    return "length" if len(request.ids) >= request.max_length else None


def _ends_with_stop(request: GenerationRequest, decode: Decode) -> bool:
    """Return whether a stop string is in the last drawn characters.

    Only as many tokens as the longest stop string can span are decoded. An earlier occurrence would have
    ended the request earlier.
    """
    stops = request.params.stop
    window = _TOKENS_PER_CHARACTER * max(map(len, stops)) + 1
    first_drawn = request.num_prompt - request.params.num_resumed
    text = decode(request.ids[max(first_drawn, len(request.ids) - window) :])
    return any(stop in text for stop in stops)
