"""Packs running sequences and entering prompts into the tensors of one forward.

Axes: B decoding sequences, S sequences that draw a token, N tokens stored in the cache.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hflow.data.batches.device_copy import to_device
from hflow.engines.embedded.attention import PackedStep
from hflow.engines.embedded.cache import KVCache, padded_length
from hflow.engines.request import GenerationRequest
from hflow.models.packed_attention import PackedLayout, PaddedLayout
from hflow.types.image import PlacedImage
from hflow.types.kernels import AttentionKernel

Ints = npt.NDArray[np.int64]

_MIN_ROWS = 4
"""Minimum rows of a forward. CPU matrix products of fewer rows sum in another order; filling up keeps a
sequence's result independent of the number of running sequences."""


@dataclass(frozen=True)
class PackedForward:
    """Inputs of one forward, and the positions of its logits."""

    input_ids: Tensor
    """int64 `[rows]`."""
    positions: Tensor
    """int64 `[rows]`."""
    logit_rows: Tensor
    """int64: the rows whose logits are computed (running sequences, then one per prompt), filled up."""
    sequence_logits: Tensor | None
    """int64 `[S]`: index into the logits for each sequence; None if each has its own."""
    step: PackedStep


def pack_step(
    running: Sequence[GenerationRequest],
    groups: Sequence[PromptGroup],
    cache: KVCache,
    dtype: torch.dtype,
    device: torch.device,
    first_free: int,
) -> PackedForward:
    """Pack one step.

    Args:
        running: the sequences that decode, in the order of their numbers; none if they do so elsewhere.
        groups: entering prompts, whose members get the numbers from `first_free` on, in order.
        cache: has room for all of them.
        first_free: the number of running sequences, also of those that decode elsewhere.
    """

    def tensor(values: Ints) -> Tensor:
        return to_device(torch.from_numpy(values), device)

    num_decoding = len(running)
    last_ids, positions = last_tokens(running)
    lengths = [*(len(group.ids) for group in groups), *((positions.max() + 1,) if num_decoding else ())]
    decoding_rows = np.arange(num_decoding)
    prompts = _Prompts(groups, num_decoding, first_free, cache) if groups else None
    step = partial(
        PackedStep,
        cache=cache,
        num_decoding=num_decoding,
        decoding=cache.attention(positions + 1, dtype) if num_decoding else None,
        max_length=padded_length(int(max(lengths))),
    )
    if prompts is None:
        blocks, offsets = map(tensor, cache.locate(decoding_rows, positions))
        return PackedForward(
            input_ids=tensor(_fill_up(last_ids)),
            positions=tensor(_fill_up(positions)),
            logit_rows=tensor(_fill_up(decoding_rows)),
            sequence_logits=None,
            step=step(stored_blocks=blocks, stored_offsets=offsets),
        )
    stored_rows, sequences, stored_positions = prompts.stored(positions)
    blocks, offsets = map(tensor, cache.locate(sequences, stored_positions))
    return PackedForward(
        input_ids=tensor(_fill_up(np.concatenate((last_ids, prompts.ids)))),
        positions=tensor(_fill_up(np.concatenate((positions, prompts.positions)))),
        logit_rows=tensor(_fill_up(np.concatenate((decoding_rows, prompts.last_rows)))),
        sequence_logits=tensor(prompts.sequence_logits()),
        step=step(
            stored_rows=tensor(stored_rows),
            stored_blocks=blocks,
            stored_offsets=offsets,
            num_prompt_rows=len(prompts.ids),
            prompts=_layout(prompts.lengths, dtype, device),
        ),
    )


def last_tokens(running: Sequence[GenerationRequest]) -> tuple[Ints, Ints]:
    """Return the last token of each sequence and its position, `[B]` both."""
    last_ids = np.fromiter((request.ids[-1] for request in running), np.int64, len(running))
    return last_ids, np.fromiter((len(request.ids) - 1 for request in running), np.int64, len(running))


