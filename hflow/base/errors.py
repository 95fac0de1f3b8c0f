"""The exceptions that hflow raises for its users, and parts of their messages.

All of them are subclasses of `HflowError` and of a standard exception, so that other code can catch either.
Every message says what to change. `assert` is for bugs in hflow itself.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from hflow.base.secrets import mask_secrets


class HflowError(Exception):
    """Base class of errors that a user can fix. The command line prints them in one line, without secrets."""

    def __str__(self) -> str:
        """Return the message, with secrets masked."""
        return mask_secrets(super().__str__())


class RecipeError(HflowError, ValueError):
    """A recipe cannot be read, or its graph is wrong."""


class ConfigError(HflowError, ValueError):
    """A key of the configuration does not exist, or a value does not fit."""


class PlanError(HflowError, ValueError):
    """A graph cannot be placed on the cluster as configured."""


class DataError(HflowError, ValueError):
    """A file, row or column of a dataset is not what the recipe declares."""


class BackendError(HflowError, RuntimeError):
    """A model, checkpoint or engine cannot do what the plan requires."""


class RunError(HflowError, RuntimeError):
    """A run cannot continue: a body raised an exception, a worker died, or every sample was refused."""


class ReturnError(RunError):
    """A body returned something else than it declares. It refuses what an exception of the body refuses."""


class WorkerFailureError(RunError):
    """A worker, an engine's process or a machine failed. The run can continue from its last checkpoint."""


class EpisodeError(HflowError, RuntimeError):
    """An episode cannot continue. Only its own sample is refused."""


class ServiceError(HflowError, RuntimeError):
    """A remote service did not answer, or the budget for it is used up. Only the sample is refused."""


class NotYetError(HflowError, NotImplementedError):
    """A recipe or configuration can be checked and planned, but not run in this version."""


def nearest(name: str, known: Iterable[str], parent: str = "") -> str:
    """Return `"; did you mean 'x'?"` for the most similar other name, or an empty string.

    `parent` is written before the names, such as `models.actor.`.
    """
    others = [other for other in known if other != name]
    matches = difflib.get_close_matches(name, others, n=1, cutoff=0.5)
    return f"; did you mean {parent + matches[0]!r}?" if matches else ""


def shorten(text: str, length: int) -> str:
    """Return text of at most `length` characters: the middle of longer text is left out."""
    if len(text) <= length:
        return text
    kept = (length - len(_CUT)) // 2
    return text[:kept] + _CUT + text[len(text) - kept :]


def reason_of(error: BaseException, length: int = 200) -> str:
    """Return the message of a library's error in one line of so many characters, or without one its class."""
    return shorten(" ".join(str(error).split()) or type(error).__name__, length)


_CUT = " ... "


def timeout_message(timeout: float | None) -> str:
    """Return the message of a job that ran out of time."""
    return f"took longer than its timeout of {timeout:g} s"
