"""`SleepLevel`: what a generation engine keeps while it does not generate."""

from __future__ import annotations

import enum


class SleepLevel(enum.IntEnum):
    """What an engine keeps, from most to least."""

    PAUSE = 0
    """Everything: the engine has devices of its own, so it only stops."""
    KEEP_WEIGHTS = 1
    """A copy of its weights in host memory, since it may wake with the same version."""
    DROP_WEIGHTS = 2
    """Nothing, since it loads new weights when it wakes, or does not wake again."""
