"""Context parallelism: the ranks of a data index divide the rows of each micro-batch.

All layers but attention treat rows alone, so they compute a rank's own rows. In attention a rank has the
queries of its rows, and gathers the keys and values of all ranks (Grattafiori et al. 2024, "The Llama 3 herd
of models", section 3.3.2). With grouped queries they are small beside the queries.

A later row of a sequence attends to more keys. The rows are therefore cut into 2 C chunks, of which rank c
has the chunks c and 2 C - 1 - c. So all ranks do about the same work, most evenly for one long sequence.

Bodies see whole sequences: each rank computes the outputs of its own rows, and the ranks exchange these few
numbers per token. A loss is computed by all of them alike; the gradients of their rows are summed with those
of the data ranks.

Axes: C context ranks, T packed tokens, U computed rows (T without repeated prompt prefixes), R rows of a
rank, Q of them that are not padding, K keys of all segments, N learned tokens, M of them that a rank's rows
predict, H heads, E head size.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.attention.bias import causal_lower_right

from hflow.data.batches.batch import Batch
from hflow.data.batches.batch_arguments import to_tensor
from hflow.data.batches.shared_prefix import PrefixSharing
from hflow.models.attention_kernels import CAUSAL, Reach, reaching_attention, varlen_attention
from hflow.training.loop.inputs import target_positions
from hflow.training.loop.output import Logits
from hflow.types.kernels import AttentionKernel

Rows = npt.NDArray[np.int64]


@dataclass(frozen=True)
class RowDivision:
    """The rows of a micro-batch that a context rank computes, and the keys that they attend to."""

    group: ProcessGroup
    """The context ranks."""
    num_rows: int
    """U."""
    rows: Tensor
    """int64 `[R]`: this rank's rows, as indices below U. The last R - Q are padding and repeat row 0."""
    segments: tuple[tuple[int, int], ...]
    """(queries, keys) of each run of neighbouring tokens of one sequence. The last query attends to all keys
    of its segment, the one before it to all but the last, and so on."""
    cumulative: tuple[Tensor, Tensor]
    """int32 `[segments + 1]` both: where the queries, and where the keys of each segment begin."""
    keys: Tensor
    """int64 `[K]`: each segment's keys, as positions in the rows `[C R]` of all ranks."""
    learned: Tensor
    """int64 `[M]`: which of the N learned tokens are predicted by this rank's rows."""
    learned_here: Rows
    """`learned`, on the host."""
    learned_rows: Tensor
    """int64 `[M]`: the row, below R, that predicts each of them."""

    @cached_property
    def num_queries(self) -> int:
        """Q."""
        return sum(queries for queries, _ in self.segments)

    @cached_property
    def longest(self) -> tuple[int, int]:
        """Most queries, and most keys of a segment."""
        queries, keys = zip(*self.segments, strict=True)
        return max(queries), max(keys)

    def gather(self, x: Tensor) -> Tensor:
        """Return the rows of all ranks, `[R, ...]` -> `[C R, ...]`. Gradients are summed over the ranks."""
        gathered: Tensor = gather_from_sequence_parallel_region(x, group=self.group)
        return gathered

    def whole(self, x: Tensor, index: Tensor, size: int) -> Tensor:
        """Return the tensors `[n, ...]` of all ranks in one, `[size, ...]`, on every rank.

        The gradient of an entry, which is the same on all ranks, goes to the rank that has it. `index`, int64
        `[n]`, has the place of each of this rank's entries; the places differ on all ranks.
        """
        placed = x.new_zeros(size, *x.shape[1:]).index_copy(0, index, x)
        summed: Tensor = reduce_from_tensor_model_parallel_region(placed, group=self.group)
        return summed


def divide_rows(
    batch: Batch,
    sharing: PrefixSharing | None,
    group: ProcessGroup,
    multiple: int,
    device: torch.device,
    with_outputs: bool,
) -> RowDivision:
    """Divide the computed rows of a micro-batch over the context ranks.

    Args:
        batch: gives the lengths, and for `with_outputs` the learned and observed tokens.
        sharing: which of its tokens are computed once; None: every token is computed.
        multiple: R is a multiple of it.
        with_outputs: whether outputs are computed, which is on the last stage.
    """
    token_of_row = np.arange(batch.num_tokens) if sharing is None else sharing.token_of_row
    row_of_token = token_of_row if sharing is None else sharing.row_of_token
    chunks = _chunks(len(token_of_row), group.size(), multiple)
    rows = chunks[group.rank()]
    queries = rows[rows < len(token_of_row)]
    place_of_row = np.empty(chunks.size, dtype=np.int64)
    place_of_row[chunks.ravel()] = np.arange(chunks.size)
    spans = _segments(token_of_row[queries], batch)
    keys = [place_of_row[row_of_token[start:stop]] for _, start, stop in spans]
    segments = tuple((num, stop - start) for num, start, stop in spans)
    learned = np.empty(0, dtype=np.int64)
    predictors = learned
    if with_outputs:
        targets = target_positions(batch)
        places = place_of_row[row_of_token[targets - 1]] - group.rank() * len(rows)
        learned = np.flatnonzero((places >= 0) & (places < len(rows)))
        predictors = places[learned]
    return RowDivision(
        group=group,
        num_rows=len(token_of_row),
        rows=to_tensor(np.where(rows < len(token_of_row), rows, 0), device),
        segments=segments,
        cumulative=(
            _cumulative([q for q, _ in segments], device),
            _cumulative([k for _, k in segments], device),
        ),
        keys=to_tensor(np.concatenate(keys) if keys else np.empty(0, dtype=np.int64), device),
        learned=to_tensor(learned, device),
        learned_here=learned,
        learned_rows=to_tensor(predictors, device),
    )


