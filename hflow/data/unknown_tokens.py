"""`check_known`: refuses text that a tokenizer has no tokens for, which it would replace without a word."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

from hflow.base.errors import DataError


def check_known(tokenizer: Any, text: str, ids: Sequence[int]) -> None:
    """Check that no id replaces characters that the tokenizer lacks.

    The token for unknown text may have another use, such as the end of a text. Where the text names it, it is
    allowed.

    Args:
        tokenizer: of Hugging Face.
        text: what was encoded.
        ids: its tokens.

    Raises:
        DataError: if the vocabulary lacks a character; names it.
    """
    unknown = tokenizer.unk_token_id
    if unknown is None or unknown not in ids:
        return
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    for token, (start, end) in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True):
        if token == unknown and text[start:end] != tokenizer.unk_token:
            where = textwrap.shorten(text, 60)
            raise DataError(
                f"the tokenizer has no token for {text[start:end]!r} (in {where!r}); add it to the alphabet"
            )
