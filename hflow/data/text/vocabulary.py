"""The vocabularies of tokenizers, read from their files without transformers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from hflow.base.files import read_json_object

SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<unk>")
"""Ids 0 to 3 of a character tokenizer; the alphabet's characters follow in order."""


def character_vocabulary(alphabet: str) -> dict[str, int]:
    """Return the ids of the tokens of a character tokenizer."""
    return {token: i for i, token in enumerate((*SPECIAL_TOKENS, *alphabet))}


def read_vocabulary(path: str | None, alphabet: str | None) -> Mapping[str, int] | None:
    """Return the ids of a tokenizer's tokens; None if they are not in a `tokenizer.json`.

    Args:
        path: a checkpoint's directory, as in `TokenizerSettings`.
        alphabet: characters of a character tokenizer, used if the path has no tokenizer.
    """
    file = None if path is None else Path(path) / "tokenizer.json"
    if file is None or not file.is_file():
        return None if alphabet is None else character_vocabulary(alphabet)
    saved = read_json_object(file)
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
    last = read_json_object(file).get("post_processor") or {}
    for processor in last.get("processors") or [last]:
        if processor.get("type") == "TemplateProcessing" and processor.get("single"):
            special = processor["single"][0].get("SpecialToken")
            return None if special is None else str(special["id"])
    return None
