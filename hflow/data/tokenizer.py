"""`TextTokenizer`: encodes texts and messages, and marks which tokens are learned.

transformers is imported when a tokenizer is built: this takes seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from hflow.data.chat import ChatTemplate
from hflow.data.unknown_tokens import check_known
from hflow.data.vocabulary import character_vocabulary
from hflow.errors import DataError, RecipeError
from hflow.json_text import read_json_object
from hflow.types import Trajectory

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
"""A directory without any of these holds no tokenizer. transformers would make an empty one."""

NUM_CACHED_TEXTS = 4096
"""Number of texts whose ids are cached, as group members and evaluations encode the same prompts again."""


@dataclass(frozen=True)
class TokenizerSettings:
    """Settings of a model's tokenizer: a checkpoint directory, or an alphabet."""

    path: str | None = None
    """A local directory for `AutoTokenizer`."""
    alphabet: str | None = None
    """Characters of a character tokenizer, used if the path has no tokenizer."""
    chat_template: str | None = None
    """A Jinja chat template that replaces the tokenizer's own."""


class TextTokenizer:
    """A model's tokenizer (`hflow.types.Tokenizer`), with what episodes need besides.

    Attributes:
        settings: what it was built from.
        bos_id: id that raw-text prompts begin with; None if the tokenizer has none.
        stop_ids: tokens that end a turn.
        chat_template: None if the tokenizer has none.
    """

    def __init__(self, settings: TokenizerSettings) -> None:
        """Load or build the tokenizer.

        Raises:
            DataError: if the settings do not lead to a tokenizer.
        """
        self.settings = settings
        self._hf = _load(settings)
        if settings.chat_template is not None:
            self._hf.chat_template = settings.chat_template
        self.bos_id: int | None = self._hf.bos_token_id
        self.stop_ids = _stop_ids(self._hf.eos_token_id, settings.path)
        self.chat_template = ChatTemplate(self._hf) if self._hf.chat_template else None
        self._ids = lru_cache(NUM_CACHED_TEXTS)(self._encode)

    @property
    def num_tokens(self) -> int:
        """Size of the vocabulary, special tokens included."""
        return len(self._hf)

    @property
    def has_chat_template(self) -> bool:
        """Whether `chat` can encode messages."""
        return self.chat_template is not None

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without special tokens.

        Raises:
            DataError: if the vocabulary lacks a character; names it.
        """
        return list(self._ids(text))

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, without special tokens."""
        text: str = self._hf.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of ids, with special tokens."""
        text: str = self._hf.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def token_text(self, token: int) -> str:
        """Return the text of one token, also of a special one."""
        return self.text([token])

    def prompt(self, text: str) -> list[int]:
        """Return the ids of a raw-text prompt: the begin-of-text token, if there is one, and the text."""
        ids = self.encode(text)
        return ids if self.bos_id is None else [self.bos_id, *ids]

    def join(self, prompt: str, answer: str | None = None) -> Trajectory:
        """Return a trajectory of a prompt (masked) and an answer with its end-of-text token (learned).

        Raises:
            RecipeError: for anything but two texts.
            DataError: if the tokenizer has no end-of-text token.
        """
        if not isinstance(prompt, str) or not isinstance(answer, str):
            given = ", ".join("messages" if isinstance(x, list) else repr(x)[:40] for x in (prompt, answer))
            raise RecipeError(
                f"tokenizer.join takes a prompt and an answer, both texts, not ({given}); use "
                "tokenizer.chat(messages) for messages"
            )
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
        """Encode messages with the chat template. Only the assistant's tokens are learned.

        Raises:
            DataError: if there is no chat template, it rejects the messages, or the vocabulary lacks a
                character.
        """
        ids, mask = self.template().encode_conversation(messages, self.stop_ids)
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
        """Return the chat template.

        Raises:
            DataError: if there is none.
        """
        if self.chat_template is None:
            raise DataError(
                "this tokenizer has no chat template, so messages cannot be encoded; set chat_template "
                "or pass texts"
            )
        return self.chat_template

    def save(self, directory: str) -> list[Path]:
        """Write the tokenizer for `AutoTokenizer.from_pretrained`, and return its files."""
        names = self._hf.save_pretrained(directory)
        return [path for path in map(Path, names) if path.is_file()]  # it names files that it did not need

    def _encode(self, text: str) -> tuple[int, ...]:
        ids: list[int] = self._hf(text, add_special_tokens=False)["input_ids"]
        check_known(self._hf, text, ids)
        return tuple(ids)


def _load(settings: TokenizerSettings) -> Any:
    if settings.path is not None and any((Path(settings.path) / name).exists() for name in _TOKENIZER_FILES):
        from transformers import AutoTokenizer, PreTrainedTokenizerFast

        loader: Any = PreTrainedTokenizerFast if _is_generic(Path(settings.path)) else AutoTokenizer
        try:
            return loader.from_pretrained(settings.path, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # the tokenizers library raises plain exceptions
            reason = " ".join(str(error).split())
            raise DataError(
                f"the tokenizer in {settings.path} cannot be loaded: {type(error).__name__}: {reason:.200}; "
                "restore its files"
            ) from error
    if settings.alphabet is not None:
        return character_tokenizer(settings.alphabet)
    if settings.path is not None:
        raise DataError(f"{settings.path} holds no tokenizer; save one there or set an alphabet")
    raise DataError("a tokenizer needs the path of a checkpoint or an alphabet; set one of them")


def _is_generic(directory: Path) -> bool:
    """Return whether a tokenizer was saved as `PreTrainedTokenizerFast`, such as a character tokenizer.

    Beside the config of a model, `AutoTokenizer` loads it as that of the model's family instead, which drops
    unknown characters.
    """
    file = directory / "tokenizer_config.json"
    saved = read_json_object(file) if file.exists() else {}
    return saved.get("tokenizer_class") in ("TokenizersBackend", "PreTrainedTokenizerFast")


def _stop_ids(eos_id: int | None, path: str | None) -> tuple[int, ...]:
    """Return the tokenizer's end-of-text token and those of the checkpoint's generation config."""
    ids = [] if eos_id is None else [eos_id]
    file = None if path is None else Path(path) / "generation_config.json"
    if file is not None and file.exists():
        ends = read_json_object(file).get("eos_token_id")
        listed = ends if isinstance(ends, list) else [] if ends is None else [ends]
        if not all(type(end) is int and end >= 0 for end in listed):
            raise DataError(f"{file}: eos_token_id is {ends!r}; it must be a token's id, or a list of ids")
        ids += listed
    return tuple(dict.fromkeys(ids))


def character_tokenizer(alphabet: str) -> Any:
    """Build a Hugging Face tokenizer with one token per character, for models trained on small alphabets.

    Raises:
        DataError: if the alphabet is empty or has a character twice.
    """
    from transformers import PreTrainedTokenizerFast

    if not alphabet:
        raise DataError("the tokenizer's alphabet is empty; list the characters of your data")
    repeated = [c for i, c in enumerate(alphabet) if c in alphabet[:i]]
    if repeated:
        raise DataError(f"the tokenizer's alphabet has {repeated[0]!r} twice; list each character once")
    vocab = character_vocabulary(alphabet)
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    # For other programs that read a checkpoint; `TextTokenizer.prompt` adds the token itself.
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", vocab["<bos>"])]
    )
    build: Any = PreTrainedTokenizerFast
    return build(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
    )
