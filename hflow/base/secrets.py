"""Secrets, which messages and files must not show.

They are values of variables such as `OPENAI_API_KEY`, and keys of known services.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

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
