"""Finds prompt prefixes that the sequences of a group share, so that their tokens are computed only once.

In a causal model, equal tokens after equal tokens have equal hidden states. Eight answers of 500 tokens to a
prompt of 1,000 tokens are 12,000 tokens, of which 5,000 are distinct.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hflow.data.batches.batch import Batch

Rows = npt.NDArray[np.int64]


@dataclass(frozen=True)
class PrefixSharing:
    """A mapping of T packed tokens to U computed rows."""

    token_of_row: Rows
    """int64 `[U]`: the token that is computed in each row, ascending."""
    row_of_token: Rows
    """int64 `[T]`: the row that has each token's result."""

    @classmethod
    def of_owners(cls, owner: Rows) -> PrefixSharing:
        """Return the mapping in which each token has the result of its owner, an equal token or itself.

        `owner` is int64 `[T]`; an owner is its own owner.
        """
        token_of_row = np.flatnonzero(owner == np.arange(len(owner)))
        return cls(token_of_row, np.searchsorted(token_of_row, owner))


def share_prefixes(batch: Batch, names: Sequence[str] = ("input_ids",)) -> PrefixSharing | None:
    """Find the tokens with which all sequences of a group begin; None if no group shares any.

    The hidden states of a token depend on the columns `names`. The members of a group need not be neighbours.
    """
    starts, owner, shared = batch.offsets[:-1], np.arange(batch.num_tokens), shared_tokens(batch, names)
    for rows in _groups(batch.groups):
        first, num = starts[rows[0]], shared[rows[0]]
        for row in rows[1:]:
            owner[starts[row] : starts[row] + num] = np.arange(first, first + num)
    sharing = PrefixSharing.of_owners(owner)
    return sharing if len(sharing.token_of_row) < len(owner) else None


def shared_tokens(batch: Batch, names: Sequence[str] = ("input_ids",)) -> Rows:
    """Return int64 `[S]`: the number of tokens with which all sequences of a row's group begin.

    It is 0 for a sequence without others in its group. The arguments are those of `share_prefixes`.
    """
    columns = [np.asarray(batch.columns[name].values) for name in names]
    starts, shared = batch.offsets[:-1], np.zeros(len(batch), dtype=np.int64)
    for rows in _groups(batch.groups):
        shared[rows] = min(
            _common_prefix(
                values[starts[rows[0]] :][: batch.lengths[rows[0]]], values[starts[row] :][:length]
            )
            for row, length in zip(rows[1:], batch.lengths[rows[1:]], strict=True)
            for values in columns
        )
    return shared


def _groups(labels: Rows) -> list[Rows]:
    """Return the rows of each group that has more than one."""
    order = np.argsort(labels, kind="stable")
    groups = np.split(order, np.flatnonzero(np.diff(labels[order])) + 1)
    return [rows for rows in groups if len(rows) > 1]


def _common_prefix(one: npt.NDArray[np.generic], other: npt.NDArray[np.generic]) -> int:
    """Return the number of leading tokens that two sequences have in common."""
    length = min(len(one), len(other))
    differs = one[:length] != other[:length]
    different = np.flatnonzero(differs.any(axis=tuple(range(1, differs.ndim))))
    return int(different[0]) if len(different) else length
