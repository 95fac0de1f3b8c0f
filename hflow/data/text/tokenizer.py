"""`TextTokenizer`: encodes texts and messages, and marks which tokens are learned.

transformers is imported when a tokenizer is built: this takes seconds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from hflow.base.errors import BackendError, DataError, RecipeError, shorten
from hflow.base.files import read_json_object
from hflow.data.text.chat import ChatTemplate, check_known, find_length_problem, processed_images
from hflow.data.text.messages import normal_messages, with_images
from hflow.data.text.vocabulary import character_vocabulary
from hflow.types import Trajectory
from hflow.types.image import PlacedImage, ProcessedImage
from hflow.vision.interface import vision_family
from hflow.vision.processor import ImageProcessor, place_images, saved_settings, whole_config

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
"""A directory without any of these holds no tokenizer. transformers would make an empty one."""

_NAMED_TOKENS = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
"""Special tokens to which transformers gives a role. None of them is part of an answer."""

_TOKENS_PER_CHARACTER = 4
"""Maximum tokens of one character: the bytes of its UTF-8 code."""

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""What stands for the bytes of an unfinished character."""

NUM_CACHED_TEXTS = 4096
"""Number of texts whose ids are cached, as group members and evaluations encode the same prompts again."""
MAX_CACHED_CHARACTERS = 1 << 17
"""Length of the longest text whose ids are cached. The ids of a token take 40 bytes."""


@dataclass(frozen=True)
class TokenizerSettings:
    """Settings of a model's tokenizer: a checkpoint directory, or an alphabet."""

    path: str | None = None
    """A local directory for `AutoTokenizer`."""
    alphabet: str | None = None
    """Characters of a character tokenizer, used if the path has no tokenizer."""
    chat_template: str | None = None
    """A Jinja chat template that replaces the tokenizer's own."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the chat template."""
    eos_ids: tuple[int, ...] = ()
    """Stop tokens of a configured architecture, which has no files that name them."""
    max_tokens: int | None = None
    """Tokens of the model's longest sequence. Text that is far longer is refused before it is encoded."""
    vision: Mapping[str, Any] | None = None
    """The HF config of a model that may see; defaults may be missing. None: it only reads text."""
    min_pixels: int | None = None
    """Pixels to which smaller images are enlarged; None: as the checkpoint says."""
    max_pixels: int | None = None
    """Pixels to which larger images are made smaller; None: as the checkpoint says."""


