"""Log-probs and entropy of logits whose vocabulary is split over tensor ranks, without gathering the logits.

A rank has V' / T logits of every row. The ranks exchange one maximum and a few sums per row: the sum of e^l,
the sum of e^l * l, and the logits of the requested tokens, each of which one rank has.

Axes: N rows, C rows of a chunk, K requested tokens of a row, V' padded vocabulary, T tensor ranks, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from hflow.training.loop.inputs import PackedBatch
from hflow.training.loop.output import LmOutput, ScalarOutput, in_chunks
from hflow.training.megatron.context_parallel import DividedLogits, RowDivision
from hflow.training.megatron.model import Stage
from hflow.types import Output


def stage_output(
    stage: Stage,
    packed: PackedBatch,
    division: RowDivision | None,
    hidden: Tensor,
    temperature: float,
    requested: set[str],
) -> Output:
    """Return the output of a micro-batch, which a node's body reads on all ranks of the last stage.

    Args:
        stage: the last one.
        packed: the micro-batch.
        division: the division of the rows over context ranks; None without context parallelism.
        hidden: the hidden states of this rank's rows.
        temperature: logits are divided by it.
        requested: the values requested, as in `LmOutput`.
    """
    if stage.head != "lm":
        scalars = stage.module.output_layer(hidden)
        if division is not None:
            rows = slice(0, division.num_queries)
            scalars = division.whole(scalars[rows], division.rows[rows], division.num_rows)
        padding_id = getattr(stage.hf_config, "pad_token_id", None)
        return ScalarOutput(packed.expand(scalars), packed, stage.head, padding_id)
    predictors = packed.computed_rows(packed.targets - 1) if division is None else division.learned_rows
    logits = VocabParallelLogits(
        rows=hidden.index_select(0, predictors),
        local_logits=stage.logits,
        vocab_start=stage.vocab_start,
        vocab_rows=stage.vocab_rows,
        group=stage.parallel.groups.tp,
        temperature=temperature,
    )
    if division is None:
        return LmOutput(logits, packed, requested)
    return LmOutput(DividedLogits(logits, division, len(packed.targets)), packed, requested)


@dataclass(frozen=True)
class VocabParallelLogits:
    """`loop.output.Logits` from an output matrix whose rows are split over the tensor ranks."""

    rows: Tensor
    """Hidden states `[N, D]`, the same on all tensor ranks."""
    local_logits: Callable[[Tensor], Tensor]
    """Computes this rank's logits `[C, V' / T]` of hidden states `[C, D]`."""
    vocab_start: int
    """Token of this rank's first logit."""
    vocab_rows: int
    """V' / T."""
    group: ProcessGroup
    """The tensor ranks."""
    temperature: float
    """Logits are divided by it."""

    def measure(self, names: Sequence[str], ids: Tensor) -> Sequence[Tensor]:
        """Compute some of `logprobs` and `entropy`, in one pass."""

        def step(rows: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
            logprobs, entropy = self._measure(rows, ids[:, None], with_entropy="entropy" in names)
            measures = {"logprobs": logprobs[:, 0], "entropy": entropy}
            return tuple(measures[name] for name in names)

        return in_chunks(step, self.vocab_rows, self.rows, ids)

    def logprobs_of(self, ids: Tensor) -> Tensor:
        """Return the log-probs of given tokens."""
        (logprobs,) = in_chunks(
            lambda rows, ids: self._measure(rows, ids)[:1], self.vocab_rows, self.rows, ids
        )
        return logprobs

    def topk(self, k: int) -> tuple[Tensor, Tensor]:
        """Return the `k` likeliest tokens and their log-probs."""

        def step(rows: Tensor) -> tuple[Tensor, ...]:
            logits = self._logits(rows)
            ids = vocab_parallel_topk(logits.detach(), k, self.vocab_start, self.group)
            return ids, vocab_parallel_logprobs(logits, ids, self.vocab_start, self.group, False)[0]

        ids, logprobs = in_chunks(step, self.vocab_rows, self.rows)
        return ids, logprobs

    def _measure(self, rows: Tensor, ids: Tensor, with_entropy: bool = False) -> tuple[Tensor, Tensor]:
        logits = self._logits(rows)
        return vocab_parallel_logprobs(logits, ids, self.vocab_start, self.group, with_entropy)

    def _logits(self, rows: Tensor) -> Tensor:
        logits = self.local_logits(rows).float()
        return logits if self.temperature == 1.0 else logits / self.temperature


@torch.no_grad()
def vocab_parallel_topk(logits: Tensor, k: int, vocab_start: int, group: ProcessGroup) -> Tensor:
    """Return the `k` likeliest tokens `[C, K]` of each row, likeliest first, from each rank's candidates."""
    values, ids = logits.topk(min(k, logits.shape[1]), dim=-1)
    values, ids = _gather_columns(values, group), _gather_columns(ids + vocab_start, group)
    return ids.gather(-1, values.topk(k, dim=-1).indices)


class _VocabParallelLogprobs(torch.autograd.Function):
    """Two collectives in the forward pass and none in the backward pass, which is local to each rank."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, ids: Tensor, vocab_start: int, group: ProcessGroup, with_entropy: bool
    ) -> tuple[Tensor, Tensor]:
        size = logits.shape[-1]
        highest = logits.amax(-1)
        _all_reduce(highest, dist.ReduceOp.MAX, group)
        shifted = logits - highest[:, None]
        exponentials = shifted.exp() if with_entropy else shifted.exp_()
        is_local = (ids >= vocab_start) & (ids < vocab_start + size)
        index = (ids - vocab_start).clamp(0, size - 1)
        picked = (logits.gather(-1, index) - highest[:, None]) * is_local
        products = (exponentials * shifted).sum(-1) if with_entropy else torch.zeros_like(highest)
        sums = torch.cat([exponentials.sum(-1)[:, None], products[:, None], picked], dim=-1)
        _all_reduce(sums, dist.ReduceOp.SUM, group)
        total, mean, picked = sums[:, 0], sums[:, 1] / sums[:, 0], sums[:, 2:]
        ctx.with_entropy = with_entropy
        probabilities = exponentials.div_(total[:, None])
        ctx.save_for_backward(probabilities, index, is_local, *([shifted, mean] if with_entropy else []))
        return picked - total.log()[:, None], total.log() - mean

    @staticmethod
    def backward(
        ctx: Any, grad_logprobs: Tensor, grad_entropy: Tensor
    ) -> tuple[Tensor, None, None, None, None]:
        """With p the probabilities: d log p_i / d l_j = [i = j] - p_j, d H / d l_j = -p_j (l_j - E[l])."""
        probabilities, index, is_local, *others = ctx.saved_tensors
        slope = grad_logprobs.sum(-1, keepdim=True)
        if ctx.with_entropy:  # one more tensor of this size, and not one for each operation
            shifted, mean = others
            grad = (shifted - mean[:, None]).mul_(grad_entropy[:, None]).add_(slope).mul_(probabilities)
        else:
            grad = probabilities * slope
        grad.neg_().scatter_add_(-1, index, grad_logprobs * is_local)
        return grad, None, None, None, None


vocab_parallel_logprobs: Callable[[Tensor, Tensor, int, ProcessGroup, bool], tuple[Tensor, Tensor]] = (
    _VocabParallelLogprobs.apply
)
"""Compute log-probs `[C, K]` of tokens `[C, K]`, and entropy `[C]` in nats, from a rank's logits `[C, V' /
T]`.

The arguments: fp32 logits, tokens, the token of the first logit, the tensor ranks, and whether to compute the
entropy. Without it, the second result has no meaning.
"""


def _all_reduce(x: Tensor, operation: Any, group: ProcessGroup) -> None:
    if group.size() > 1 and x.numel():
        dist.all_reduce(x, operation, group=group)


def _gather_columns(x: Tensor, group: ProcessGroup) -> Tensor:
    """Concatenate the columns of every rank: `[C, K]` -> `[C, T K]`."""
    if group.size() == 1 or not x.numel():
        return x.repeat(1, group.size())
    parts = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts, dim=-1)
