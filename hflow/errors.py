"""The exceptions that hflow raises for its users.

One hierarchy, so that a caller catches `HflowError`; each class is also a standard
exception, so that code which knows nothing of hflow can catch it as well. Every message
says what to change. `assert` is kept for our own bugs.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class HflowError(Exception):
    """Base of every error that a user can mend; the command line prints it in one line."""


class RecipeError(HflowError, ValueError):
    """A recipe that cannot be read or whose graph is wrong."""


class ConfigError(HflowError, ValueError):
    """A configuration key or value that does not exist or does not fit."""


class PlanError(HflowError, ValueError):
    """A graph that cannot be laid out on the cluster as asked."""


class DataError(HflowError, ValueError):
    """A dataset whose file, row or column is not what the recipe declares."""


class BackendError(HflowError, RuntimeError):
    """A model, checkpoint or engine that cannot do what the plan asks of it."""


class RunError(HflowError, RuntimeError):
    """A run that cannot go on: a body raised, a worker died, every sample was refused."""


class EpisodeError(HflowError, RuntimeError):
    """An episode that cannot go on, which refuses its sample and nothing else."""


class NotYetError(HflowError, NotImplementedError):
    """Valid in the language, checked and planned, but not executable in this version."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Return `"; did you mean 'x'?"` for the known name closest to `name`, or an empty string."""
    match = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {match[0]!r}?" if match else ""
