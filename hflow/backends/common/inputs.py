"""A micro-batch on the device: token ids, where sequences lie, and what is learned."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hflow.backends.packed_attention import PackedLayout, SharedRows
from hflow.data.batch import Batch, Column
from hflow.data.batch_arguments import column, sequences_of, to_tensor
from hflow.data.shared_prefix import share_prefixes
from hflow.types import Sequences, Unit

LEARNED = "is_learned"
"""Column that `prepare` adds: which sequences count in means over sequences."""


@dataclass(frozen=True)
class PackedTokens:
    """T tokens of S sequences as the layers of a model see them."""

    input_ids: Tensor
    """int64 `[T]`."""
    computed_ids: Tensor
    """int64 `[U]`: `input_ids` of the rows that are computed; U is T where no prefix is shared."""
    position_ids: Tensor
    """int64 `[U]`, from 0 in each sequence."""
    layout: PackedLayout

    def computed(self, positions: Tensor) -> Tensor:
        """The computed rows, out of U, of tokens at these positions, out of T."""
        shared = self.layout.shared
        return positions if shared is None else shared.row_of_token[positions]

    def widen(self, x: Tensor) -> Tensor:
        """`[U, ...]` -> `[T, ...]`."""
        shared = self.layout.shared
        return x if shared is None else x.index_select(0, shared.row_of_token)


@dataclass(frozen=True)
class PackedBatch(PackedTokens):
    """S sequences of T tokens as one forward and its body see them, N of the tokens being learned."""

    batch: Batch
    seqs: Sequences
    targets: Tensor
    """int64 `[N]`, positions of the learned tokens; each is predicted from the one before."""
    last: Tensor
    """int64 `[S]`, position of each sequence's last token."""
    valid: dict[Unit, Tensor]
    """Which entries of each unit count: bool `[T]`, `[S]`, `[P]`."""
    counts: dict[Unit, int]
    """How many do."""


def prepare(batch: Batch, head: str, mask_field: str | None = None) -> Batch:
    """Settle what is learned: `loss_mask` without first tokens and without what the mask excludes.

    Nothing predicts the first token of a sequence, so it is never learned. A sequence counts when
    any of its tokens is learned; for a `score` head, unless the mask excludes it.
    """
    mask = np.array(column(batch, "loss_mask").values, dtype=bool)
    mask[batch.offsets[:-1]] = False
    kept = np.ones(len(batch), dtype=bool)
    if mask_field is not None:
        extra = column(batch, mask_field)
        wide = np.asarray(extra.values, dtype=bool)
        mask &= wide if extra.unit is Unit.TOKEN else np.repeat(wide, batch.lengths)
        kept = _any_by_sequence(wide, batch) if extra.unit is Unit.TOKEN else wide
    learned = kept if head == "score" else _any_by_sequence(mask, batch)
    return batch.with_columns(
        {"loss_mask": Column(Unit.TOKEN, mask), LEARNED: Column(Unit.SEQUENCE, learned)}
    )


def count_entries(batch: Batch) -> dict[Unit, int]:
    """How many tokens, sequences and groups of a prepared batch count."""
    learned = np.asarray(batch.columns[LEARNED].values)
    return {
        Unit.TOKEN: int(np.count_nonzero(batch.columns["loss_mask"].values)),
        Unit.SEQUENCE: int(learned.sum()),
        Unit.GROUP: len(np.unique(batch.groups[learned])),
    }


def tokens_of(batch: Batch, device: torch.device, dtype: torch.dtype) -> PackedTokens:
    """Lay out a batch on the device, with all index tables made on the host.

    Args:
        batch: has `input_ids`.
        device: where the model is.
        dtype: what the model computes in.
    """
    positions = np.arange(batch.num_tokens) - np.repeat(batch.offsets[:-1], batch.lengths)
    shared = _shared_rows(batch, device)
    input_ids = to_tensor(column(batch, "input_ids").values, device)
    position_ids = to_tensor(positions, device)
    return PackedTokens(
        input_ids=input_ids,
        computed_ids=input_ids if shared is None else input_ids[shared.token_of_row],
        position_ids=position_ids if shared is None else position_ids[shared.token_of_row],
        layout=PackedLayout.of(batch.lengths, device, dtype, shared),
    )


def to_device(batch: Batch, device: torch.device, dtype: torch.dtype) -> PackedBatch:
    """Move a prepared batch to the device; as `tokens_of`, for the rank that runs the body."""
    seqs = sequences_of(batch, device)
    learned = to_tensor(batch.columns[LEARNED].values, device)
    return PackedBatch(
        **vars(tokens_of(batch, device, dtype)),
        batch=batch,
        seqs=seqs,
        targets=to_tensor(np.flatnonzero(batch.columns["loss_mask"].values), device),
        last=to_tensor(batch.offsets[1:] - 1, device),
        valid={
            Unit.TOKEN: seqs.loss_mask,
            Unit.SEQUENCE: learned,
            Unit.GROUP: seqs.group_sum(learned.long()) > 0,
        },
        counts=count_entries(batch),
    )


def empty_shard() -> Batch:
    """One token of which nothing is learned: what a rank computes while it has nothing to compute."""
    one = np.ones(1, dtype=np.int64)
    columns = {
        "input_ids": Column(Unit.TOKEN, np.zeros(1, dtype=np.int64)),
        "loss_mask": Column(Unit.TOKEN, np.zeros(1, dtype=bool)),
    }
    return prepare(Batch(-one, -one, one, columns), head="lm")


def _shared_rows(batch: Batch, device: torch.device) -> SharedRows | None:
    sharing = share_prefixes(batch)
    if sharing is None:
        return None
    return SharedRows(to_tensor(sharing.token_of_row, device), to_tensor(sharing.row_of_token, device))


def _any_by_sequence(mask: npt.NDArray[np.bool_], batch: Batch) -> npt.NDArray[np.bool_]:
    """Whether any token of each sequence is true; sequences have at least one token."""
    if len(batch) == 0:
        return np.zeros(0, dtype=bool)
    return np.logical_or.reduceat(mask, batch.offsets[:-1])
