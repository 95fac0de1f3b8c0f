"""The states of an episode."""

from __future__ import annotations

import enum


class EpisodeState(enum.StrEnum):
    """What an episode does right now. It can be interrupted in any of these, and goes on from there."""

    PENDING = "pending"
    """It waits for its turn: its body has not begun."""
    GENERATING = "generating"
    """An engine draws for it, or is to draw once it is awake."""
    PROCESSING_TOOLS = "processing_tools"
    """A tool runs."""
    INTERACTING = "interacting"
    """Its body does something else: it computes, or waits for a service."""
    TERMINATED = "terminated"
    """Its body has ended, one way or another."""
