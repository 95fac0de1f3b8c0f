"""Log-probs and entropy of tokens, from hidden states and an output matrix of which a rank may have a part.

The logits of all rows would be by far the largest tensor of a step. They exist for one chunk of rows at a
time, in the dtype of the weights, and in fp32 for a tile of a chunk, which caches hold. On CUDA, kernels read
a chunk once instead (`logit_kernels.py`). The backward pass computes the logits of a chunk again, unless
there is only one, and turns them into their gradient in place.

With l the logits under the temperature, Z the sum of e^l and p = e^l / Z: `log p_i = l_i - log Z` and `H =
log Z - E[l]`, so `d log p_i / d l_j = [i = j] - p_j` and `d H / d l_j = -p_j (l_j - E[l])`. A loss scales
these rows by factors that are known only after the forward pass. The gradient of hidden states can be scaled
afterwards, but not that of the matrix, which is a sum over rows and needs the logits again. So gradients
computed in the forward pass would save no product.

Logits of tokens outside the set that a token was drawn from (`KeptSets`) become those of padding. So all
results are those of the distribution over the set, and no gradient reaches the others.

An adapter of the matrix adds the product of its second matrix and r numbers of each row.

Axes: N rows, C rows of a chunk, K requested tokens of a row, V' logits of a row on this rank, D hidden.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup
from torch.nn.functional import linear

from hflow.base.devices import has_cuda_api
from hflow.training.loop.kept_sets import KeptSets

CHUNK_BYTES = 1 << 29
"""Bytes of the logits of a chunk."""
LOGITS_PER_TILE = 1 << 22
"""Logits of a tile."""
PADDING_LOGIT = -1e30
"""Logit of a padding entry of the vocabulary, or of a token that sampling left out. Its probability is 0, and
0 times the logit is 0, not NaN."""


@dataclass(frozen=True)
class OutputMatrix:
    """A rank's rows of the matrix that computes logits of hidden states."""

    weight: Tensor
    """`[V', D]`."""
    bias: Tensor | None = None
    """`[V']`."""
    first: int = 0
    """The token of the first row."""
    num_valid: int | None = None
    """Rows that belong to a token, the first ones; None: all."""
    group: ProcessGroup | None = None
    """The ranks that have the other rows; None: this one has all."""
    added: Tensor | None = None
    """An adapter's second matrix, `[V', r]`."""

    def logits(self, rows: Tensor, low: Tensor | None = None) -> Tensor:
        """Return logits `[C, V']` of hidden states `[C, D]`; those of padding are `PADDING_LOGIT`.

        `low`, `[C, r]`, is what the adapter's second matrix is multiplied by.
        """
        logits = linear(rows, self.weight, self.bias)
        if self.added is not None and low is not None:
            logits.addmm_(low, self.added.T)
        if self.num_valid is not None:
            logits[:, self.num_valid :] = PADDING_LOGIT
        return logits

    @property
    def rows_per_chunk(self) -> int:
        """The number of hidden states whose logits exist at once."""
        return max(CHUNK_BYTES // (len(self.weight) * self.weight.element_size()), 1)


@dataclass(frozen=True)
class MatrixLogits:
    """`loop.output.Logits` of hidden states."""

    rows: Tensor
    """Hidden states `[N, D]`, the same on all ranks that divide the matrix."""
    matrix: OutputMatrix
    temperature: float
    """Logits are divided by it."""
    kept: KeptSets | None = None
    """The tokens that each row's distribution is over; None: all."""
    low: Tensor | None = None
    """What the adapter's second matrix is multiplied by, `[N, r]`; None: there is no adapter."""

    def whole(self) -> Tensor:
        """Return all logits of this rank at once, `[N, V']`."""
        return self.matrix.logits(self.rows, self.low)

    def measure(self, names: Sequence[str], ids: Tensor) -> Sequence[Tensor]:
        """Compute some of `logprobs` and `entropy`, in one pass."""
        logprobs, entropy, _ = self._apply(ids[:, None], with_entropy="entropy" in names)
        measures = {"logprobs": logprobs[:, 0], "entropy": entropy}
        return tuple(measures[name] for name in names)

    def topk(self, k: int) -> tuple[Tensor, Tensor]:
        """Return the `k` likeliest tokens, likeliest first, and their log-probs."""
        logprobs, _, ids = self._apply(None, k)
        return ids, logprobs

    def logprobs_of(self, ids: Tensor) -> Tensor:
        """Return the log-probs of given tokens."""
        return self._apply(ids)[0]

    def _apply(
        self, ids: Tensor | None, k: int = 0, *, with_entropy: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return log-probs `[N, K]` of tokens or of the `k` likeliest ones, the entropy, and the tokens."""
        matrix = self.matrix
        results: tuple[Tensor, Tensor, Tensor] = _Logprobs.apply(  # type: ignore[no-untyped-call]
            self.rows,
            matrix.weight,
            matrix.bias,
            self.low,
            matrix.added,
            ids,
            k,
            matrix,
            self.temperature,
            with_entropy,
            self.kept,
        )
        return results


class _Logprobs(torch.autograd.Function):
    """Two collectives for all rows in the forward pass, two more for the likeliest tokens, none backward."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        low: Tensor | None,
        b: Tensor | None,
        ids: Tensor | None,
        k: int,
        matrix: OutputMatrix,
        temperature: float,
        with_entropy: bool,
        sets: KeptSets | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return log-probs `[N, K]`, entropy `[N]`, which has a meaning `with_entropy`, and the tokens."""
        index, is_local = _local_index(ids, matrix) if ids is not None else (None, None)
        num_picked = min(k, len(weight)) if index is None else index.shape[1]
        picked = rows.new_empty(len(rows), num_picked, dtype=torch.float32)
        candidates = torch.zeros_like(picked, dtype=torch.int64)
        statistics = picked.new_zeros(3, len(rows))
        kept = None
        for chunk in _slices(len(rows), matrix.rows_per_chunk):
            part_low = None if low is None else low[chunk]
            logits = _restricted(matrix.logits(rows[chunk], part_low), chunk, matrix.first, sets)
            if index is None:
                values, candidates[chunk] = logits.topk(num_picked, dim=-1)
            else:
                values = logits.gather(-1, index[chunk])
            picked[chunk] = _scaled(values, temperature)
            fill_statistics(statistics[:, chunk], logits, temperature, with_entropy=with_entropy)
            kept = logits if chunk == slice(0, len(rows)) and any(ctx.needs_input_grad) else None
            del logits, values  # before those of the next chunk exist
        if ids is None:
            ids, picked = _likeliest(candidates + matrix.first, picked, k, matrix.group)
        if index is None or is_local is None:
            index, is_local = _local_index(ids, matrix)
        highest, total, mean, picked = _combined(statistics, picked, is_local, matrix.group)
        # The weight is not kept outside of what is saved: the graph lives until that of the next micro-batch.
        ctx.first, ctx.num_valid, ctx.temperature = matrix.first, matrix.num_valid, temperature
        ctx.sets = sets
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(
            rows, weight, bias, low, b, index, is_local, highest + total.log(), highest + mean, kept
        )
        ctx.mark_non_differentiable(ids)
        return picked - total.log()[:, None], total.log() - mean, ids

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None, _: None
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients of hidden states, matrix, bias and both factors of what an adapter adds."""
        rows, weight, bias, low, b, index, is_local, normaliser, mean, kept = ctx.saved_tensors
        needs_rows, needs_weight, needs_bias, needs_low, needs_b = ctx.needs_input_grad[:5]
        grad_rows = torch.empty_like(rows) if needs_rows else None
        new = torch.empty_like if len(rows) else torch.zeros_like
        grad_weight = new(weight) if needs_weight else None
        grad_bias = torch.zeros_like(bias) if needs_bias else None
        grad_low = torch.empty_like(low) if needs_low else None
        grad_b = torch.zeros_like(b) if needs_b else None
        added = torch.zeros_like(is_local, dtype=torch.float32)
        if grad_logprobs is not None:
            added = grad_logprobs * is_local
        slope = torch.zeros_like(mean) if grad_logprobs is None else grad_logprobs.sum(-1)
        matrix = OutputMatrix(weight, bias, ctx.first, ctx.num_valid, added=b)
        for chunk in _slices(len(rows), matrix.rows_per_chunk):
            part_low = None if low is None else low[chunk]
            logits = kept
            if logits is None:
                logits = _restricted(matrix.logits(rows[chunk], part_low), chunk, matrix.first, ctx.sets)
            of_entropy = None if grad_entropy is None else grad_entropy[chunk]
            turn_into_gradients(
                *(logits, normaliser[chunk], mean[chunk], slope[chunk], of_entropy),
                *(index[chunk], added[chunk], ctx.temperature),
            )
            if grad_rows is not None:
                torch.mm(logits, weight, out=grad_rows[chunk])
            if grad_weight is not None:
                grad_weight.addmm_(logits.T, rows[chunk], beta=int(chunk.start > 0))
            if grad_bias is not None:
                grad_bias += logits.sum(0)
            if grad_low is not None:
                torch.mm(logits, b, out=grad_low[chunk])
            if grad_b is not None and part_low is not None:
                grad_b.addmm_(logits.T, part_low)
            del logits
        return grad_rows, grad_weight, grad_bias, grad_low, grad_b, *[None] * 6


def _restricted(logits: Tensor, rows: slice, first: int, sets: KeptSets | None) -> Tensor:
    """Replace logits `[C, V']` of tokens outside the sets of their rows."""
    if sets is None:
        return logits
    for tile in _slices(len(logits), _rows_per_tile(logits)):
        part = slice(rows.start + tile.start, rows.start + tile.stop)
        logits[tile].masked_fill_(sets.is_left_out(part, first, logits.shape[1]), PADDING_LOGIT)
    return logits


def _slices(num: int, size: int) -> Iterator[slice]:
    """Yield slices of `size` that cover `num` rows."""
    for start in range(0, num, size):
        yield slice(start, min(start + size, num))


def _rows_per_tile(logits: Tensor) -> int:
    return max(LOGITS_PER_TILE // logits.shape[1], 1)


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    """Return an fp32 copy of logits under the temperature."""
    copy = logits.to(torch.float32, copy=True)
    return copy if temperature == 1.0 else copy.div_(temperature)


def fill_statistics(out: Tensor, logits: Tensor, temperature: float, *, with_entropy: bool) -> None:
    """Fill rows m = max l, Z = sum e^(l - m) and sum e^(l - m) (l - m), `[3, C]`, of logits `[C, V']`.

    The last one has a meaning `with_entropy`.
    """
    if has_cuda_api(logits.device.type):
        from hflow.training.loop import logit_kernels

        logit_kernels.fill_statistics(out, logits, temperature)
        return
    for tile in _slices(len(logits), _rows_per_tile(logits)):
        x = _scaled(logits[tile], temperature)
        out[0, tile] = x.amax(-1)
        x.sub_(out[0, tile, None])
        exponentials = x.exp() if with_entropy else x.exp_()
        out[1, tile] = exponentials.sum(-1)
        if with_entropy:
            out[2, tile] = x.mul_(exponentials).sum(-1)


def turn_into_gradients(
    logits: Tensor,
    normaliser: Tensor,
    mean: Tensor,
    slope: Tensor,
    grad_entropy: Tensor | None,
    index: Tensor,
    added: Tensor,
    temperature: float,
) -> None:
    """Overwrite logits `[C, V']` with their gradients.

    Args:
        normaliser: log Z, `[C]`, under the temperature.
        mean: E[l], `[C]`.
        slope: the sum of the gradients of each row's log-probs, `[C]`.
        grad_entropy: `[C]`; None without entropy.
        index: the logits whose log-probs have gradients, `[C, K]`.
        added: these gradients, `[C, K]`, 0 of logits that another rank has.
    """
    if has_cuda_api(logits.device.type):
        from hflow.training.loop import logit_kernels

        logit_kernels.turn_into_gradients(
            logits, normaliser, mean, slope, grad_entropy, index, added, temperature
        )
        return
    for tile in _slices(len(logits), _rows_per_tile(logits)):
        x = _scaled(logits[tile], temperature)
        if grad_entropy is None:
            x.sub_(normaliser[tile, None]).exp_().mul_(-slope[tile, None])
        else:
            probabilities = (x - normaliser[tile, None]).exp_()
            x.sub_(mean[tile, None]).mul_(-grad_entropy[tile, None]).sub_(slope[tile, None])
            x.mul_(probabilities)
        x.scatter_add_(-1, index[tile], added[tile])
        logits[tile] = x if temperature == 1.0 else x.div_(temperature)


def _combined(
    statistics: Tensor, picked: Tensor, is_local: Tensor, group: ProcessGroup | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return m, Z, E[l - m] and the picked logits less m over all ranks, given those of this one."""
    highest, total, products = statistics
    if not _is_divided(group, picked):
        return highest, total, products / total, picked - highest[:, None]
    own, highest = highest, highest.clone()
    dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
    shift = own - highest
    factor = shift.exp()
    picked = (picked - highest[:, None]) * is_local
    sums = torch.stack([total * factor, (products + shift * total) * factor], dim=-1)
    sums = torch.cat([sums, picked], dim=-1)
    dist.all_reduce(sums, dist.ReduceOp.SUM, group=group)
    return highest, sums[:, 0], sums[:, 1] / sums[:, 0], sums[:, 2:]


def _local_index(ids: Tensor, matrix: OutputMatrix) -> tuple[Tensor, Tensor]:
    """Return the rows of tokens in this rank's matrix, and whether it has them."""
    last = len(matrix.weight) - 1
    index = ids - matrix.first
    return index.clamp(0, last), (index >= 0) & (index <= last)


def _likeliest(ids: Tensor, logits: Tensor, k: int, group: ProcessGroup | None) -> tuple[Tensor, Tensor]:
    """Return the `k` likeliest tokens of each row and their logits, from each rank's candidates."""
    if not _is_divided(group, ids):
        return ids, logits
    logits, ids = _gather_columns(logits, group), _gather_columns(ids, group)
    logits, chosen = logits.topk(k, dim=-1)
    return ids.gather(-1, chosen), logits


def _gather_columns(x: Tensor, group: ProcessGroup) -> Tensor:
    """Concatenate the columns of every rank: `[N, K]` -> `[N, T K]`."""
    parts = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(parts, x, group=group)
    return torch.cat(parts, dim=-1)


def _is_divided(group: ProcessGroup | None, x: Tensor) -> TypeGuard[ProcessGroup]:
    """Return whether other ranks have a part of the results; none have where there are no rows."""
    return group is not None and group.size() > 1 and x.numel() > 0
