"""Log-probs and entropy from logits whose vocabulary is divided over tensor ranks, never gathered.

A rank has `V' / T` logits of every row. What the ranks must know of each other is one maximum and a few
sums a row: sum of e^l, sum of e^l l, and the logits of the tokens asked for, each of which one rank has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from hflow.backends.common.chunked import in_chunks
from hflow.backends.common.inputs import PackedBatch
from hflow.backends.common.output import LmOutput, ScalarOutput
from hflow.backends.megatron.model import Stage
from hflow.types import Output


@dataclass(frozen=True)
class VocabParallelLogits:
    """`common.output.Logits` by an output matrix of which each tensor rank has some rows."""

    rows: Tensor
    """Hidden states `[N, D]`, the same on all tensor ranks."""
    part: Callable[[Tensor], Tensor]
    """This rank's logits `[C, V' / T]` of hidden states `[C, D]`."""
    start: int
    """Token of the first of them."""
    size: int
    """`V' / T`."""
    group: ProcessGroup
    """The tensor ranks."""
    temperature: float
    """Logits are divided by it."""

    def measure(self, names: Sequence[str], ids: Tensor) -> Sequence[Tensor]:
        """Some of `logprobs` and `entropy`, in one pass."""

        def step(rows: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
            logprobs, entropy = self._measured(rows, ids[:, None], with_entropy="entropy" in names)
            found = {"logprobs": logprobs[:, 0], "entropy": entropy}
            return tuple(found[name] for name in names)

        return in_chunks(step, self.size, self.rows, ids)

    def logprobs_of(self, ids: Tensor) -> Tensor:
        """Log-probs of given tokens."""
        (found,) = in_chunks(lambda rows, ids: self._measured(rows, ids)[:1], self.size, self.rows, ids)
        return found

    def topk(self, k: int) -> tuple[Tensor, Tensor]:
        """The `k` likeliest tokens and their log-probs."""

        def step(rows: Tensor) -> tuple[Tensor, ...]:
            logits = self._logits(rows)
            ids = likeliest(logits.detach(), k, self.start, self.group)
            return ids, measured(logits, ids, self.start, self.group, False)[0]

        ids, logprobs = in_chunks(step, self.size, self.rows)
        return ids, logprobs

    def _measured(self, rows: Tensor, ids: Tensor, with_entropy: bool = False) -> tuple[Tensor, Tensor]:
        return measured(self._logits(rows), ids, self.start, self.group, with_entropy)

    def _logits(self, rows: Tensor) -> Tensor:
        logits = self.part(rows).float()
        return logits if self.temperature == 1.0 else logits / self.temperature


@torch.no_grad()
def likeliest(logits: Tensor, k: int, start: int, group: ProcessGroup) -> Tensor:
    """The `k` likeliest tokens `[C, K]` of each row, the likeliest first, out of each rank's candidates."""
    values, ids = logits.topk(min(k, logits.shape[1]), dim=-1)
    values, ids = _gathered(values, group), _gathered(ids + start, group)
    return ids.gather(-1, values.topk(k, dim=-1).indices)


class _Measured(torch.autograd.Function):
    """Two collectives in the forward pass, none in the backward pass: each rank's logits get their own."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, ids: Tensor, start: int, group: ProcessGroup, with_entropy: bool
    ) -> tuple[Tensor, Tensor]:
        size = logits.shape[-1]
        highest = logits.amax(-1)
        _all_reduce(highest, dist.ReduceOp.MAX, group)
        shifted = logits - highest[:, None]
        exponentials = shifted.exp()
        is_here = (ids >= start) & (ids < start + size)
        index = (ids - start).clamp(0, size - 1)
        picked = shifted.gather(-1, index) * is_here
        products = (exponentials * shifted).sum(-1) if with_entropy else torch.zeros_like(highest)
        sums = torch.cat([exponentials.sum(-1)[:, None], products[:, None], picked], dim=-1)
        _all_reduce(sums, dist.ReduceOp.SUM, group)
        total, mean, picked = sums[:, 0], sums[:, 1] / sums[:, 0], sums[:, 2:]
        ctx.with_entropy = with_entropy
        probabilities = exponentials.div_(total[:, None])
        ctx.save_for_backward(probabilities, index, is_here, *([shifted, mean] if with_entropy else []))
        return picked - total.log()[:, None], total.log() - mean

    @staticmethod
    def backward(
        ctx: Any, grad_logprobs: Tensor, grad_entropy: Tensor
    ) -> tuple[Tensor, None, None, None, None]:
        """With p the probabilities: d log p_i / d l_j = [i = j] - p_j, d H / d l_j = -p_j (l_j - E[l])."""
        probabilities, index, is_here, *others = ctx.saved_tensors
        slope = grad_logprobs.sum(-1, keepdim=True)
        if ctx.with_entropy:
            shifted, mean = others
            slope = slope + grad_entropy[:, None] * (shifted - mean[:, None])
        grad = (-probabilities * slope).scatter_add_(-1, index, grad_logprobs * is_here)
        return grad, None, None, None, None


measured: Callable[[Tensor, Tensor, int, ProcessGroup, bool], tuple[Tensor, Tensor]] = _Measured.apply
"""Log-probs `[C, K]` of tokens `[C, K]`, and entropy `[C]` in nats, from fp32 logits `[C, V' / T]` of a rank.

The other arguments: the token of the first logit, the tensor ranks, and whether the entropy is wanted;
without it, the second result has no meaning.
"""


def _all_reduce(x: Tensor, operation: Any, group: ProcessGroup) -> None:
    if group.size() > 1 and x.numel():
        dist.all_reduce(x, operation, group=group)


def _gathered(x: Tensor, group: ProcessGroup) -> Tensor:
    """`[C, K]` of every rank side by side: `[C, T K]`."""
    if group.size() == 1 or not x.numel():
        return x.repeat(1, group.size())
    parts = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts, dim=-1)


# -------------------- What a node's body gets on the last stage, on all of its tensor ranks alike.


def output_of(
    stage: Stage, packed: PackedBatch, hidden: Tensor, temperature: float, wanted: set[str]
) -> Output:
    """The output of a micro-batch.

    Args:
        stage: the last one.
        packed: the micro-batch.
        hidden: its hidden states `[U, D]`.
        temperature: logits are divided by it.
        wanted: shared by the micro-batches of a call, as `LmOutput` says.
    """
    if stage.head != "lm":
        return ScalarOutput(packed.widen(stage.module.output_layer(hidden)), packed, stage.head)
    logits = VocabParallelLogits(
        rows=hidden.index_select(0, packed.computed(packed.targets - 1)),
        part=stage.logits,
        start=stage.vocab_start,
        size=stage.vocab_rows,
        group=stage.parallel.groups.tp,
        temperature=temperature,
    )
    return LmOutput(logits, packed, wanted)
