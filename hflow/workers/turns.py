"""Trajectories that grow turn by turn. Tokens are only ever appended: none is encoded twice."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from hflow.backends.base import Generated
from hflow.types import ToolCall, Trajectory


def prompted(ids: Sequence[int], messages: tuple[Mapping[str, Any], ...]) -> Trajectory:
    """A prompt: nothing of it is learned."""
    return Trajectory(
        input_ids=tuple(ids),
        loss_mask=(False,) * len(ids),
        behav_logprobs=(0.0,) * len(ids),
        versions=(-1,) * len(ids),
        messages=messages,
    )


def continued(talk: Trajectory, ids: Sequence[int]) -> Trajectory:
    """`talk` with its pending messages, which were encoded as `ids`, behind it."""
    added = prompted(ids, talk.pending)
    return dataclasses.replace(
        talk,
        input_ids=talk.input_ids + added.input_ids,
        loss_mask=talk.loss_mask + added.loss_mask,
        behav_logprobs=talk.behav_logprobs + added.behav_logprobs,
        versions=talk.versions + added.versions,
        messages=talk.messages + added.messages,
        pending=(),
    )


def answered(
    talk: Trajectory, generated: Generated, text: str, calls: tuple[ToolCall, ...] = ()
) -> Trajectory:
    """`talk` with a generated turn behind it, which says `text` and calls tools.

    A turn that was cut by its length says so, even where it had called a tool before.
    """
    called = calls and generated.stop_reason == "stop"
    return dataclasses.replace(
        talk,
        input_ids=talk.input_ids + generated.ids,
        loss_mask=talk.loss_mask + (True,) * len(generated.ids),
        behav_logprobs=talk.behav_logprobs + generated.logprobs,
        versions=talk.versions + generated.versions,
        messages=(*talk.messages, {"role": "assistant", "content": text}),
        completion=text,
        stop_reason="tool_calls" if called else generated.stop_reason,
        num_turns=talk.num_turns + 1,
        tool_calls=calls,
    )


def until_stop(text: str, stops: Sequence[str]) -> str:
    """The text before the first stop string in it."""
    ends = [position for stop in stops if (position := text.find(stop)) >= 0]
    return text[: min(ends)] if ends else text
