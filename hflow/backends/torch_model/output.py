"""What bodies get from a forward: computed when touched, aligned to the tokens it speaks of."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hflow.backends.torch_model import logits
from hflow.backends.torch_model.inputs import Packed
from hflow.types import Output


class LmOutput(Output):
    """Log-probs and entropy at learned tokens; the head runs on the rows that predict those only.

    `wanted` is shared by the micro-batches of a call: what one body call touched, later ones
    compute together, in one pass over the logits.
    """

    def __init__(
        self, hidden: Tensor, head: nn.Module, packed: Packed, temperature: float, wanted: set[str]
    ) -> None:
        super().__init__()
        self._hidden = hidden
        self._head = head
        self._packed = packed
        self._temperature = temperature
        self._wanted = wanted

    def _get(self, name: str) -> Any:
        if name not in ("logprobs", "entropy"):
            raise AttributeError(
                f"this output has no {name!r}; a language model has entropy, logprobs, logprobs_of, topk"
            )
        if name not in self._fields:
            self._wanted.add(name)
            self._measure_wanted()
        return self._fields[name]

    def _measure_wanted(self) -> None:
        names = sorted(self._wanted - self._fields.keys())

        def of(logprobs: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
            measures = {
                "logprobs": lambda: logits.picked(logprobs, ids),
                "entropy": lambda: logits.entropy(logprobs),
            }
            return tuple(measures[name]() for name in names)

        found = self._measure(of, self._packed.input_ids[self._packed.targets])
        self._fields.update(zip(names, found, strict=True))

    def topk(self, k: int) -> tuple[Tensor, Tensor]:
        """The `k` likeliest tokens at each position: ids and log-probs, both `[T, K]`."""
        ids, logprobs = self._measure(lambda logprobs: logprobs.topk(k, dim=-1)[::-1])
        return ids, logprobs

    def logprobs_of(self, ids: Tensor) -> Tensor:
        """Log-probs `[T, K]` of given token ids `[T, K]` at each position."""
        (found,) = self._measure(
            lambda logprobs, rows: (logprobs.gather(-1, rows),), ids[self._packed.targets]
        )
        return found

    def _measure(self, of: logits.Measure, *extra: Tensor) -> list[Tensor]:
        """Measures at the learned tokens, spread over all T; 0 elsewhere."""
        rows = self._hidden.index_select(0, self._packed.targets - 1)
        found = logits.measure(rows, self._head, self._temperature, of, *extra)
        size = len(self._hidden)
        return [x.new_zeros(size, *x.shape[1:]).index_copy(0, self._packed.targets, x) for x in found]


class ScalarOutput(Output):
    """Values of a critic, or scores of a reward model, by the model's head."""

    def __init__(self, hidden: Tensor, head: nn.Module, packed: Packed, kind: str) -> None:
        super().__init__()
        self._scalars: Tensor = head(hidden)
        self._packed = packed
        self._kind = kind

    def _get(self, name: str) -> Any:
        makers = {
            "value": {"values": self._values, "bootstrap": self._at_last},
            "score": {"scores": self._at_last},
        }[self._kind]
        if name not in makers:
            have = ", ".join(sorted(makers))
            raise AttributeError(f"this output has no {name!r}; a {self._kind} model has {have}")
        return makers[name]()

    def _values(self) -> Tensor:
        """V before token t comes from the hidden state of token t - 1."""
        return torch.roll(self._scalars, 1).masked_fill(~self._packed.seqs.loss_mask, 0)

    def _at_last(self) -> Tensor:
        return self._scalars[self._packed.last]
