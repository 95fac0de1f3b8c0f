"""Sequences of one group begin with the same prompt: which tokens need to be computed once only.

In a causal model equal tokens after equal tokens have equal hidden states. A group of eight answers
of 500 tokens to a prompt of 1,000 is 12,000 tokens, of which 5,000 are different.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hflow.data.batch import Batch

Rows = npt.NDArray[np.int64]

LEAST_SAVED = 0.1
"""Share of the tokens that must be saved for the indirection to pay."""


@dataclass(frozen=True)
class PrefixSharing:
    """T packed tokens in U computed rows."""

    token_of_row: Rows
    """int64 `[U]`: the token that each computed row stands for, ascending."""
    row_of_token: Rows
    """int64 `[T]`: the computed row of each token."""


def share_prefixes(batch: Batch) -> PrefixSharing | None:
    """Find the tokens that several sequences of a group begin with.

    Args:
        batch: has `input_ids`; the members of a group need not be neighbours.

    Returns:
        None where too little would be saved.
    """
    ids = np.asarray(batch.columns["input_ids"].values)
    starts, owner = batch.offsets[:-1], np.arange(batch.num_tokens)
    for rows in _groups(batch.groups):
        leader, *others = (ids[starts[row] : starts[row] + batch.lengths[row]] for row in rows)
        shared = min((_common(leader, other) for other in others), default=0)
        for row in rows[1:]:
            owner[starts[row] : starts[row] + shared] = np.arange(starts[rows[0]], starts[rows[0]] + shared)
    token_of_row = np.flatnonzero(owner == np.arange(len(owner)))
    if len(token_of_row) > (1 - LEAST_SAVED) * len(owner):
        return None
    return PrefixSharing(token_of_row, np.searchsorted(token_of_row, owner))


def _groups(labels: Rows) -> list[Rows]:
    """Rows of each group with more than one."""
    order = np.argsort(labels, kind="stable")
    found = np.split(order, np.flatnonzero(np.diff(labels[order])) + 1)
    return [rows for rows in found if len(rows) > 1]


def _common(one: npt.NDArray[np.generic], other: npt.NDArray[np.generic]) -> int:
    """Number of leading tokens that two sequences have in common."""
    length = min(len(one), len(other))
    different = np.flatnonzero(one[:length] != other[:length])
    return int(different[0]) if len(different) else length
