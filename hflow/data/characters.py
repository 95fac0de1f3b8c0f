"""A tokenizer of single characters, for models that are trained from scratch on small alphabets."""

from __future__ import annotations

from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hflow.errors import DataError

SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<unk>")
"""Ids 0 to 3; the alphabet's characters follow in their order."""


def character_tokenizer(alphabet: str) -> Any:
    """Build a Hugging Face tokenizer with one token a character.

    Raises:
        DataError: when the alphabet is empty or holds a character twice.
    """
    if not alphabet:
        raise DataError("the tokenizer's alphabet is empty, list the characters of your data")
    repeated = [c for i, c in enumerate(alphabet) if c in alphabet[:i]]
    if repeated:
        raise DataError(f"the tokenizer's alphabet holds {repeated[0]!r} twice, list each character once")
    vocab = {token: i for i, token in enumerate((*SPECIAL_TOKENS, *alphabet))}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    build: Any = PreTrainedTokenizerFast
    return build(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
    )
