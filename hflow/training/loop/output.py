"""The `Output` that a body reads: fields are computed when they are first used.

Axes: S sequences, T packed tokens, N learned tokens, K tokens per position.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from typing_extensions import override

from hflow.training.loop.inputs import PackedBatch, scored_tokens
from hflow.types import Output

TOKEN_FIELDS = ("entropy", "logprobs")
"""Fields of a language model's output with one number per token."""


class Logits(Protocol):
    """The distributions that predict the N learned tokens, under the generation temperature."""

    def measure(self, names: Sequence[str], ids: Tensor) -> Sequence[Tensor]:
        """Compute some of `TOKEN_FIELDS`, `[N]` each, in one pass; `ids` are the N learned tokens."""

    def topk(self, k: int) -> tuple[Tensor, Tensor]:
        """Return the `k` likeliest tokens and their log-probs, `[N, K]` both."""

    def logprobs_of(self, ids: Tensor) -> Tensor:
        """Return the log-probs `[N, K]` of tokens `[N, K]`."""


class LmOutput(Output):
    """Output of a language model, with entries at learned tokens and 0 elsewhere.

    Logits are computed only for the positions that predict learned tokens. The micro-batches of a node share
    `requested`: fields that the body used in one micro-batch are computed together, in one pass over the
    logits, in later ones.
    """

    def __init__(self, logits: Logits, packed: PackedBatch, requested: set[str]) -> None:
        super().__init__()
        self._logits = logits
        self._packed = packed
        self._requested = requested

    @override
    def _get(self, name: str) -> Any:
        if name not in TOKEN_FIELDS:
            raise AttributeError(
                f"this output has no {name!r}; a language model has entropy, logprobs, logprobs_of, topk"
            )
        if name not in self._fields:
            self._requested.add(name)
            names = sorted(self._requested - self._fields.keys())
            values = self._logits.measure(names, self._packed.input_ids[self._packed.targets])
            self._fields.update(zip(names, map(self._scatter, values), strict=True))
        return self._fields[name]

    @override
    def topk(self, k: int) -> tuple[Tensor, Tensor]:
        ids, logprobs = self._logits.topk(k)
        return self._scatter(ids), self._scatter(logprobs)

    @override
    def logprobs_of(self, ids: Tensor) -> Tensor:
        return self._scatter(self._logits.logprobs_of(ids[self._packed.targets]))

    def _scatter(self, values: Tensor) -> Tensor:
        """Put entries of the learned tokens at their positions: `[N, ...]` -> `[T, ...]`, 0 elsewhere."""
        size = len(self._packed.input_ids)
        return values.new_zeros(size, *values.shape[1:]).index_copy(0, self._packed.targets, values)


class ScalarOutput(Output):
    """Output of a critic (`values`, `bootstrap`) or a reward model (`scores`)."""

    def __init__(self, scalars: Tensor, packed: PackedBatch, head: str, padding_id: int | None) -> None:
        """Take one number for each of the T tokens.

        Args:
            scalars: `[T]`.
            packed: the micro-batch.
            head: `value` or `score`.
            padding_id: `pad_token_id` of the model's config.
        """
        super().__init__()
        self._scalars = scalars
        self._packed = packed
        self._padding_id = padding_id
        self._makers: dict[str, Callable[[], Tensor]] = {
            "value": {"values": self._values, "bootstrap": self._at_last_tokens},
            "score": {"scores": self._scores},
        }[head]
        self._head = head

    @override
    def _get(self, name: str) -> Any:
        if name not in self._makers:
            known = ", ".join(sorted(self._makers))
            raise AttributeError(f"this output has no {name!r}; a {self._head} model has {known}")
        return self._makers[name]()

    def _values(self) -> Tensor:
        """Return V before each token, which is computed from the hidden state of the previous token."""
        return torch.roll(self._scalars, 1).masked_fill(~self._packed.seqs.loss_mask, 0)

    def _at_last_tokens(self) -> Tensor:
        return self._scalars[self._packed.last_tokens]

    def _scores(self) -> Tensor:
        return self._scalars[scored_tokens(self._packed, self._padding_id)]
