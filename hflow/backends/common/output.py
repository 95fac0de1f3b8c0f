"""What bodies get from a forward: computed when touched, aligned to the tokens it speaks of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from hflow.backends.common.inputs import PackedBatch
from hflow.types import Output

MEASURES = ("entropy", "logprobs")
"""Fields of a language model's output with one number a token."""


class Logits(Protocol):
    """The distributions that the N learned tokens were drawn from, under the temperature."""

    def measure(self, names: Sequence[str], ids: Tensor) -> Sequence[Tensor]:
        """Some of `MEASURES`, `[N]` each, in one pass; `ids` are the tokens that were drawn."""

    def topk(self, k: int) -> tuple[Tensor, Tensor]:
        """The `k` likeliest tokens and their log-probs, `[N, K]` both."""

    def logprobs_of(self, ids: Tensor) -> Tensor:
        """Log-probs `[N, K]` of tokens `[N, K]`."""


class LmOutput(Output):
    """Log-probs and entropy at learned tokens; logits exist for the rows that predict those only.

    `wanted` is shared by the micro-batches of a call: what one body call touched, later ones
    compute together, in one pass over the logits.
    """

    def __init__(self, logits: Logits, packed: PackedBatch, wanted: set[str]) -> None:
        super().__init__()
        self._logits = logits
        self._packed = packed
        self._wanted = wanted

    def _get(self, name: str) -> Any:
        if name not in MEASURES:
            raise AttributeError(
                f"this output has no {name!r}; a language model has entropy, logprobs, logprobs_of, topk"
            )
        if name not in self._fields:
            self._wanted.add(name)
            names = sorted(self._wanted - self._fields.keys())
            found = self._logits.measure(names, self._packed.input_ids[self._packed.targets])
            self._fields.update(zip(names, map(self._spread, found), strict=True))
        return self._fields[name]

    def topk(self, k: int) -> tuple[Tensor, Tensor]:
        """The `k` likeliest tokens at each position: ids and log-probs, both `[T, K]`."""
        ids, logprobs = self._logits.topk(k)
        return self._spread(ids), self._spread(logprobs)

    def logprobs_of(self, ids: Tensor) -> Tensor:
        """Log-probs `[T, K]` of given token ids `[T, K]` at each position."""
        return self._spread(self._logits.logprobs_of(ids[self._packed.targets]))

    def _spread(self, found: Tensor) -> Tensor:
        """Entries of the learned tokens over all T; 0 elsewhere."""
        size = len(self._packed.input_ids)
        return found.new_zeros(size, *found.shape[1:]).index_copy(0, self._packed.targets, found)


class ScalarOutput(Output):
    """Values of a critic, or scores of a reward model, by the model's head."""

    def __init__(self, scalars: Tensor, packed: PackedBatch, kind: str) -> None:
        """Take one number for each of the T tokens; `kind` is `value` or `score`."""
        super().__init__()
        self._scalars = scalars
        self._packed = packed
        self._makers: dict[str, Callable[[], Tensor]] = {
            "value": {"values": self._values, "bootstrap": self._at_last},
            "score": {"scores": self._at_last},
        }[kind]
        self._kind = kind

    def _get(self, name: str) -> Any:
        if name not in self._makers:
            have = ", ".join(sorted(self._makers))
            raise AttributeError(f"this output has no {name!r}; a {self._kind} model has {have}")
        return self._makers[name]()

    def _values(self) -> Tensor:
        """V before token t comes from the hidden state of token t - 1."""
        return torch.roll(self._scalars, 1).masked_fill(~self._packed.seqs.loss_mask, 0)

    def _at_last(self) -> Tensor:
        return self._scalars[self._packed.last]
