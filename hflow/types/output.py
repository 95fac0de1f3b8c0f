"""`Output`: what a model's forward offers to the body of an infer or train node."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


class Output:
    """The results of one forward over packed sequences; the head decides which there are.

    head `lm`: `logprobs`, `entropy` (PerToken, under the generation temperature), `topk(k)`
    (ids and log-probs, both `[T, K]`) and `logprobs_of(ids)` (`[T, K]`); head `value`:
    `values` (PerToken) and `bootstrap` (PerSequence); head `score`: `scores` (PerSequence).

    Every PerToken float is 0 where `loss_mask` is 0. Construct one from tensors to call a
    body in a test: `Output(logprobs=theta)`. Backends subclass it to compute lazily.
    """

    def __init__(self, **fields: Tensor) -> None:
        self._fields = fields

    def _get(self, name: str) -> Any:
        if name not in self._fields:
            have = ", ".join(sorted(self._fields)) or "nothing"
            raise AttributeError(f"this output has no {name!r}; it has {have}")
        return self._fields[name]

    def _tensor(self, name: str) -> Tensor:
        tensor: Tensor = self._get(name)
        return tensor

    @property
    def logprobs(self) -> Tensor:
        """`log p(input_ids[t] | before t)`, PerToken."""
        return self._tensor("logprobs")

    @property
    def entropy(self) -> Tensor:
        """Entropy in nats of the distribution that token t was drawn from, PerToken."""
        return self._tensor("entropy")

    @property
    def values(self) -> Tensor:
        """V before token t, PerToken."""
        return self._tensor("values")

    @property
    def bootstrap(self) -> Tensor:
        """V after the last token, PerSequence."""
        return self._tensor("bootstrap")

    @property
    def scores(self) -> Tensor:
        """One scalar a sequence, read at its last token, PerSequence."""
        return self._tensor("scores")

    def topk(self, k: int) -> tuple[Tensor, Tensor]:
        """The `k` likeliest tokens at each position: ids and log-probs, both `[T, K]`."""
        ids, logprobs = self._get("topk")
        return ids[:, :k], logprobs[:, :k]

    def logprobs_of(self, ids: Tensor) -> Tensor:
        """Log-probs `[T, K]` of given token ids `[T, K]` at each position."""
        chosen: Tensor = self._get("logprobs_of")(ids)
        return chosen
