"""Admission and age in one place: how many groups may enter, and how old a token may be.

Units. Everything here counts **groups** (a prompt with its G samples), as the batch does; only
`free_samples` counts samples, and is floored to groups. With `s = sync_every`, engines get new
weights every s steps, so contract 12 is read with `batch := s * batch` and `version := syncs`,
where `syncs = version // s`:

    capacity = min(free_samples // G,  floor((eta + syncs + 1) * s * B) - (accepted + running))

`accepted` counts every group ever accepted, trained ones included; a group that was refused or
dropped is in neither term, so its place comes back at once.

eta may be a fraction: with eta = 0.5 half of the next sync's groups are admitted under these weights.

Age. A group admitted under `syncs` is among the first `(eta + syncs + 1) * s * B`; taken in the
order of admission it trains at step `ceil((eta + syncs + 1) * s) - 1` at the latest, and its oldest
token has a version of at least `syncs * s`. Hence the certified lag

    L = ceil((eta + 1) * s) - 1          (eta = 0, s = 1: L = 0, the synchronous algorithm)

A slow sample can be overtaken, however, and train later than its place says. So the formula
bounds volume, not age, and the age rule (`is_stale`) makes L hold for every trained token.
"""

from __future__ import annotations

from hflow.planner.staleness import admission_limit, certified_lag

__all__ = ["LOOK_AHEAD", "admission_limit", "capacity", "certified_lag", "is_stale", "look_ahead_limit"]

LOOK_AHEAD = 1
"""Batches beyond the current one that a source without trained weights may prepare."""


def look_ahead_limit(steps_trained: int, batch: int) -> int:
    """As `admission_limit`, for sources that read no trained weights: nothing there gets old."""
    return admission_limit(steps_trained, batch, LOOK_AHEAD)


def capacity(free_samples: int, group_size: int, limit: int, admitted: int) -> int:
    """Groups that may be opened now (contract 12).

    Args:
        free_samples: `max_concurrent` less the samples in flight.
        group_size: samples a group (G).
        limit: from `admission_limit` or `look_ahead_limit`.
        admitted: groups accepted so far plus groups running.
    """
    return max(0, min(free_samples // group_size, limit - admitted))


def is_stale(oldest: int, step: int, lag: int) -> bool:
    """Whether a sample whose oldest token has version `oldest` is too old to train at `step`.

    `oldest` is -1 where no token was generated; such samples never age.
    """
    return 0 <= oldest < step - lag
