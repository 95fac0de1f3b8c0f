"""`Sequences`: the layout of a packed batch, with sums over sequences and groups."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

GROUP_FUNCTIONS = ("group_sum", "group_count", "members", "group_sizes")
"""The members of `Sequences` for which all sequences of a group must be in the batch."""


class Sequences:
    """The layout of S sequences in P groups, packed into T tokens.

    Learned tokens are those that the policy generated, or that a written example teaches. A sequence is a
    sample; for train and infer bodies it is a trajectory, of which a sample may have several.

    Attributes:
        offsets: int64 `[S + 1]`, sequence s is tokens `offsets[s]:offsets[s + 1]`.
        loss_mask: bool `[T]`, True for learned tokens.
        group: int64 `[S]`, the group of each sequence, counted from 0 in this batch.
        index: int64 `[T]`, the sequence of each token.
    """

    def __init__(
        self, offsets: Tensor, loss_mask: Tensor, group: Tensor, group_sizes: tuple[int, ...]
    ) -> None:
        import torch

        self.offsets = offsets
        self.loss_mask = loss_mask
        self.group = group
        self._group_sizes = group_sizes
        self._has_whole_groups = True
        lengths = offsets.diff()
        self.index = torch.repeat_interleave(
            torch.arange(len(lengths), device=offsets.device), lengths, output_size=len(loss_mask)
        )

    @classmethod
    def of(
        cls,
        lengths: Sequence[int],
        loss_mask: Sequence[bool] | None = None,
        group: Sequence[int] | None = None,
    ) -> Sequences:
        """Build a layout from plain lists, for tests: `Sequences.of([3, 5])`.

        Args:
            lengths: number of tokens of each sequence.
            loss_mask: True for learned tokens. Default: all.
            group: index of each sequence's group. Default: every sequence is a group of its own.
        """
        import torch

        offsets = torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0)
        mask = [True] * sum(lengths) if loss_mask is None else loss_mask
        groups = list(range(len(lengths))) if group is None else list(group)
        return cls(
            offsets,
            torch.tensor(mask, dtype=torch.bool),
            torch.tensor(groups, dtype=torch.int64),
            tuple(groups.count(g) for g in range(max(groups, default=-1) + 1)),
        )

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def num_groups(self) -> int:
        """Number of groups, P."""
        return len(self._group_sizes)

    @property
    def group_sizes(self) -> tuple[int, ...]:
        """Number of sequences of each group, in host memory, so that `members` need not wait for a device."""
        self._check_groups("group_sizes")
        return self._group_sizes

    def without_groups(self) -> Sequences:
        """Return the layout of a micro-batch that may have parts of groups: `GROUP_FUNCTIONS` raise."""
        parts = copy.copy(self)
        parts._has_whole_groups = False
        return parts

    @property
    def lengths(self) -> Tensor:
        """Number of tokens of each sequence, prompt included, int64 `[S]`."""
        return self.offsets.diff()

    def sum(self, x: Tensor) -> Tensor:
        """Sum a PerToken over the learned tokens of each sequence: `[T]` -> `[S]`.

        As of `torch.sum`, the sum of booleans and integers is int64, and bf16 is added up in fp32.
        """
        return _sums(x.masked_fill(~self.loss_mask, 0), self.index, len(self)).to(_sum_dtype(x))

    def count(self) -> Tensor:
        """Return the number of learned tokens of each sequence, int64 `[S]`."""
        ones = self.loss_mask.long()
        return ones.new_zeros(len(self)).index_add(0, self.index, ones)

    def mean(self, x: Tensor) -> Tensor:
        """Average a PerToken over the learned tokens of each sequence: `[T]` -> `[S]`; 0 if it has none."""
        sums = _sums(x.masked_fill(~self.loss_mask, 0), self.index, len(self))
        means = sums / self.count().clamp(min=1)
        return means.to(x.dtype) if x.is_floating_point() else means

    def widen(self, x: Tensor) -> Tensor:
        """Repeat a PerSequence for each of its tokens: `[S]` -> `[T]`, 0 where `loss_mask` is 0."""
        return x[self.index].masked_fill(~self.loss_mask, 0)

    def at_end(self, x: Tensor) -> Tensor:
        """Put a PerSequence on the last learned token of each sequence: `[S]` -> `[T]`, 0 elsewhere."""
        import torch

        positions = torch.arange(len(self.index), device=self.index.device)
        positions = positions.masked_fill(~self.loss_mask, -1)
        last = positions.new_full((len(self),), -1)
        last = last.scatter_reduce(0, self.index, positions, "amax")
        # What belongs to sequences without learned tokens goes to an entry after the last token.
        size = len(self.index)
        out = x.new_zeros(size + 1)
        return out.index_put((last.masked_fill(last < 0, size),), x)[:size]

    def members(self, x: Tensor) -> tuple[Tensor, ...]:
        """Split a PerSequence `[S]` into one PerGroup `[P]` per member, as in `chosen, rejected = ...`.

        Raises:
            ValueError: if the groups differ in size.
        """
        import torch

        self._check_groups("members")
        if len(set(self.group_sizes)) > 1:
            raise ValueError(
                f"members() needs groups of the same size, but their sizes are {list(self.group_sizes)}"
            )
        size = len(self) // max(self.num_groups, 1)
        order = torch.argsort(self.group, stable=True)
        return x[order].view(self.num_groups, size).unbind(1)

    def group_sum(self, x: Tensor) -> Tensor:
        """Sum a PerSequence over the members of each group: `[S]` -> `[P]`, with the dtypes of `sum`."""
        self._check_groups("group_sum")
        return _sums(x, self.group, self.num_groups).to(_sum_dtype(x))

    def group_count(self) -> Tensor:
        """Return the number of members of each group, int64 `[P]`."""
        self._check_groups("group_count")
        ones = self.group.new_ones(len(self))
        return ones.new_zeros(self.num_groups).index_add(0, self.group, ones)

    def _check_groups(self, name: str) -> None:
        if not self._has_whole_groups:
            raise ValueError(
                f"seqs.{name} needs whole groups, but a micro-batch may have a part of one. Add the "
                "parameter 'group: PerSequence' to the body, which keeps groups whole"
            )


def _sums(x: Tensor, segment: Tensor, num_segments: int) -> Tensor:
    """Sum the entries of each segment, in int64 or at least fp32."""
    import torch

    is_small = x.is_floating_point() and x.itemsize < torch.float32.itemsize
    wide = x.float() if is_small else x.to(_sum_dtype(x))
    return wide.new_zeros(num_segments).index_add(0, segment, wide)


def _sum_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of a sum: int64 for booleans and integers, else that of the entries."""
    import torch

    return x.dtype if x.is_floating_point() else torch.int64


class SeparateSequences(Sequences):
    """`Sequences` for a body that combines the tokens of each sequence, but no sequences with each other.

    As an annotation it lets the samples of a group be on different ranks.
    """
