"""Exit codes other than 0."""

from __future__ import annotations

DIFFERENT = 1
"""`hflow plan --diff` or `hflow twin` found a difference."""
USER_ERROR = 2
"""An error that the user can fix; it was printed in one line."""
INTERRUPTED = 130


class StoppedByUser(Exception):
    """Ctrl-C stopped a run, and its summary was printed."""
