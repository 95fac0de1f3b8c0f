"""Trajectories that grow turn by turn, by tokens that are only appended."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from hflow.engines.interface import GenerationResult
from hflow.types import ToolCall, Trajectory
from hflow.types.image import PlacedImage
from hflow.types.recorded import extend_recorded


def prompt_trajectory(
    ids: Sequence[int], messages: tuple[Mapping[str, Any], ...], pixels: tuple[PlacedImage, ...] = ()
) -> Trajectory:
    """Return a trajectory of a prompt, of which nothing is learned."""
    return Trajectory(
        input_ids=tuple(ids),
        loss_mask=(False,) * len(ids),
        behav_logprobs=(0.0,) * len(ids),
        versions=(-1,) * len(ids),
        messages=messages,
        pixels=pixels,
    )


def append_messages(
    trajectory: Trajectory, ids: Sequence[int], pixels: tuple[PlacedImage, ...] = ()
) -> Trajectory:
    """Append a trajectory's pending messages, whose tokens are `ids`. No earlier token is encoded again.

    `pixels` are the images among the new tokens, placed in the whole sequence.
    """
    added = prompt_trajectory(ids, trajectory.pending)
    return dataclasses.replace(
        trajectory,
        input_ids=trajectory.input_ids + added.input_ids,
        loss_mask=trajectory.loss_mask + added.loss_mask,
        behav_logprobs=trajectory.behav_logprobs + added.behav_logprobs,
        versions=trajectory.versions + added.versions,
        messages=trajectory.messages + added.messages,
        pixels=trajectory.pixels + pixels,
        pending=(),
    )


def append_turn(
    trajectory: Trajectory, generated: GenerationResult, text: str, calls: tuple[ToolCall, ...] = ()
) -> Trajectory:
    """Append a generated turn, with its text and the tool calls in it.

    The stop reason of a turn that was cut at `max_tokens` is "length", even if it called a tool before.
    """
    has_called = calls and generated.stop_reason == "stop"
    return dataclasses.replace(
        trajectory,
        input_ids=trajectory.input_ids + generated.ids,
        loss_mask=trajectory.loss_mask + (True,) * len(generated.ids),
        behav_logprobs=trajectory.behav_logprobs + generated.logprobs,
        versions=trajectory.versions + generated.versions,
        recorded=extend_recorded(trajectory.recorded, generated.recorded),
        messages=(*trajectory.messages, {"role": "assistant", "content": text}),
        completion=text,
        stop_reason="tool_calls" if has_called else generated.stop_reason,
        num_turns=trajectory.num_turns + 1,
        tool_calls=calls,
    )
