"""Admission of waiting requests to the embedded engine."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from hflow.backends.generation_request import GenerationRequest


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
