"""Engines that note what they draw, and engines that draw what was noted.

Two runs that agree to rounding may still draw another token now and then, after which nothing can be
compared. An engine that replays computes everything itself, log-probs included, and takes only the choice of
the token from the record.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hflow.backends.embedded_engine.engine import EmbeddedEngine
from hflow.backends.embedded_engine.request import GenerationRequest
from hflow.backends.interface import GenerationResult, SamplingParams
from hflow.errors import RunError

Draws = dict[tuple[int, tuple[int, ...]], list[int]]
"""(seed, prompt) -> the tokens drawn behind it, across interruptions."""


def _key(params: SamplingParams, ids: Sequence[int]) -> tuple[int, tuple[int, ...]]:
    """What a request is known by: ids that were drawn before an interruption are no part of its prompt."""
    return params.seed, tuple(ids[: len(ids) - params.num_resumed])


class RecordingEngine(EmbeddedEngine):
    """Notes every token that it draws."""

    def __init__(self, draws: Draws, *built_from: Any) -> None:
        """Build the engine.

        Args:
            draws: the record, added to.
            *built_from: as `EmbeddedEngine`.
        """
        super().__init__(*built_from)
        self._draws = draws
        self._keys: dict[int, tuple[int, tuple[int, ...]]] = {}

    def add(self, request_id: int, prompt_ids: Sequence[int], params: SamplingParams) -> None:
        """Queue a request."""
        super().add(request_id, prompt_ids, params)
        self._keys[request_id] = _key(params, prompt_ids)

    def step(self) -> list[tuple[int, GenerationResult]]:
        """Draw; return the finished."""
        return self._noted(super().step())

    def interrupt(self) -> list[tuple[int, GenerationResult]]:
        """Abort everything; return what there is."""
        return self._noted(super().interrupt())

    def _noted(self, ended: list[tuple[int, GenerationResult]]) -> list[tuple[int, GenerationResult]]:
        for request_id, generated in ended:
            self._draws.setdefault(self._keys.pop(request_id), []).extend(generated.ids)
        return ended


class ReplayingEngine(EmbeddedEngine):
    """Draws what a record says."""

    def __init__(self, draws: Draws, *built_from: Any) -> None:
        """Build the engine.

        Args:
            draws: what was drawn elsewhere.
            *built_from: as `EmbeddedEngine`.
        """
        super().__init__(*built_from)
        self._draws = draws

    def _forced(self) -> Tensor:
        return torch.tensor([self._next(request) for request in self._running], device=self._device)

    def _next(self, request: GenerationRequest) -> int:
        """The token that comes next in a request.

        Raises:
            RunError: when the record has none: the two runs have come apart before.
        """
        drawn = self._draws.get(_key(request.params, request.ids[: request.num_prompt]), ())
        at = len(request.ids) - request.num_prompt + request.params.num_resumed
        if at >= len(drawn):
            raise RunError(
                f"the record has no token {at} behind the prompt {request.ids[: request.num_prompt]}: the "
                "run that it replays had other prompts or other texts"
            )
        return drawn[at]
