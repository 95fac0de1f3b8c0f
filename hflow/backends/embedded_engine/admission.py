"""Which waiting requests enter at a step. Equal prompts enter together and are computed once."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from hflow.backends.embedded_engine.request import GenerationRequest


@dataclass(frozen=True)
class PromptGroup:
    """Requests that continue the same tokens (the members of a group)."""

    ids: tuple[int, ...]
    members: tuple[GenerationRequest, ...]


def admit(waiting: deque[GenerationRequest], free_slots: int, token_budget: int) -> list[PromptGroup]:
    """Take requests from the front of `waiting`, first come first served.

    Stops at the first request that has no slot, or whose prompt would exceed the budget of
    distinct prompt tokens; the first prompt of a step enters whatever its length.
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
