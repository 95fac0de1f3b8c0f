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
from hflow.engines.embedded.cache import KVCache, LengthBand, length_bands, padded_length
from hflow.engines.request import GenerationRequest
from hflow.models.attention_kernels import additive_mask
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
    first_free_slot: int,
) -> PackedForward:
    """Pack one step.

    Args:
        running: the sequences that decode, in slot order; none if they do so elsewhere.
        groups: entering prompts; their members take the free slots, in order.
        cache: gets room for all of them.
        dtype: the model's dtype.
        device: the model's device.
        first_free_slot: the slot after those of all running sequences.
    """
    num_decoding = len(running)
    last_ids, positions = last_tokens(running)
    cached_length = padded_length(int(positions.max()) + 1) if num_decoding else 0  # host: numpy
    max_length = max(cached_length, max((len(group.ids) for group in groups), default=0))
    cache.reserve(first_free_slot + sum(len(group.members) for group in groups), max_length)

    def tensor(values: Ints) -> Tensor:
        return to_device(torch.from_numpy(values), device)

    bands: tuple[LengthBand, ...] = ()
    decode_mask = decode_lengths = None
    if num_decoding and device.type == "cpu":
        bands = tuple(length_bands(positions + 1))
        decode_mask = additive_mask(tensor(positions), cached_length, dtype)
    elif num_decoding:
        decode_lengths = to_device(torch.from_numpy((positions + 1).astype(np.int32)), device)
    decoding_rows = np.arange(num_decoding)
    step = partial(
        PackedStep,
        cache=cache,
        num_decoding=num_decoding,
        bands=bands,
        decode_mask=decode_mask,
        decode_lengths=decode_lengths,
        max_length=max_length,
    )
    if not groups:
        filled_positions, rows = tensor(_fill_up(positions)), tensor(_fill_up(decoding_rows))
        stored = step(stored_slots=rows[:num_decoding], stored_positions=filled_positions[:num_decoding])
        return PackedForward(tensor(_fill_up(last_ids)), filled_positions, rows, None, stored)
    prompts = _Prompts(groups, num_decoding, first_free_slot)
    stored_rows, stored_slots, stored_positions = map(tensor, prompts.stored(positions))
    return PackedForward(
        input_ids=tensor(_fill_up(np.concatenate((last_ids, prompts.ids)))),
        positions=tensor(_fill_up(np.concatenate((positions, prompts.positions)))),
        logit_rows=tensor(_fill_up(np.concatenate((decoding_rows, prompts.last_rows)))),
        sequence_logits=tensor(prompts.sequence_logits()),
        step=step(
            stored_rows=stored_rows,
            stored_slots=stored_slots,
            stored_positions=stored_positions,
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

    def __init__(self, groups: Sequence[PromptGroup], num_decoding: int, first_slot: int) -> None:
        self.num_decoding = num_decoding
        self.first_slot = first_slot
        self.lengths = np.array([len(group.ids) for group in groups], np.int64)
        self.num_members = np.array([len(group.members) for group in groups], np.int64)
        self.starts = num_decoding + np.cumsum(self.lengths) - self.lengths
        self.ids = np.concatenate([np.zeros(0, np.int64), *(np.array(g.ids, np.int64) for g in groups)])
        self.positions = _ranges(np.zeros_like(self.lengths), self.lengths)
        self.last_rows = self.starts + self.lengths - 1

    def stored(self, decode_positions: Ints) -> tuple[Ints, Ints, Ints]:
        """Return rows, slots and positions of all tokens to store: each prompt once per member."""
        lengths = np.repeat(self.lengths, self.num_members)
        slots = self.first_slot + np.arange(len(lengths))
        decoding = np.arange(self.num_decoding)
        return (
            np.concatenate((decoding, _ranges(np.repeat(self.starts, self.num_members), lengths))),
            np.concatenate((decoding, np.repeat(slots, lengths))),
            np.concatenate((decode_positions, _ranges(np.zeros_like(lengths), lengths))),
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
    return PackedLayout(
        kernel=AttentionKernel.SDPA,
        num_sequences=len(lengths),
        max_length=int(lengths.max()),
        cumulative=torch.from_numpy(np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)),
        padding=PaddedLayout(
            shapes=tuple((int(count), int(width)) for width, count in shapes),
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


def admit(waiting: deque[GenerationRequest], free_slots: int, token_budget: int) -> list[PromptGroup]:
    """Take requests from the front of `waiting`, in order, and group those with equal prompts.

    Stops at the first request without a free slot, or whose prompt would exceed the budget of distinct prompt
    tokens. The first prompt of a step is admitted regardless of its length.
    """
    groups: dict[tuple[Any, ...], list[GenerationRequest]] = {}
    num_tokens = 0
    while waiting and free_slots:
        ids = waiting[0].ids
        prompt = (*ids, *(image.digest for _, image in waiting[0].images))
        if prompt not in groups:
            if groups and num_tokens + len(ids) > token_budget:
                break
            num_tokens += len(ids)
            groups[prompt] = []
        groups[prompt].append(waiting.popleft())
        free_slots -= 1
    return [PromptGroup(tuple(members[0].ids), tuple(members)) for members in groups.values()]
