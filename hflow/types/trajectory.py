"""`Trajectory`: tokens with their log-probs and the weights that generated them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hflow.types.image import Image, PlacedImage
from hflow.types.recorded import Recorded, check_recorded

STOP_REASONS = ("stop", "length", "tool_calls", "abort")
"""Why a generation ended."""

TRAJECTORY = "trajectory"
"""The field with the trajectory of each token, counted from 0 in its episode."""
PIXELS = "pixels"
"""The field with the images that a model sees."""
TRAJECTORIES = "trajectories"
"""The field with messages, completion and counts of each trajectory of an episode."""


@dataclass(frozen=True)
class ToolCall:
    """A tool call that the model has written."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class Trajectory:
    """A sample, or a part of one, immutable. Its four tuples of tokens have the same length.

    A generated token has `loss_mask` True, the log-prob at which it was drawn, and the version of the weights
    that drew it. Tokens of prompts, templates and tools have `loss_mask` False, `behav_logprobs` 0.0 and
    `versions` -1.
    """

    input_ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]
    behav_logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    messages: tuple[Mapping[str, Any], ...] = ()
    completion: str = ""
    stop_reason: str = "stop"
    num_turns: int = 0
    tool_calls: tuple[ToolCall, ...] = ()
    pending: tuple[Mapping[str, Any], ...] = ()
    """Messages added since the last completion. The next `complete` encodes them."""
    tools: tuple[Callable[..., Any] | Mapping[str, Any], ...] = field(default=(), compare=False, repr=False)
    """Tools that the model may call, as functions or JSON schemas. A `complete` without `tools=` offers them
    again."""
    recorded: Recorded = field(default_factory=dict, repr=False, hash=False)
    """What its engine recorded beside tokens, by kind (`RecordedKind`). The last drawn token has no entry of
    what is recorded when a token is computed, which it was not."""
    draws: tuple[tuple[int, int], ...] = field(default=(), compare=False, repr=False)
    """The completions that generated its turns, in order: the position of the first token, and the seed.
    A token depends on the tokens before it, the seed and its position, so trajectories that begin with the
    same tokens of the same seeds share these draws."""

    pixels: tuple[PlacedImage, ...] = field(default=(), compare=False, repr=False)
    """The images among its tokens, in their order."""

    def __post_init__(self) -> None:
        lengths = {len(self.loss_mask), len(self.behav_logprobs), len(self.versions)}
        if lengths != {len(self.input_ids)}:
            raise ValueError(
                f"the token fields of a trajectory must have the same length, but input_ids has "
                f"{len(self.input_ids)}, loss_mask {len(self.loss_mask)}, behav_logprobs "
                f"{len(self.behav_logprobs)}, versions {len(self.versions)}"
            )
        check_recorded(self.recorded, len(self.input_ids))
        if self.stop_reason not in STOP_REASONS:
            raise ValueError(
                f"stop_reason is {self.stop_reason!r}; it must be one of {', '.join(STOP_REASONS)}"
            )

    @classmethod
    def learned(cls, prompt_ids: tuple[int, ...], target_ids: tuple[int, ...], **text: Any) -> Trajectory:
        """Return a trajectory that was written, not generated.

        Args:
            prompt_ids: tokens that are masked.
            target_ids: tokens that are learned. Like the prompt's, their log-probs are 0.0 and their version
                is -1.
            **text: other fields of the trajectory.
        """
        num_prompt, num_target = len(prompt_ids), len(target_ids)
        return cls(
            input_ids=prompt_ids + target_ids,
            loss_mask=(False,) * num_prompt + (True,) * num_target,
            behav_logprobs=(0.0,) * (num_prompt + num_target),
            versions=(-1,) * (num_prompt + num_target),
            **text,
        )

    @property
    def reply(self) -> str:
        """The text of the last message of the assistant."""
        for message in reversed(self.messages):
            if message.get("role") == "assistant":
                return str(message.get("content", ""))
        return self.completion

    @property
    def num_tokens(self) -> int:
        """Number of learned tokens."""
        return sum(self.loss_mask)

    def add(self, role: str, content: Any) -> Trajectory:
        """Return the trajectory with one more message. The next `complete` encodes it.

        Args:
            role: `user` or `tool`.
            content: a text, an `Image`, or a list of both. Anything else is written as text.
        """
        is_shown = isinstance(content, Image) or (
            isinstance(content, list) and any(isinstance(part, Image) for part in content)
        )
        said = (content if isinstance(content, list) else [content]) if is_shown else str(content)
        return dataclasses.replace(self, pending=(*self.pending, {"role": role, "content": said}))
