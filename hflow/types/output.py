"""`Output`: the forward pass of a model, which bodies of infer and train nodes receive."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


class Output:
    """The results of one forward pass over packed sequences. They depend on the model's head.

    `lm`: `logprobs` and `entropy` (PerToken, at the generation temperature), `topk(k)` (ids and log-probs,
    both `[T, K]`), `logprobs_of(ids)` (`[T, K]`), and in a train node with the option `observed`
    `observed_logprobs` (PerToken). `value`: `values` (PerToken) and `bootstrap` (PerSequence). `score`:
    `scores` (PerSequence) and `token_scores` (PerToken).

    PerToken floats are 0 where `loss_mask` is 0; only `observed_logprobs` has entries there. Backends compute
    a result when a body reads it. To call a body in a test, construct an output from tensors:
    `Output(logprobs=theta)`.
    """

    def __init__(self, **fields: Tensor) -> None:
        self._fields = fields

    def _get(self, name: str) -> Any:
        if name not in self._fields:
            available = ", ".join(sorted(self._fields)) or "nothing"
            raise AttributeError(f"this output has no {name!r}; it has {available}")
        return self._fields[name]

    def _tensor(self, name: str) -> Tensor:
        tensor: Tensor = self._get(name)
        return tensor

    @property
    def logprobs(self) -> Tensor:
        """`log p(input_ids[t] | input_ids[:t])`, PerToken."""
        return self._tensor("logprobs")

    @property
    def observed_logprobs(self) -> Tensor:
        """`log p` of the tokens that the model observed, PerToken; 0 elsewhere, also where one is learned.

        The entries of a loss at these tokens are averaged over those of the minibatch.
        """
        return self._tensor("observed_logprobs")

    @property
    def entropy(self) -> Tensor:
        """Entropy in nats of the distribution of token t, PerToken."""
        return self._tensor("entropy")

    @property
    def values(self) -> Tensor:
        """The value V before token t, PerToken."""
        return self._tensor("values")

    @property
    def bootstrap(self) -> Tensor:
        """The value V after the last token, PerSequence."""
        return self._tensor("bootstrap")

    @property
    def scores(self) -> Tensor:
        """The score of a sequence, computed at its last token, PerSequence."""
        return self._tensor("scores")

    @property
    def token_scores(self) -> Tensor:
        """The score of a sequence up to each token, computed at this token, PerToken."""
        return self._tensor("token_scores")

    def topk(self, k: int) -> tuple[Tensor, Tensor]:
        """Return the `k` most likely tokens at each position: ids and log-probs, both `[T, K]`."""
        ids, logprobs = self._get("topk")
        return ids[:, :k], logprobs[:, :k]

    def logprobs_of(self, ids: Tensor) -> Tensor:
        """Return the log-probs `[T, K]` of token ids `[T, K]` at each position."""
        chosen: Tensor = self._get("logprobs_of")(ids)
        return chosen
