"""The vocabularies of tokenizers, read from their files without transformers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hflow.base.errors import DataError
from hflow.base.files import read_json_object

SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<unk>")
"""Ids 0 to 3 of a character tokenizer. Those that mark images follow, if the model sees, and then the
alphabet's characters in order."""


def character_vocabulary(alphabet: str, of_images: Sequence[str] = ()) -> dict[str, int]:
    """Return the ids of a character tokenizer: those of the alphabet, and of tokens that mark images."""
    return {token: i for i, token in enumerate((*SPECIAL_TOKENS, *of_images, *alphabet))}


def read_vocabulary(path: str | None, alphabet: str | None) -> Mapping[str, int] | None:
    """Return the ids of the tokens in a checkpoint's `tokenizer.json`; None if they are elsewhere.

    Without one at the path, as in `TokenizerSettings`, they are those of the alphabet.

    Raises:
        DataError: if the file is not one of a tokenizer.
    """
    file = None if path is None else Path(path) / "tokenizer.json"
    if file is None or not file.is_file():
        return None if alphabet is None else character_vocabulary(alphabet)
    with _of_tokenizer(file) as saved:
        model = saved.get("model")
        listed = model.get("vocab") if isinstance(model, Mapping) else None
        if isinstance(listed, list):  # of tokens with their scores
            listed = {str(entry[0]): i for i, entry in enumerate(listed)}
        if not isinstance(listed, Mapping):
            return None
        return {**listed, **{added["content"]: added["id"] for added in saved.get("added_tokens", ())}}


def opening_token(path: str | None, alphabet: str | None) -> str | None:
    """Return the special token that a tokenizer puts in front of texts; None if it adds none that is known.

    Arguments are those of `read_vocabulary`.
    """
    file = None if path is None else Path(path) / "tokenizer.json"
    if file is None or not file.is_file():
        return None if alphabet is None else "<bos>"
    with _of_tokenizer(file) as saved:
        last = saved.get("post_processor") or {}
        for processor in last.get("processors") or [last]:
            if processor.get("type") == "TemplateProcessing" and processor.get("single"):
                special = processor["single"][0].get("SpecialToken")
                return None if special is None else str(special["id"])
    return None


@contextmanager
def _of_tokenizer(file: Path) -> Iterator[dict[str, Any]]:
    """Give the content of a `tokenizer.json`; what shows that it is none becomes a `DataError`."""
    saved = read_json_object(file)
    try:
        yield saved
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        raise DataError(
            f"{file} does not hold a tokenizer: {type(error).__name__}: {error}; restore it"
        ) from error
