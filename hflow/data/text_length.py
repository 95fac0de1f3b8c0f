"""Finds text that is too long for a model, before it is encoded: that takes up to 400 bytes a character."""

from __future__ import annotations

from typing import Any

_CHARACTERS_PER_TOKEN = 16
"""Text with fewer characters per token that the model can read is encoded whatever it is."""


def find_length_problem(tokenizer: Any, text: str, max_tokens: int | None) -> str | None:
    """Return why a text cannot fit into a sequence of a model; None if it may.

    Only the beginning of a long text is encoded. If that has twice the tokens that fit, the rest cannot make
    them so few.

    Args:
        tokenizer: a Hugging Face tokenizer.
        text: the text to encode.
        max_tokens: tokens of the longest sequence; None: there is no bound.
    """
    if max_tokens is None or len(text) <= _CHARACTERS_PER_TOKEN * max_tokens:
        return None
    beginning = tokenizer(text[: _CHARACTERS_PER_TOKEN * max_tokens], add_special_tokens=False)["input_ids"]
    if len(beginning) <= 2 * max_tokens:
        return None
    return (
        f"a text of {len(text):,} characters has more tokens than the {max_tokens:,} that the model has "
        "positions for; shorten it"
    )
