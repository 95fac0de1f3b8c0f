"""The root module: forward and body in one call, so that sharded weights are whole in both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from hflow.backends.common.chunked import in_chunks
from hflow.backends.common.inputs import PackedBatch
from hflow.backends.common.output import LmOutput, ScalarOutput
from hflow.types import Output

# -------------------- Measures of logits without the logits: chunk by chunk, recomputed in the backward
# pass.


Measure = Callable[..., tuple[Tensor, ...]]
"""From log-probs `[C, V]` and rows of the extra inputs to tensors of C rows."""


@dataclass(frozen=True)
class WholeLogits:
    """`common.output.Logits` by an output matrix that this rank has whole."""

    rows: Tensor
    """Hidden states `[N, D]`."""
    head: nn.Module
    """The output matrix, `[N, D]` -> `[N, V]`."""
    temperature: float
    """Logits are divided by it."""

    def measure(self, names: Sequence[str], ids: Tensor) -> Sequence[Tensor]:
        """Some of `logprobs` and `entropy`, in one pass."""

        def of(logprobs: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
            measures = {"logprobs": lambda: _picked(logprobs, ids), "entropy": lambda: _entropy(logprobs)}
            return tuple(measures[name]() for name in names)

        return self._apply(of, ids)

    def topk(self, k: int) -> tuple[Tensor, Tensor]:
        """The `k` likeliest tokens and their log-probs."""
        ids, logprobs = self._apply(lambda logprobs: logprobs.topk(k, dim=-1)[::-1])
        return ids, logprobs

    def logprobs_of(self, ids: Tensor) -> Tensor:
        """Log-probs of given tokens."""
        (found,) = self._apply(lambda logprobs, rows: (logprobs.gather(-1, rows),), ids)
        return found

    def _apply(self, of: Measure, *extra: Tensor) -> tuple[Tensor, ...]:
        """Apply `of` to the log-softmax of the logits."""

        def step(hidden: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
            logits = self.head(hidden).float()
            if self.temperature != 1.0:
                logits = logits / self.temperature
            return of(torch.log_softmax(logits, dim=-1), *others)

        return in_chunks(step, _vocabulary_size(self.head), self.rows, *extra)


def _vocabulary_size(head: nn.Module) -> int:
    """V, the rows of the output matrix."""
    assert isinstance(head.weight, Tensor)
    return len(head.weight)


def _picked(logprobs: Tensor, ids: Tensor) -> Tensor:
    """Log-probs of given ids: `[C, V]`, `[C]` -> `[C]`."""
    return logprobs.gather(-1, ids[:, None]).squeeze(-1)


def _entropy(logprobs: Tensor) -> Tensor:
    """Entropy in nats of each row: `[C, V]` -> `[C]`."""
    return -(logprobs.exp() * logprobs).sum(-1)


Result = TypeVar("Result")


class PackedModel(nn.Module):
    """An HF backbone and a head over packed sequences."""

    def __init__(self, backbone: nn.Module, head: nn.Module, kind: str) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = head
        self.kind = kind

    def forward(
        self,
        packed: PackedBatch,
        consume: Callable[[Output], Result] | None,
        temperature: float = 1.0,
        wanted: Callable[[], set[str]] = set,
    ) -> Result | Tensor:
        """Run the backbone and return what `consume` makes of its output.

        Without `consume` the result is a zero that depends on every weight: a rank with nothing to
        do takes part in the gathering of weights and in the reduction of gradients by it. `wanted` returns
        the set that `LmOutput` shares between calls: FSDP would hand on a copy of the set itself.
        """
        hidden = self.backbone(
            input_ids=packed.computed_ids[None],
            position_ids=packed.position_ids[None],
            use_cache=False,
            packed_layout=packed.layout,
        ).last_hidden_state[0]
        if consume is None:
            nothing: Tensor = self.head(hidden[:0]).sum()
            return nothing
        if self.kind == "lm":
            rows = hidden.index_select(0, packed.computed(packed.targets - 1))
            logits = WholeLogits(rows, self.head, temperature)
            return consume(LmOutput(logits, packed, wanted()))
        return consume(ScalarOutput(packed.widen(self.head(hidden)), packed, self.kind))
