"""Makes one sample of the trajectories that an episode returned as a list."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, chain
from typing import Any

from hflow.types import Trajectory


def without_repeated_draws(trajectories: Sequence[Trajectory]) -> tuple[Trajectory, ...]:
    """Return trajectories in which every draw is learned once, in the first one that has it.

    In the others that begin with the same tokens, it is like a token of the prompt: unlearned and without a
    version. A turn whose draws are all repeated does not count as one of theirs.
    """
    return tuple(
        _without(trajectory, trajectories[:number]) for number, trajectory in enumerate(trajectories)
    )


def _without(trajectory: Trajectory, earlier: Sequence[Trajectory]) -> Trajectory:
    draws, repeated = _draws(trajectory), set()
    for other in earlier:
        if shared := draws & _draws(other):
            num_equal = _common_prefix(trajectory, other)
            repeated |= {position for position, _, _ in shared if position < num_equal}
    if not repeated:
        return trajectory
    turns = {number for _, _, number in draws}
    own_turns = {number for position, _, number in draws if position not in repeated}
    return replace(
        trajectory,
        loss_mask=tuple(x and i not in repeated for i, x in enumerate(trajectory.loss_mask)),
        behav_logprobs=tuple(0.0 if i in repeated else x for i, x in enumerate(trajectory.behav_logprobs)),
        versions=tuple(-1 if i in repeated else x for i, x in enumerate(trajectory.versions)),
        num_turns=trajectory.num_turns - len(turns - own_turns),
    )


def _draws(trajectory: Trajectory) -> set[tuple[int, int, int]]:
    """Return the position, the seed and the turn of every learned token that a completion drew."""
    size = len(trajectory.input_ids)
    ends = [*(start for start, _ in trajectory.draws[1:]), size]
    return {
        (position, seed, number)
        for number, ((start, seed), end) in enumerate(zip(trajectory.draws, ends, strict=False))
        for position in range(start, min(end, size))
        if trajectory.loss_mask[position]
    }


def _common_prefix(one: Trajectory, other: Trajectory) -> int:
    """Return the number of leading tokens that two trajectories have in common, with the same images."""
    ids, others = one.input_ids, other.input_ids
    pairs = enumerate(zip(ids, others, strict=False))
    images = zip(one.pixels, other.pixels, strict=False)
    return min(
        next((i for i, (a, b) in pairs if a != b), min(len(ids), len(others))),
        next((min(a.start, b.start) for a, b in images if a.image.digest != b.image.digest), len(ids)),
    )


def join(trajectories: Sequence[Trajectory]) -> Trajectory:
    """Return the sample: all tokens one after the other, with the texts of the last trajectory."""
    starts = accumulate((len(x.input_ids) for x in trajectories), initial=0)
    return replace(
        trajectories[-1],
        input_ids=tuple(chain.from_iterable(x.input_ids for x in trajectories)),
        loss_mask=tuple(chain.from_iterable(x.loss_mask for x in trajectories)),
        behav_logprobs=tuple(chain.from_iterable(x.behav_logprobs for x in trajectories)),
        versions=tuple(chain.from_iterable(x.versions for x in trajectories)),
        num_turns=sum(x.num_turns for x in trajectories),
        recorded={},
        draws=(),
        pixels=tuple(
            placed._replace(start=placed.start + before)
            for x, before in zip(trajectories, starts, strict=False)
            for placed in x.pixels
        ),
    )


def index_of_tokens(trajectories: Sequence[Trajectory]) -> list[int]:
    """Return the field `trajectory`."""
    return [number for number, x in enumerate(trajectories) for _ in x.input_ids]


def described(trajectories: Sequence[Trajectory]) -> list[dict[str, Any]]:
    """Return the field `trajectories`."""
    return [
        {
            "messages": list(x.messages),
            "completion": x.completion,
            "stop_reason": x.stop_reason,
            "num_tokens": x.num_tokens,
            "num_turns": x.num_turns,
        }
        for x in trajectories
    ]
