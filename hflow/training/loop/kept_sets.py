"""`KeptSets`: the tokens from which each learned token was drawn, to which its log-probs are restricted.

Axes: N learned tokens, M tokens of all sets, C rows of a chunk, V' logits of a row on this rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hflow.base.errors import RunError
from hflow.data.batches.batch import Batch
from hflow.data.batches.batch_arguments import get_column, to_tensor
from hflow.data.batches.device_copy import to_device
from hflow.types.sampling_mask import SAMPLING_MASK, unpack_ids


@dataclass(frozen=True)
class KeptSets:
    """Sets of N tokens. An empty set is that of all tokens."""

    offsets: npt.NDArray[np.int64]
    """`[N + 1]`, on the host: set n is `ids[offsets[n] : offsets[n + 1]]`."""
    sizes: Tensor
    """int64 `[N]`: the tokens of each set."""
    ids: Tensor
    """int32 `[M]`."""

    @classmethod
    def of_batch(cls, batch: Batch, targets: npt.NDArray[np.int64], device: torch.device) -> KeptSets:
        """Return the sets of the tokens at positions `targets`, `[N]`, of a batch with `sampling_mask`.

        Raises:
            RunError: if a token is not in its set.
        """
        sets = [unpack_ids(entry) for entry in np.asarray(get_column(batch, SAMPLING_MASK).values)[targets]]
        drawn = np.asarray(get_column(batch, "input_ids").values)[targets]
        for token, kept in zip(drawn, sets, strict=True):
            if len(kept) and not (kept == token).any():  # host: numpy
                raise RunError(
                    f"token {token} of a sample is not among those that its engine could draw, so a body has "
                    "changed the tokens; return the trajectory that the engine returned"
                )
        return cls.of_ids(sets, device)

    @classmethod
    def of_ids(cls, sets: Sequence[npt.NDArray[np.int32]], device: torch.device) -> KeptSets:
        """Return sets of these tokens."""
        sizes = np.fromiter(map(len, sets), np.int64, len(sets))
        ids = np.concatenate([np.empty(0, np.int32), *sets])
        offsets = np.concatenate(([0], np.cumsum(sizes)))
        return cls(offsets, to_tensor(sizes, device), to_device(torch.from_numpy(ids), device))

    def take(self, rows: npt.NDArray[np.int64]) -> KeptSets:
        """Return the sets of some tokens, in this order."""
        sizes, device = np.diff(self.offsets)[rows], self.ids.device
        offsets = np.concatenate(([0], np.cumsum(sizes)))
        index = np.arange(offsets[-1]) + np.repeat(self.offsets[rows] - offsets[:-1], sizes)
        ids = self.ids.index_select(0, to_tensor(index, device))
        return KeptSets(offsets, to_tensor(sizes, device), ids)

    def is_left_out(self, rows: slice, first: int, width: int) -> Tensor:
        """Return the logits outside the sets of C tokens, `rows`: bool `[C, width]`, from token `first`."""
        sizes, start, stop = self.sizes[rows], int(self.offsets[rows.start]), int(self.offsets[rows.stop])
        row = torch.arange(len(sizes), device=sizes.device).repeat_interleave(sizes, output_size=stop - start)
        column = self.ids[start:stop].long() - first
        is_here = (column >= 0) & (column < width)
        # The last column takes the tokens of other ranks.
        is_out = (sizes > 0)[:, None].repeat(1, width + 1)
        is_out.index_put_((row, column.where(is_here, width)), is_out.new_zeros(()))
        return is_out[:, :width]
