"""The root module: runs the forward pass and the body in one call, so that sharded weights are whole in both.

Axes: T packed tokens, U computed tokens, N learned tokens, C rows of a chunk, V vocabulary, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from hflow.models.expert_replay import REPLAYED
from hflow.models.host_offload import activations_in_host_memory
from hflow.training.loop.inputs import PackedBatch
from hflow.training.loop.output import LmOutput, ScalarOutput, in_chunks
from hflow.types import Output

Result = TypeVar("Result")


class PackedModel(nn.Module):
    """An HF backbone and a head over packed sequences.

    Args:
        backbone: returns hidden states.
        head: the module that is applied to the hidden states.
        head_kind: `lm`, `value` or `score`.
        offload_activations: keep what the backbone saves for its backward pass in host memory.
    """

    def __init__(
        self, backbone: nn.Module, head: nn.Module, head_kind: str, offload_activations: bool = False
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = head
        self.head_kind = head_kind
        self.offload_activations = offload_activations

    def forward(
        self,
        packed: PackedBatch,
        consume: Callable[[Output], Result] | None,
        temperature: float = 1.0,
        get_requested: Callable[[], set[str]] = set,
    ) -> Result | Tensor:
        """Run the backbone; return what `consume` makes of its output.

        Args:
            packed: the micro-batch.
            consume: computes the result from the output. Without it the result is a zero that depends on
                every weight, so that a rank without samples joins the gathering of weights and the reduction
                of gradients.
            temperature: logits are divided by it.
            get_requested: returns the set that `LmOutput` shares between micro-batches. FSDP would pass on a
                copy of the set itself.
        """
        replayed = {} if packed.replayed is None else {REPLAYED: packed.replayed}
        with activations_in_host_memory(self.offload_activations):
            hidden = self.backbone(
                input_ids=packed.computed_ids[None],
                position_ids=packed.position_ids[None],
                use_cache=False,
                packed_layout=packed.layout,
                **replayed,
            ).last_hidden_state[0]
        if consume is None:
            zero: Tensor = self.head(hidden[:0]).sum()
            return zero
        if self.head_kind == "lm":
            rows = hidden.index_select(0, packed.computed_rows(packed.targets - 1))
            logits = WholeLogits(rows, self.head, temperature)
            return consume(LmOutput(logits, packed, get_requested()))
        padding_id = getattr(self.backbone.config, "pad_token_id", None)
        return consume(ScalarOutput(packed.expand(self.head(hidden)), packed, self.head_kind, padding_id))


Measure = Callable[..., tuple[Tensor, ...]]
"""Makes tensors of C rows from log-probs `[C, V]` and C rows of further inputs."""


@dataclass(frozen=True)
class WholeLogits:
    """`loop.output.Logits` from an output matrix that this rank has whole. Logits exist chunk by chunk."""

    rows: Tensor
    """Hidden states `[N, D]`."""
    head: nn.Module
    """The output matrix, `[N, D]` -> `[N, V]`."""
    temperature: float
    """Logits are divided by it."""

    def measure(self, names: Sequence[str], ids: Tensor) -> Sequence[Tensor]:
        """Compute some of `logprobs` and `entropy`, in one pass."""

        def compute(logprobs: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
            measures = {"logprobs": lambda: _picked(logprobs, ids), "entropy": lambda: _entropy(logprobs)}
            return tuple(measures[name]() for name in names)

        return self._apply(compute, ids)

    def topk(self, k: int) -> tuple[Tensor, Tensor]:
        """Return the `k` likeliest tokens and their log-probs."""
        ids, logprobs = self._apply(lambda logprobs: logprobs.topk(k, dim=-1)[::-1])
        return ids, logprobs

    def logprobs_of(self, ids: Tensor) -> Tensor:
        """Return the log-probs of given tokens."""
        (logprobs,) = self._apply(lambda logprobs, rows: (logprobs.gather(-1, rows),), ids)
        return logprobs

    def _apply(self, measure: Measure, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Apply `measure` to the log-softmax of the logits, chunk by chunk."""

        def step(hidden: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
            logits = self.head(hidden).float()
            if self.temperature != 1.0:
                logits = logits / self.temperature
            return measure(torch.log_softmax(logits, dim=-1), *others)

        return in_chunks(step, _vocab_size(self.head), self.rows, *inputs)


def _vocab_size(head: nn.Module) -> int:
    """Return V, the rows of the output matrix."""
    assert isinstance(head.weight, Tensor)
    return len(head.weight)


def _picked(logprobs: Tensor, ids: Tensor) -> Tensor:
    """Return the log-probs of given ids: `[C, V]`, `[C]` -> `[C]`."""
    return logprobs.gather(-1, ids[:, None]).squeeze(-1)


def _entropy(logprobs: Tensor) -> Tensor:
    """Return the entropy in nats of each row: `[C, V]` -> `[C]`."""
    return -(logprobs.exp() * logprobs).sum(-1)
