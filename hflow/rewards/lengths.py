"""Rewards for the length of a completion, in tokens."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from hflow.dsl import checked_by, compute


def _check_limits(knobs: Mapping[str, Any], reads: Collection[str]) -> str | None:
    limit, buffer = knobs["limit"], knobs["buffer"]
    if limit is None or buffer is None:
        return (
            "knobs limit and buffer must be set. Set limit= to max_tokens of the generate node, and buffer= "
            "to the tokens before it that are punished"
        )
    if not 0 < buffer <= limit:
        return f"knob buffer is {buffer}; it must be from 1 to limit={limit}"
    return None


@compute(per="sample")
@checked_by(_check_limits)
def overlong(num_tokens: int, *, limit: int | None = None, buffer: int | None = None) -> float:
    """Return 0 for a short completion, -1 for one longer than `limit`, and a line between them.

    With length |y|: 0 if |y| <= limit - buffer; (limit - buffer - |y|) / buffer if it is between that and
    `limit`; -1 beyond.

    Args:
        num_tokens: tokens of the completion, |y|.
        limit: length from which the punishment is whole, L_max of the paper. It must be set.
        buffer: tokens before the limit over which it grows, L_cache of the paper. It must be set.

    Source: Yu et al. 2025, "DAPO: an open-source LLM reinforcement learning system at scale", equation 13.
    """
    assert limit is not None, "checked when the recipe was read"
    assert buffer is not None, "checked when the recipe was read"
    return max(-1.0, min(0.0, (limit - buffer - num_tokens) / buffer))


@compute(per="group", min_group=2)
def brevity(num_tokens: list[int], right: list[float]) -> list[float]:
    """Return from 0.5 for the shortest completion of a group to -0.5 for the longest.

    With L = 0.5 - (|y| - min) / (max - min): L for a right completion, min(0, L) for a wrong one, so that
    wrong ones gain nothing by being short; 0 for all if they have the same length.

    Args:
        num_tokens: tokens of each completion, |y|.
        right: above 0 for a right completion. `reads={"right": "math"}` takes another reward.

    Source: Kimi Team 2025, "Kimi k1.5: scaling reinforcement learning with LLMs", section 2.3.3.
    """
    shortest, longest = min(num_tokens), max(num_tokens)
    if shortest == longest:
        return [0.0] * len(num_tokens)
    gains = [0.5 - (length - shortest) / (longest - shortest) for length in num_tokens]
    return [gain if score > 0 else min(0.0, gain) for gain, score in zip(gains, right, strict=True)]
