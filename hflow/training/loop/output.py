"""The `Output` that a body reads: fields are computed when they are first used.

Axes: S sequences, T packed tokens, N learned and observed tokens, K tokens per position.
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
OBSERVED_LOGPROBS = "observed_logprobs"
"""The field with the log-probs of observed tokens."""


class Logits(Protocol):
    """The distributions that predict the N tokens, under the generation temperature."""

    def measure(self, names: Sequence[str], ids: Tensor) -> Sequence[Tensor]:
        """Compute some of `TOKEN_FIELDS`, `[N]` each, in one pass; `ids` are the N tokens."""

    def topk(self, k: int) -> tuple[Tensor, Tensor]:
        """Return the `k` likeliest tokens and their log-probs, `[N, K]` both."""

    def logprobs_of(self, ids: Tensor) -> Tensor:
        """Return the log-probs `[N, K]` of tokens `[N, K]`."""


class LmOutput(Output):
    """Output of a language model, with entries at learned tokens and 0 elsewhere.

    `observed_logprobs` has them at observed tokens. Logits are computed only for the positions that predict
    one of both. The micro-batches of a node share
    `requested`: fields that the body used in one micro-batch are computed together, in one pass over the
    logits, in later ones.
    """

    def __init__(self, logits: Logits, packed: PackedBatch, requested: set[str]) -> None:
        super().__init__()
        self._logits = logits
        self._packed = packed
        self._requested = requested
        self._values: dict[str, Tensor] = {}

    @property
    def reads_observed(self) -> bool:
        """Whether the body has read `observed_logprobs`."""
        return OBSERVED_LOGPROBS in self._fields

    @override
    def _get(self, name: str) -> Any:
        if name == OBSERVED_LOGPROBS:
            return self._observed_logprobs()
        if name not in TOKEN_FIELDS:
            raise AttributeError(
                f"this output has no {name!r}; a language model has entropy, logprobs, logprobs_of, topk"
            )
        if name not in self._fields:
            self._fields[name] = self._scatter(self._measured(name))
        return self._fields[name]

    def _measured(self, name: str) -> Tensor:
        """Return one of `TOKEN_FIELDS` of the N tokens."""
        if name not in self._values:
            self._requested.add(name)
            names = sorted(self._requested - self._values.keys())
            values = self._logits.measure(names, self._packed.input_ids[self._packed.targets])
            self._values.update(zip(names, values, strict=True))
        return self._values[name]

    def _observed_logprobs(self) -> Tensor:
        if self._packed.observed is None:
            raise AttributeError(
                f"this output has no {OBSERVED_LOGPROBS!r}, as the node has no observed tokens. List "
                'nodes.observed_tokens, and set observed="is_observed" of the train node'
            )
        if OBSERVED_LOGPROBS not in self._fields:
            values = self._placed(self._measured("logprobs"))
            self._fields[OBSERVED_LOGPROBS] = values.masked_fill(~self._packed.observed, 0)
        return self._fields[OBSERVED_LOGPROBS]

    @override
    def topk(self, k: int) -> tuple[Tensor, Tensor]:
        ids, logprobs = self._logits.topk(k)
        return self._scatter(ids), self._scatter(logprobs)

    @override
    def logprobs_of(self, ids: Tensor) -> Tensor:
        return self._scatter(self._logits.logprobs_of(ids[self._packed.targets]))

    def _scatter(self, values: Tensor) -> Tensor:
        """Put entries of the learned tokens at their positions: `[N, ...]` -> `[T, ...]`, 0 elsewhere."""
        placed, observed = self._placed(values), self._packed.observed
        return placed if observed is None else placed.masked_fill(_like(observed, placed), 0)

    def _placed(self, values: Tensor) -> Tensor:
        """Put entries of the N tokens at their positions: `[N, ...]` -> `[T, ...]`, 0 elsewhere."""
        size = len(self._packed.input_ids)
        return values.new_zeros(size, *values.shape[1:]).index_copy(0, self._packed.targets, values)


def _like(mask: Tensor, x: Tensor) -> Tensor:
    """Return a mask `[T]` with as many axes as `[T, ...]`."""
    return mask.view(-1, *[1] * (x.dim() - 1))


class ScalarOutput(Output):
    """Output of a critic (`values`, `bootstrap`) or a reward model (`scores`, `token_scores`)."""

    def __init__(self, scalars: Tensor, packed: PackedBatch, head: str, padding_id: int | None) -> None:
        """Take one number for each of the T tokens; `padding_id` is `pad_token_id` of the model's config."""
        super().__init__()
        self._scalars = scalars
        self._packed = packed
        self._padding_id = padding_id
        self._makers: dict[str, Callable[[], Tensor]] = {
            "value": {"values": self._values, "bootstrap": self._at_last_tokens},
            "score": {"scores": self._scores, "token_scores": self._token_scores},
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

    def _token_scores(self) -> Tensor:
        return self._scalars.masked_fill(~self._packed.seqs.loss_mask, 0)

    def _scores(self) -> Tensor:
        return self._scalars[scored_tokens(self._packed, self._padding_id)]