class TextTokenizer:
    """A model's tokenizer (`hflow.types.Tokenizer`), with what episodes need besides.

    Attributes:
        settings: what it was built from.
        prefix_ids: tokens that the tokenizer puts in front of a text, such as the begin-of-text token; empty
            if it adds none.
        stop_ids: tokens that end a turn: the tokenizer's end-of-text token, and those that
            `generation_config.json` and `config.json` name.
        chat_template: None if the tokenizer has none.
        images: prepares images for the model; None if it only reads text.
    """

    def __init__(self, settings: TokenizerSettings) -> None:
        """Load or build the tokenizer.

        Raises:
            DataError: if the settings do not lead to a tokenizer.
        """
        self.settings = settings
        self.images = image_processor(settings)
        self._hf = _load(settings, () if self.images is None else self.images.family.special_tokens)
        if self.images is not None:
            self._check_image_token(self.images)
        if settings.chat_template is not None:
            self._hf.chat_template = settings.chat_template
        self.prefix_ids = _prefix_ids(self._hf)
        self.stop_ids = _stop_ids(self._hf.eos_token_id, settings)
        has_template = bool(self._hf.chat_template)
        if settings.template_kwargs and not has_template:
            raise DataError("template_kwargs are variables of a chat template, but the tokenizer has none")
        max_tokens = settings.max_tokens
        self.chat_template = (
            ChatTemplate(self._hf, self.stop_ids, max_tokens, settings.template_kwargs, self.images)
            if has_template
            else None
        )
        named = [getattr(self._hf, f"{name}_token_id") for name in _NAMED_TOKENS]
        self._ends = frozenset(i for i in (*self.stop_ids, *named) if i is not None)
        self._ids = lru_cache(NUM_CACHED_TEXTS)(self._encode)

    @property
    def num_tokens(self) -> int:
        """Size of the vocabulary, special tokens included."""
        return len(self._hf)

    @property
    def template_text(self) -> str | None:
        """The chat template, as Jinja text; None if there is none."""
        return str(self._hf.chat_template) if self.chat_template is not None else None

    @property
    def has_chat_template(self) -> bool:
        """Whether `chat` can encode messages."""
        return self.chat_template is not None

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without special tokens.

        Raises:
            DataError: if the vocabulary lacks a character; names it.
        """
        return list(self._ids(text) if len(text) <= MAX_CACHED_CHARACTERS else self._encode(text))

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, without special tokens."""
        text: str = self._hf.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    def decode_answer(self, ids: Sequence[int]) -> str:
        """Return the text of generated ids, with the special tokens that belong to it, such as `<tool_call>`.

        Tokens that end or pad a turn are left out, as are the tokenizer's other named ones (`_NAMED_TOKENS`).
        """
        return self.decode_with_special([token for token in ids if token not in self._ends])

    def token_ends(self, ids: Sequence[int]) -> list[int]:
        """Return the end of the text of each token in `decode_answer(ids)`, in characters.

        It is -1 for a token that ends within a character, and one more than the length of the text for a last
        token that ends the turn.

        Raises:
            DataError: if the text of the ids is not that of one token after the other.
        """
        whole, text = self.decode_answer(ids), ""
        ends: list[int] = []
        anchor = complete = 0  # a window of tokens: some tokenizers drop a space in front of the first one
        for position, token in enumerate(ids, start=1):
            if token in self._ends:
                is_end = position == len(ids) and token in self.stop_ids
                ends.append(len(whole) + 1 if is_end else len(text))
                continue
            known, found = (self.decode_answer(ids[anchor:end]) for end in (complete, position))
            added = found[len(known) :]
            if added.endswith(_UNFINISHED) and not whole.startswith(text + added):
                ends.append(-1)
                continue
            text += added
            ends.append(len(text))
            anchor, complete = complete, position
        if not whole.startswith(text) or whole[len(text) :].strip(_UNFINISHED):
            raise DataError(f"the text {shorten(whole, 60)!r} is not that of one token after the other")
        return ends

    def decode_with_special(self, ids: Sequence[int]) -> str:
        """Return the text of ids, with special tokens."""
        text: str = self._hf.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def decode_token(self, token: int) -> str:
        """Return the text of one token, also of a special one."""
        return self.decode_with_special([token])

    def encode_prompt(self, text: str) -> list[int]:
        """Return the ids of a raw-text prompt, as the tokenizer begins a text.

        A text that begins with the begin-of-text token, as one that a chat template rendered does, gets no
        second one.

        Raises:
            BackendError: if the text is too long for the model.
            DataError: for the reasons of `encode`.
        """
        problem = find_length_problem(self._hf, text, self.settings.max_tokens)
        if problem is not None:
            raise BackendError(problem)
        ids, prefix = self.encode(text), list(self.prefix_ids)
        return ids if ids[: len(prefix)] == prefix else prefix + ids

    def encode_content(self, content: Any) -> tuple[list[int], tuple[PlacedImage, ...]]:
        """Return the ids of a text or of parts of a message in its one form, and the places of its images.

        Raises:
            BackendError: if the text is too long for the model.
            DataError: for the reasons of `encode`, and for images that the model does not take.
        """
        text, images = self._raw_text([content])
        ids = self.encode_prompt(text)
        return ids, self.placed(ids, images)

    def encode_added(self, contents: Sequence[Any]) -> list[int]:
        """Return the ids of the contents of messages, one after the other.

        Raises:
            DataError: for the reasons of `encode_content`.
        """
        return self.encode(self._raw_text(contents)[0])

    def _raw_text(self, contents: Sequence[Any]) -> tuple[str, list[ProcessedImage]]:
        """Return the text of contents with all tokens of their images, and the images."""
        images = processed_images(self.images, [{"content": content} for content in contents])
        mark = "" if self.images is None else self.images.family.placeholder
        parts = [
            part if isinstance(part, str) else part.get("text", mark)
            for content in contents
            for part in ([content] if isinstance(content, str) else content)
        ]
        text = "".join(parts)
        return (text if self.images is None else self.images.expand(text, images)), images

    def placed(
        self, ids: Sequence[int], images: Sequence[ProcessedImage], offset: int = 0
    ) -> tuple[PlacedImage, ...]:
        """Return the places of images among the tokens `ids`, in a sequence of which they begin at `offset`.

        Raises:
            DataError: if they are not there.
        """
        if self.images is None or not images:
            return ()
        return place_images(ids, images, self.images.config["image_token_id"], offset)

    def _check_image_token(self, processor: ImageProcessor) -> None:
        """Check that tokenizer and model have the same image token.

        Raises:
            DataError: if they have not.
        """
        token, wanted = processor.family.image_token, processor.config.get("image_token_id")
        found = self._hf.convert_tokens_to_ids(token)
        if found != wanted:
            raise DataError(
                f"the tokenizer has {token!r} as token {found}, but the model's image_token_id is {wanted}; "
                "set it to the tokenizer's, or use the tokenizer of the model's checkpoint"
            )

    def turn_end(self, ids: Sequence[int], stops: Sequence[str] = ()) -> str:
        """Return the text that ended a generated turn: a stop token or stop string; empty if it was cut."""
        if not ids:
            return ""
        if ids[-1] in self.stop_ids or ids[-1] in self._hf.all_special_ids:
            return self.decode_token(ids[-1])
        window = _TOKENS_PER_CHARACTER * max(map(len, stops), default=0)
        text = self.decode_answer(ids[-window:]) if window else ""
        return next((stop for stop in stops if text.endswith(stop)), "")

    def join(self, prompt: str, answer: str | None = None, images: Sequence[Any] | None = None) -> Trajectory:
        """Return a trajectory of a prompt (masked) and an answer with its end-of-text token (learned).

        An answer whose text already ends with a stop token gets no second one. Images are in the places that
        the prompt has for them (`with_images`).

        Raises:
            RecipeError: for anything but two texts.
            DataError: if the tokenizer has no end-of-text token, or a text is too long for the model.
        """
        if not isinstance(prompt, str) or not isinstance(answer, str):
            given = ", ".join("messages" if isinstance(x, list) else repr(x)[:40] for x in (prompt, answer))
            raise RecipeError(
                f"tokenizer.join takes a prompt and an answer, both texts, not ({given}); use "
                "tokenizer.chat(messages) for messages"
            )
        if self._hf.eos_token_id is None:
            raise DataError("the tokenizer has no end-of-text token, which join needs; set its eos_token")
        for text in (prompt, answer):
            problem = find_length_problem(self._hf, text, self.settings.max_tokens)
            if problem is not None:
                raise DataError(problem)
        ids = self.encode(answer)
        if not ids or ids[-1] not in self.stop_ids:
            ids.append(self._hf.eos_token_id)
        (asked,) = with_images([{"role": "user", "content": prompt}], images)
        prompt_ids, placed = self.encode_content(asked["content"])
        return Trajectory.learned(
            tuple(prompt_ids),
            tuple(ids),
            messages=(asked, {"role": "assistant", "content": answer}),
            completion=answer,
            num_turns=1,
            pixels=placed,
        )

    def chat(self, messages: Sequence[Mapping[str, Any]], images: Sequence[Any] | None = None) -> Trajectory:
        """Encode messages with the chat template. Only the assistant's tokens are learned.

        Images are in the places that the messages have for them (`with_images`).

        Raises:
            DataError: if there is no chat template, it rejects the messages, the vocabulary lacks a
                character, or the model does not take the images.
        """
        template, messages = self.template(), with_images(normal_messages(messages), images)
        ids, mask = template.encode_conversation(messages)
        replies = [m["content"] for m in messages if m["role"] == "assistant"]
        return Trajectory(
            input_ids=tuple(ids),
            loss_mask=tuple(mask),
            behav_logprobs=(0.0,) * len(ids),
            versions=(-1,) * len(ids),
            messages=tuple(messages),
            completion=replies[-1] if replies else "",
            num_turns=len(replies),
            pixels=self.placed(ids, processed_images(self.images, messages)),
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
        names = [*self._hf.save_pretrained(directory), *self._save_processor(Path(directory))]
        return [path for path in map(Path, names) if path.is_file()]  # it names files that it did not need

    def _save_processor(self, directory: Path) -> list[str]:
        """Write the image processor, and return its files."""
        return [] if self.images is None else self.images.save(directory)

    def save_for_server(self, directory: Path) -> None:
        """Write the tokenizer for a server of another kind, which replies with what `decode_answer` returns.

        Such a server leaves out special tokens, so those of an answer are written as ordinary ones.
        It ends turns at `stop_ids`.
        """
        self.save(str(directory))
        self.save_stop_ids(directory)
        file, settings = directory / "tokenizer.json", directory / "tokenizer_config.json"
        if not file.is_file():
            return
        saved = read_json_object(file)
        for token in saved.get("added_tokens", ()):
            token["special"] = token["special"] and token["id"] in self._ends
        file.write_text(json.dumps(saved, ensure_ascii=False), encoding="utf-8")
        values = read_json_object(settings)
        if isinstance(values.get("extra_special_tokens"), list):
            text = json.dumps({**values, "extra_special_tokens": []}, indent=2)
            settings.write_text(text, encoding="utf-8")

    def save_stop_ids(self, directory: Path) -> None:
        """Let programs that read a model's directory end turns where hflow does.

        They read `generation_config.json`, or `config.json` where there is none. Files that already name the
        same tokens stay as they are.
        """
        file = directory / "generation_config.json"
        read = file if file.exists() else directory / "config.json"
        values = read_json_object(read) if read.exists() else {}
        if set(eos_ids(values, str(read))) != set(self.stop_ids):
            kept = values if read == file else {}
            text = json.dumps({**kept, "eos_token_id": list(self.stop_ids)}, indent=2)
            file.write_text(text + "\n", encoding="utf-8")

    def _encode(self, text: str) -> tuple[int, ...]:
        ids: list[int] = self._hf(text, add_special_tokens=False)["input_ids"]
        check_known(self._hf, text, ids)
        return tuple(ids)


def image_processor(settings: TokenizerSettings) -> ImageProcessor | None:
    """Return the image processor of a model; None if it only reads text.

    Raises:
        DataError: if its checkpoint has none, or transformers does not take its settings.
    """
    family = None if settings.vision is None else vision_family(settings.vision)
    if family is None or settings.vision is None:
        return None
    saved = saved_settings(None if settings.path is None else Path(settings.path))
    config = whole_config(settings.vision)
    limits = family.pixel_settings(config, saved, settings.min_pixels, settings.max_pixels)
    return ImageProcessor(family, config, {**saved, **limits})


def _load(settings: TokenizerSettings, of_images: Sequence[str] = ()) -> Any:
    if settings.path is not None and has_tokenizer(Path(settings.path)):
        from transformers import AutoTokenizer, PreTrainedTokenizerFast

        loader: Any = PreTrainedTokenizerFast if _is_generic(Path(settings.path)) else AutoTokenizer
        try:
            loaded = loader.from_pretrained(settings.path, local_files_only=True, trust_remote_code=False)
            if not isinstance(loaded.model_max_length, int | float):  # which its first call would show
                raise TypeError(f"model_max_length is {loaded.model_max_length!r}, and not a number")
            return loaded
        except Exception as error:  # the tokenizers library raises plain exceptions
            reason = " ".join(str(error).split())
            raise DataError(
                f"the tokenizer in {settings.path} cannot be loaded: {type(error).__name__}: {reason:.200}; "
                "restore its files"
            ) from error
    if settings.alphabet is not None:
        return character_tokenizer(settings.alphabet, of_images)
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


def has_tokenizer(directory: Path) -> bool:
    """Return whether a directory holds a tokenizer."""
    return any((directory / name).exists() for name in _TOKENIZER_FILES)


def eos_ids(config: Mapping[str, Any], where: str) -> tuple[int, ...]:
    """Return the end-of-text tokens in a model's or generation config.

    Raises:
        DataError: for anything but ids.
    """
    ends = config.get("eos_token_id")
    listed = ends if isinstance(ends, list | tuple) else [] if ends is None else [ends]
    if not all(type(end) is int and end >= 0 for end in listed):
        raise DataError(f"{where}: eos_token_id is {ends!r}; it must be a token's id, or a list of ids")
    return tuple(listed)


def _stop_ids(eos_id: int | None, settings: TokenizerSettings) -> tuple[int, ...]:
    """Return the tokens that end a turn. A checkpoint may name some in one file only, so all files count."""
    ids = [*([] if eos_id is None else [eos_id]), *settings.eos_ids]
    for name in ("generation_config.json", "config.json") if settings.path is not None else ():
        file = Path(str(settings.path)) / name
        if file.exists():
            ids += eos_ids(read_json_object(file), str(file))
    return tuple(dict.fromkeys(ids))


def _prefix_ids(tokenizer: Any) -> tuple[int, ...]:
    """Return the tokens that a tokenizer of Hugging Face puts in front of a text.

    Its `bos_token` does not tell: many tokenizers have one and do not add it.
    """
    special = set(tokenizer.all_special_ids)
    for token in range(len(tokenizer)):
        text = "" if token in special else tokenizer.decode([token])
        plain = tokenizer(text, add_special_tokens=False)["input_ids"] if text else []
        if plain and special.isdisjoint(plain):
            whole = tokenizer(text)["input_ids"]
            starts = [i for i in range(len(whole)) if whole[i : i + len(plain)] == plain]
            return tuple(whole[: starts[0]]) if starts else ()
    return ()


def character_tokenizer(alphabet: str, of_images: Sequence[str] = ()) -> Any:
    """Build a Hugging Face tokenizer with one token per character, for models trained on small alphabets.

    `of_images` are the tokens that mark images.

    Raises:
        DataError: if the alphabet is empty or has a character twice.
    """
    from transformers import PreTrainedTokenizerFast

    if not alphabet:
        raise DataError("the tokenizer's alphabet is empty; list the characters of your data")
    repeated = [c for i, c in enumerate(alphabet) if c in alphabet[:i]]
    if repeated:
        raise DataError(f"the tokenizer's alphabet has {repeated[0]!r} twice; list each character once")
    vocab = character_vocabulary(alphabet, of_images)
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(list(of_images))
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