def attend_to_all(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    division: RowDivision,
    kernel: AttentionKernel,
    scaling: float | None,
    reach: Reach = CAUSAL,
) -> Tensor:
    """Compute causal attention of this rank's queries to the keys of all ranks: `[R, H, E]` -> `[R, H, E]`.

    k and v, of this rank's rows, have H heads or a divisor of H; results have the size of values. Padding
    rows get zeros. The kernel is that of the micro-batch's `PackedLayout`.
    """
    width = k.shape[-1]
    keys_and_values = division.gather(torch.cat((k, v), dim=-1)).index_select(0, division.keys)
    zeros = q.new_zeros(*q.shape[:2], v.shape[-1])
    if not division.segments:
        # Only padding. Sums of nothing are 0, and have queries and the gather join the backward pass.
        nothing = q[:0].sum() + keys_and_values.sum()
        return zeros + (nothing if reach.sinks is None else nothing + reach.sinks[:0].sum())
    keys, values = keys_and_values[..., :width], keys_and_values[..., width:]
    queries, padding = q[: division.num_queries], zeros[division.num_queries :]
    if kernel is AttentionKernel.SDPA:
        attended = _one_by_one(queries, keys, values, division, scaling, reach)
    else:
        attended = varlen_attention(
            *(kernel, queries, keys, values, division.cumulative, division.longest, scaling, reach)
        )
    return torch.cat((attended, padding))


@dataclass(frozen=True)
class DividedLogits:
    """`loop.output.Logits` of all learned tokens, each computed by the rank that has its row."""

    local: Logits
    """The logits of this rank's M tokens."""
    division: RowDivision
    num_learned: int
    """N."""

    def measure(self, names: Sequence[str], ids: Tensor) -> Sequence[Tensor]:
        """Compute some of `logprobs` and `entropy`, in one pass."""
        return [self._whole(x) for x in self.local.measure(names, ids[self.division.learned])]

    def topk(self, k: int) -> tuple[Tensor, Tensor]:
        """Return the `k` likeliest tokens and their log-probs."""
        ids, logprobs = self.local.topk(k)
        return self._whole(ids), self._whole(logprobs)

    def logprobs_of(self, ids: Tensor) -> Tensor:
        """Return the log-probs of given tokens."""
        return self._whole(self.local.logprobs_of(ids[self.division.learned]))

    def _whole(self, x: Tensor) -> Tensor:
        return self.division.whole(x, self.division.learned, self.num_learned)


def _chunks(num_rows: int, num_ranks: int, multiple: int) -> Rows:
    """Return each rank's rows, `[C, R]`. Numbers from `num_rows` on are padding, and come last on a rank."""
    size = -(-num_rows // (2 * num_ranks * multiple)) * multiple
    chunks = np.arange(2 * num_ranks * size).reshape(2 * num_ranks, size)
    return np.concatenate((chunks[:num_ranks], chunks[: num_ranks - 1 : -1]), axis=1)


def _segments(tokens: Rows, batch: Batch) -> list[tuple[int, int, int]]:
    """Return the runs of neighbouring tokens of one sequence: number of tokens, first and last key + 1."""
    if not len(tokens):
        return []
    sequence = np.searchsorted(batch.offsets, tokens, side="right") - 1
    ends = np.flatnonzero((np.diff(tokens) != 1) | (np.diff(sequence) != 0)) + 1
    bounds = [0, *ends.tolist(), len(tokens)]
    return [
        (stop - start, int(batch.offsets[sequence[start]]), int(tokens[stop - 1]) + 1)
        for start, stop in itertools.pairwise(bounds)
    ]


def _cumulative(sizes: Sequence[int], device: torch.device) -> Tensor:
    return to_tensor(np.concatenate(([0], np.cumsum(sizes))).astype(np.int32), device)


def _one_by_one(
    q: Tensor, k: Tensor, v: Tensor, division: RowDivision, scaling: float | None, reach: Reach
) -> Tensor:
    """Compute each segment as a sequence of its own, whose last query attends to its last key."""
    queries, keys = zip(*division.segments, strict=True)
    parts = []
    for segment in zip(q.split(queries), k.split(keys), v.split(keys), strict=True):
        query, key, value = (x.transpose(0, 1)[None] for x in segment)
        mask = causal_lower_right(query.shape[2], key.shape[2])
        parts.append(reaching_attention(query, key, value, scaling, reach, mask)[0].transpose(0, 1))
    return torch.cat(parts)
