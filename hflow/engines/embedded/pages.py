"""`PagedCache`: the KV cache on an accelerator, in pages of a few tokens.

A sequence has as many pages as its tokens need: it gets one when it outgrows them, and all are free when it
leaves. The full pages of a prompt are shared by the sequences that begin with it, such as the samples of a
group, as nothing is written to a full page any more. A table on the device has a row of pages for each
sequence. Table and pages stay where they are, so a captured step that reads them remains valid.

If no page is left, the sequences that entered last leave, and their owner lets them enter again later.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from hflow.data.batches.device_copy import to_device
from hflow.engines.embedded.cache import CachedAttention, Ints, KVCache, padded_length
from hflow.engines.request import GenerationRequest
from hflow.models.attention_kernels import CAUSAL, Reach, decode_attention

PAGE_TOKENS = 16
"""Tokens of a page. A sequence wastes half a page on average, and the keys of a head in a page are one piece
of some KiB, which memory delivers at its full rate."""


class PagedCache(KVCache):
    """A cache whose blocks are pages. Sequences are numbered in the order in which they entered.

    Page 0 belongs to no sequence: rows that only fill up a step store their tokens there.

    Attributes:
        num_drops: how often its memory was freed, after which it has other addresses.
    """

    def __init__(self, num_pages: int, max_sequences: int, max_length: int, device: torch.device) -> None:
        """Allocate the table. Pages are allocated when they are first written.

        `num_pages` counts page 0, and is enough for a sequence of `max_length` tokens.
        """
        super().__init__()
        self.num_drops = 0
        self._num_pages = num_pages
        shape = max_sequences, -(-max_length // PAGE_TOKENS)
        self._rows = np.zeros(shape, np.int32)
        """Sequence -> its pages, and page 0 behind them."""
        self._table = torch.zeros(shape, dtype=torch.int32, device=device)
        """The same on the device, once it was sent."""
        self._is_sent = True
        self._counts = np.zeros(max_sequences, np.int64)
        """Sequence -> number of its pages."""
        self._num_running = 0
        self._free = list(range(num_pages - 1, 0, -1))
        self._num_owners = np.zeros(num_pages, np.int64)
        """Page -> sequences that have it."""
        self._page_of: dict[Hashable, int] = {}
        """(the page before it, its tokens) -> a full page that sequences entered with."""
        self._key_of: dict[int, Hashable] = {}
        """The keys of such pages."""
        self._entering: dict[GenerationRequest, tuple[list[int], int]] = {}
        """Admitted sequence -> its pages, and how many of them another one stores."""

    @property
    def table(self) -> Tensor:
        """int32 `[max_sequences, pages]`: the pages of running sequences; other rows begin with page 0."""
        if not self._is_sent:
            width = max(1, int(self._counts.max()))  # host: numpy
            rows = to_device(torch.from_numpy(self._rows[:, :width]), self._table.device)
            self._table[:, :width].copy_(rows)
            self._is_sent = True
        return self._table

    @override
    def drop(self) -> None:
        super().drop()
        self.num_drops += 1

    @override
    def admit(self, request: GenerationRequest) -> bool:
        """Keep pages for a sequence if enough are free, and one more for each sequence that then runs.

        So none of these has to leave within the next steps. A sequence that runs alone always has enough.
        """
        chunks = [
            tuple(request.ids[end - PAGE_TOKENS : end])
            for end in range(PAGE_TOKENS, len(request.ids) + 1, PAGE_TOKENS)
        ]
        pages: list[int] = []
        before: Hashable = tuple(image.digest for _, image in request.images)
        for chunk in chunks:
            page = self._page_of.get((before, chunk))
            if page is None:
                break
            pages.append(page)
            before = page
        num_shared, num_others = len(pages), self._num_running + len(self._entering)
        num_new = -(-len(request.ids) // PAGE_TOKENS) - num_shared
        if num_others and num_new + num_others + 1 > len(self._free):
            return False
        pages += [self._free.pop() for _ in range(num_new)]
        self._num_owners[pages] += 1
        for page, chunk in zip(pages[num_shared:], chunks[num_shared:], strict=False):
            self._key_of[page] = before, chunk
            self._page_of[before, chunk] = page
            before = page
        self._entering[request] = pages, num_shared
        return True

    @override
    def enter(self, members: Sequence[GenerationRequest]) -> Ints:
        shared = np.zeros(len(members), np.int64)
        for i, member in enumerate(members):
            pages, shared[i] = self._entering.pop(member)
            self._rows[self._num_running, : len(pages)] = pages
            self._counts[self._num_running] = len(pages)
            self._num_running += 1
        self._is_sent = False
        return shared * PAGE_TOKENS

    @override
    def grow(self, lengths: Ints) -> int:
        num = len(lengths)
        growing = np.flatnonzero(lengths > self._counts[:num] * PAGE_TOKENS)
        while len(growing) > len(self._free):
            num -= 1
            self.leave(num)
            growing = growing[growing < num]
        if len(growing):
            pages = [self._free.pop() for _ in growing]
            self._rows[growing, self._counts[growing]] = pages
            self._counts[growing] += 1
            self._num_owners[pages] = 1
            self._is_sent = False
        return num

    @override
    def arrange(self, kept: Ints, lengths: Ints) -> Ints:
        num = self._num_running
        gone = np.delete(np.arange(num), kept)
        if not len(gone):
            return kept
        pages = np.concatenate([self._rows[i, : self._counts[i]] for i in gone])
        np.subtract.at(self._num_owners, pages, 1)
        for page in np.unique(pages[self._num_owners[pages] == 0]).tolist():
            self._free.append(page)
            if page in self._key_of:
                del self._page_of[self._key_of.pop(page)]
        for rows in (self._rows, self._counts):
            rows[: len(kept)] = rows[kept]
            rows[len(kept) : num] = 0
        self._num_running = len(kept)
        self._is_sent = False
        return kept

    @override
    def leave(self, first: int) -> None:
        kept = np.arange(first)
        self.arrange(kept, kept)

    @override
    def locate(self, sequences: Ints, positions: Ints) -> tuple[Ints, Ints]:
        pages = self._rows[sequences, positions // PAGE_TOKENS]
        return pages.astype(np.int64), positions % PAGE_TOKENS

    @override
    def attention(self, lengths: Ints, dtype: torch.dtype) -> CachedAttention:
        width = padded_length(int(lengths.max())) // PAGE_TOKENS
        on_device = to_device(torch.from_numpy(lengths.astype(np.int32)), self._table.device)
        return PageAttention(self.table[: len(lengths), :width], on_device)

    @override
    def _allocate(self, like: Tensor) -> Tensor:
        _, kv_heads, head_dim = like.shape
        return like.new_zeros(self._num_pages, kv_heads, PAGE_TOKENS, head_dim)


@dataclass(frozen=True)
class PageAttention:
    """Attention over the pages of a table."""

    table: Tensor
    """int32 `[B, pages]`."""
    lengths: Tensor
    """int32 `[B]`: the tokens of each sequence, the one of this step included."""

    def attend(
        self, queries: Tensor, keys: Tensor, values: Tensor, scale: float, reach: Reach = CAUSAL
    ) -> Tensor:
        """Compute attention; see `CachedAttention`."""
        return decode_attention(queries, keys, values, self.table, self.lengths, scale, reach)
