"""Engines that record what they draw, and engines that replay such a record.

Two runs that agree up to rounding may still draw a different token now and then, after which they cannot be
compared. A replaying engine computes everything, log-probs included, but takes each token from the record.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from hflow.base.errors import RunError
from hflow.data.batches.device_copy import to_device
from hflow.engines.embedded.engine import EmbeddedEngine
from hflow.engines.interface import GenerationResult, SamplingParams
from hflow.engines.request import GenerationRequest
from hflow.types.image import PlacedImage

Draws = dict[tuple[int, tuple[int, ...]], list[int]]
"""(seed, prompt) -> the tokens drawn after it, across interruptions."""


def _key(params: SamplingParams, ids: Sequence[int]) -> tuple[int, tuple[int, ...]]:
    """Return a request's key in the record, without the tokens drawn before an interruption."""
    return params.seed, tuple(ids[: len(ids) - params.num_resumed])


class RecordingEngine(EmbeddedEngine):
    """Records every token that it draws."""

    def __init__(self, draws: Draws, *engine_args: Any) -> None:
        """Build an `EmbeddedEngine` with these arguments; it extends the record `draws` in place."""
        super().__init__(*engine_args)
        self._draws = draws
        self._keys: dict[int, tuple[int, tuple[int, ...]]] = {}

    @override
    def add(
        self,
        request_id: int,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        images: Sequence[PlacedImage] = (),
    ) -> None:
        super().add(request_id, prompt_ids, params, images)
        self._keys[request_id] = _key(params, prompt_ids)

    @override
    def step(self) -> list[tuple[int, GenerationResult]]:
        return self._record(super().step())

    @override
    def interrupt(self) -> list[tuple[int, GenerationResult]]:
        return self._record(super().interrupt())

    def _record(self, ended: list[tuple[int, GenerationResult]]) -> list[tuple[int, GenerationResult]]:
        for request_id, generated in ended:
            self._draws.setdefault(self._keys.pop(request_id), []).extend(generated.ids)
        return ended


class ReplayingEngine(EmbeddedEngine):
    """Draws the tokens of a record."""

    def __init__(self, draws: Draws, *engine_args: Any) -> None:
        """Build an `EmbeddedEngine` with these arguments; `draws` is the record of another run."""
        super().__init__(*engine_args)
        self._draws = draws

    @override
    def _forced_tokens(self) -> Tensor:
        tokens = [self._next_token(request) for request in self._running]
        return to_device(torch.tensor(tokens), self._device)

    def _next_token(self, request: GenerationRequest) -> int:
        """Return the recorded next token of a request.

        Raises:
            RunError: if the record has none, because the runs have already diverged.
        """
        recorded = self._draws.get(_key(request.params, request.ids[: request.num_prompt]), ())
        index = len(request.ids) - request.num_prompt + request.params.num_resumed
        if index >= len(recorded):
            raise RunError(
                f"the record has no token {index} after the prompt {request.ids[: request.num_prompt]}; the "
                "recorded run had other prompts or texts"
            )
        return recorded[index]
