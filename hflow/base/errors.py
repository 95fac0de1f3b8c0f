"""The exceptions that hflow raises for its users, and the secrets that their messages must not show.

All of them are subclasses of `HflowError` and of a standard exception, so that other code can catch either.
Every message says what to change. `assert` is for bugs in hflow itself.

Secrets are values of variables such as `OPENAI_API_KEY`, and keys of known services.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Mapping

SHORTEST_SECRET = 8
"""Shorter values of variables are not replaced: they are no secrets, and occur in ordinary text."""

_VARIABLE = re.compile(r"(?:^|_)(KEY|APIKEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)(?:$|_)", re.IGNORECASE)
_KEY = re.compile(
    r"(?:^|_)(api_?key|access_?key|private_?key|(?:api|access|auth|bearer|hf)_?token|secret|password|passwd|"
    r"credentials?)$",
    re.IGNORECASE,
)
_KNOWN = re.compile(
    r"\b(?:sk-[\w-]{20,}|hf_\w{30,}|gh[opsru]_\w{36,}|github_pat_\w{22,}|AKIA[0-9A-Z]{16}|"
    r"xox[abprs]-[\w-]{10,}|AIza[\w-]{35}|[a-z][a-z0-9+.-]*://[^/\s:@]*:[^/\s@]+@)"
)
"""Keys of OpenAI and Anthropic, Hugging Face, GitHub, AWS, Slack and Google; passwords in URLs."""


def secret_variables() -> Mapping[str, str]:
    """Return the environment variables whose names say that they hold a secret."""
    return {
        name: value
        for name, value in os.environ.items()
        if len(value) >= SHORTEST_SECRET and _VARIABLE.search(name)
    }


def mask_secrets(text: str) -> str:
    """Return a text with `$NAME` in place of secret variables' values, and `***` in place of known keys."""
    for name, value in secret_variables().items():
        text = text.replace(value, f"${name}")
    return _KNOWN.sub("***", text)


def secret_in(key: str, value: object) -> str | None:
    """Return the reason why a value of the configuration is a secret; None if it is none."""
    if not isinstance(value, str) or not value:
        return None
    for name, secret in secret_variables().items():
        if secret in value:
            return f"holds the value of the environment variable {name}"
    is_secret = _KEY.search(key.rpartition(".")[2]) or _KNOWN.search(value)
    return "is a secret" if is_secret else None


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


class NotYetError(HflowError, NotImplementedError):
    """A recipe or configuration can be checked and planned, but not run in this version."""


def nearest(name: str, known: Iterable[str], parent: str = "") -> str:
    """Return `"; did you mean 'x'?"` for the most similar other name, or an empty string.

    Args:
        name: the unknown name.
        known: the names that exist.
        parent: what is written before the names, such as `models.actor.`.
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


_CUT = " ... "


def timeout_message(timeout: float | None) -> str:
    """Return the message of a job that ran out of time."""
    return f"took longer than its timeout of {timeout:g} s"
