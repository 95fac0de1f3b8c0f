"""`Trajectory`: the tokens of one sample, who made them, and with which weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

STOP_REASONS = ("stop", "length", "tool_calls", "abort")
"""Why a generation ended (contract: `length | stop | tool_calls | abort`)."""


@dataclass(frozen=True)
class ToolCall:
    """One call that the model asked for."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class Trajectory:
    """An immutable sample. The four token tuples have one length.

    Prompt, template and tool tokens have `loss_mask` False, `behav_logprobs` 0.0 and
    `versions` -1; a generated token carries the log-prob and the weight version that it
    was drawn with.
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
    """Messages added since the last completion, not yet encoded."""
    tools: tuple[Callable[..., Any], ...] = field(default=(), compare=False, repr=False)
    """Tools that were offered; a `complete` that is given none offers these again."""

    def __post_init__(self) -> None:
        sizes = {len(self.loss_mask), len(self.behav_logprobs), len(self.versions)}
        if sizes != {len(self.input_ids)}:
            raise ValueError(
                f"a trajectory's token fields differ in length: input_ids {len(self.input_ids)}, "
                f"loss_mask {len(self.loss_mask)}, behav_logprobs {len(self.behav_logprobs)}, "
                f"versions {len(self.versions)}"
            )
        if self.stop_reason not in STOP_REASONS:
            raise ValueError(f"stop_reason is {self.stop_reason!r}, not one of {STOP_REASONS}")

    @classmethod
    def learned(cls, prompt_ids: tuple[int, ...], target_ids: tuple[int, ...], **text: Any) -> Trajectory:
        """A trajectory that was written, not generated: `target_ids` are learned, no version."""
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
        """The text of the last assistant turn."""
        for message in reversed(self.messages):
            if message.get("role") == "assistant":
                return str(message.get("content", ""))
        return self.completion

    @property
    def num_tokens(self) -> int:
        """Number of learned (generated) tokens."""
        return sum(self.loss_mask)

    def add(self, role: str, text: Any) -> Trajectory:
        """Return this trajectory with a message appended; the next `complete` encodes it."""
        return dataclasses.replace(self, pending=(*self.pending, {"role": role, "content": str(text)}))