class _Prompts:
    """Rows of the entering prompts: `starts[g]` is the first row of prompt g."""

    def __init__(self, groups: Sequence[PromptGroup], num_decoding: int, first: int, cache: KVCache) -> None:
        self.num_decoding = num_decoding
        self.first = first
        self.skipped = cache.enter([member for group in groups for member in group.members])
        """Tokens of each member that another one stores."""
        self.lengths = np.array([len(group.ids) for group in groups], np.int64)
        self.num_members = np.array([len(group.members) for group in groups], np.int64)
        self.starts = num_decoding + np.cumsum(self.lengths) - self.lengths
        self.ids = np.concatenate([np.zeros(0, np.int64), *(np.array(g.ids, np.int64) for g in groups)])
        self.positions = _ranges(np.zeros_like(self.lengths), self.lengths)
        self.last_rows = self.starts + self.lengths - 1

    def stored(self, decode_positions: Ints) -> tuple[Ints, Ints, Ints]:
        """Return rows, sequences and positions of all tokens to store: a prompt's for each of its members."""
        lengths = np.repeat(self.lengths, self.num_members) - self.skipped
        starts = np.repeat(self.starts, self.num_members) + self.skipped
        members = self.first + np.arange(len(lengths))
        decoding = np.arange(self.num_decoding)
        return (
            np.concatenate((decoding, _ranges(starts, lengths))),
            np.concatenate((decoding, np.repeat(members, lengths))),
            np.concatenate((decode_positions, _ranges(self.skipped, lengths))),
        )

    def sequence_logits(self) -> Ints:
        """Return the logits row of each sequence; members of a group share their prompt's."""
        entering = np.repeat(self.num_decoding + np.arange(len(self.lengths)), self.num_members)
        return np.concatenate((np.arange(self.num_decoding), entering))


def _layout(lengths: Ints, dtype: torch.dtype, device: torch.device) -> PackedLayout:
    """Return the layout of prompts of these lengths.

    On the CPU each is padded to `padded_length` instead of to its longest neighbour, so that its result does
    not depend on the other prompts of the step.
    """
    if device.type != "cpu":
        return PackedLayout.of(lengths, device, dtype)
    widths = np.array([padded_length(int(length)) for length in lengths], np.int64)
    order = np.argsort(widths, kind="stable")
    starts = np.cumsum(lengths) - lengths
    slots = np.cumsum(widths[order]) - widths[order]
    slot_of_token = np.empty(int(lengths.sum()), np.int64)
    slot_of_token[_ranges(starts[order], lengths[order])] = _ranges(slots, lengths[order])
    token_of_slot = np.zeros(int(widths.sum()), np.int64)
    token_of_slot[slot_of_token] = np.arange(len(slot_of_token))
    filled = np.zeros(len(token_of_slot), np.bool_)
    filled[slot_of_token] = True
    shapes = zip(*np.unique(widths, return_counts=True), strict=True)
    longest = int(lengths.max())
    cumulative = torch.from_numpy(np.concatenate(([0], np.cumsum(lengths))).astype(np.int32))
    return PackedLayout(
        kernel=AttentionKernel.SDPA,
        cumulative=(cumulative, cumulative),
        longest=(longest, longest),
        padding=PaddedLayout(
            shapes=tuple((int(count), int(width), int(width)) for width, count in shapes),
            token_of_slot=torch.from_numpy(token_of_slot),
            slot_of_token=torch.from_numpy(slot_of_token),
            filled=torch.from_numpy(filled),
        ),
    )


def _ranges(starts: Ints, lengths: Ints) -> Ints:
    """Return the concatenation of `range(starts[i], starts[i] + lengths[i])`."""
    ends = np.cumsum(lengths)
    ranges: Ints = np.arange(int(lengths.sum())) + np.repeat(starts - (ends - lengths), lengths)
    return ranges


def _fill_up(values: Ints) -> Ints:
    missing = _MIN_ROWS - len(values)
    return values if missing <= 0 else np.concatenate((values, np.zeros(missing, np.int64)))


@dataclass(frozen=True)
class PromptGroup:
    """Requests that continue the same tokens, whose prompt is computed once."""

    ids: tuple[int, ...]
    members: tuple[GenerationRequest, ...]

    @property
    def images(self) -> tuple[PlacedImage, ...]:
        """The images of the prompt."""
        return self.members[0].images


def admit(
    waiting: deque[GenerationRequest], num_free: int, token_budget: int, cache: KVCache
) -> list[PromptGroup]:
    """Take requests from the front of `waiting`, in order, and group those with equal prompts.

    Stops after `num_free` requests, at the first one for which the cache has too little room, or whose prompt
    would exceed the budget of distinct prompt tokens. The first prompt is admitted regardless of its length.
    """
    groups: dict[tuple[Any, ...], list[GenerationRequest]] = {}
    num_tokens = 0
    while waiting and num_free:
        ids = waiting[0].ids
        prompt = (*ids, *(image.digest for _, image in waiting[0].images))
        if groups and prompt not in groups and num_tokens + len(ids) > token_budget:
            break
        if not cache.admit(waiting[0]):
            break
        if prompt not in groups:
            num_tokens += len(ids)
            groups[prompt] = []
        groups[prompt].append(waiting.popleft())
        num_free -= 1
    return [PromptGroup(tuple(members[0].ids), tuple(members)) for members in groups.values()]
