"""`TextTokenizer`: from texts and messages to tokens, and which of them are learned."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

from hflow.data.chat import ChatTemplate
from hflow.errors import DataError
from hflow.types import Trajectory

# -------------------- A tokenizer of single characters, for models that are trained from scratch on
# small alphabets.


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


_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
"""Where none of these is, transformers would make up an empty tokenizer."""

NUM_CACHED = 4096
"""Texts whose ids are kept: the members of a group, and evaluations, encode the same prompts again."""


@dataclass(frozen=True)
class TokenizerSettings:
    """Where a model's tokenizer comes from: a checkpoint's directory, else an alphabet."""

    path: str | None = None
    """A local directory that `AutoTokenizer` reads."""
    alphabet: str | None = None
    """Characters of a character tokenizer, where the path holds none (or there is no path)."""
    chat_template: str | None = None
    """A Jinja chat template that replaces the tokenizer's own."""


class TextTokenizer:
    """A model's tokenizer (`hflow.types.Tokenizer`), and what episodes need beyond that.

    Attributes:
        bos_id: stands before raw-text prompts; None where the tokenizer has none.
        stop_ids: tokens that end a turn.
        chat_template: None where the tokenizer has none.
    """

    def __init__(self, settings: TokenizerSettings) -> None:
        """Load or build it.

        Raises:
            DataError: when there is no tokenizer where the settings say.
        """
        self._hf = _load(settings)
        if settings.chat_template is not None:
            self._hf.chat_template = settings.chat_template
        self.bos_id: int | None = self._hf.bos_token_id
        self.stop_ids = _stop_ids(self._hf.eos_token_id, settings.path)
        self.chat_template = ChatTemplate(self._hf) if self._hf.chat_template else None
        self._ids = lru_cache(NUM_CACHED)(self._encode)

    @property
    def num_tokens(self) -> int:
        """Size of the vocabulary, special tokens included."""
        return len(self._hf)

    def encode(self, text: str) -> list[int]:
        """Ids of a text, without special tokens.

        Raises:
            DataError: naming what the vocabulary lacks.
        """
        return list(self._ids(text))

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens left out."""
        text: str = self._hf.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    def prompt(self, text: str) -> list[int]:
        """Ids of a raw-text prompt: the begin-of-text token, where there is one, and the text."""
        ids = self.encode(text)
        return ids if self.bos_id is None else [self.bos_id, *ids]

    def join(self, prompt: str, answer: str) -> Trajectory:
        """Prompt (masked), and answer with its end-of-text token (learned).

        Raises:
            DataError: when the tokenizer has no end-of-text token.
        """
        if self._hf.eos_token_id is None:
            raise DataError("the tokenizer has no end-of-text token, which join needs; set its eos_token")
        return Trajectory.learned(
            tuple(self.prompt(prompt)),
            (*self.encode(answer), self._hf.eos_token_id),
            messages=({"role": "user", "content": prompt}, {"role": "assistant", "content": answer}),
            completion=answer,
            num_turns=1,
        )

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> Trajectory:
        """Messages by the chat template; what assistants say is learned.

        Raises:
            DataError: when there is no chat template, or it refuses the messages.
        """
        ids, mask = self.template().learned(messages, self.stop_ids)
        replies = [str(m.get("content", "")) for m in messages if m.get("role") == "assistant"]
        return Trajectory(
            input_ids=tuple(ids),
            loss_mask=tuple(mask),
            behav_logprobs=(0.0,) * len(ids),
            versions=(-1,) * len(ids),
            messages=tuple(messages),
            completion=replies[-1] if replies else "",
            num_turns=len(replies),
        )

    def template(self) -> ChatTemplate:
        """The chat template.

        Raises:
            DataError: when there is none.
        """
        if self.chat_template is None:
            raise DataError(
                "this tokenizer has no chat template, so messages cannot be encoded; give texts instead"
            )
        return self.chat_template

    def save(self, directory: str) -> None:
        """Write it where `AutoTokenizer.from_pretrained` finds it."""
        self._hf.save_pretrained(directory)

    def _encode(self, text: str) -> tuple[int, ...]:
        ids: list[int] = self._hf(text, add_special_tokens=False)["input_ids"]
        if self._hf.unk_token_id is not None and self._hf.unk_token_id in ids:
            raise DataError(self._unknown(text))
        return tuple(ids)

    def _unknown(self, text: str) -> str:
        encoded = self._hf(text, add_special_tokens=False, return_offsets_mapping=True)
        pieces = zip(encoded["input_ids"], encoded["offset_mapping"], strict=True)
        start, end = next(offsets for i, offsets in pieces if i == self._hf.unk_token_id)
        where = textwrap.shorten(text, 60)
        return f"the tokenizer has no token for {text[start:end]!r} (in {where!r}); add it to the alphabet"


def _load(settings: TokenizerSettings) -> Any:
    if settings.path is not None and any((Path(settings.path) / name).exists() for name in _FILES):
        loader: Any = AutoTokenizer
        return loader.from_pretrained(settings.path, local_files_only=True)
    if settings.alphabet is not None:
        return character_tokenizer(settings.alphabet)
    if settings.path is not None:
        raise DataError(f"{settings.path} holds no tokenizer, save one there or set an alphabet")
    raise DataError("a tokenizer needs the path of a checkpoint or an alphabet, set one of them")


def _stop_ids(eos_id: int | None, path: str | None) -> tuple[int, ...]:
    """The tokenizer's end-of-text token and those of the checkpoint's generation defaults."""
    ids = [] if eos_id is None else [eos_id]
    if path is not None and (Path(path) / "generation_config.json").exists():
        ends = GenerationConfig.from_pretrained(path, local_files_only=True).eos_token_id
        ids += [ends] if isinstance(ends, int) else list(ends or ())
    return tuple(dict.fromkeys(ids))
