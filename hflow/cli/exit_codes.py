"""Exit codes other than 0."""

from __future__ import annotations

DIFFERENT = 1
"""`hflow plan --diff` or `hflow twin` found a difference."""
USER_ERROR = 2
"""An error that the user can fix; it was printed in one line."""
RESUMABLE = 75
"""A run was stopped by Ctrl-C, SIGTERM or SIGHUP before its last step; `hflow run --resume` continues it. It
is the system's code for a temporary failure, on which schedulers may try again."""
INTERRUPTED = 130


class StoppedByUser(Exception):
    """Ctrl-C ended a command that had printed what it did."""


class RunStopped(Exception):
    """A run was stopped before its last step, and its summary was printed."""
