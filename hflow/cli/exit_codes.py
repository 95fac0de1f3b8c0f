"""Exit codes, besides 0."""

from __future__ import annotations

DIFFERENT = 1
"""Plans that were compared differ, or a twin."""
USER_ERROR = 2
INTERRUPTED = 130


class StoppedByUser(Exception):
    """A run ended by Ctrl-C, and its summary is printed."""
