"""Chat templates, and checks of text before a tokenizer encodes it.

`ChatTemplate` encodes whole conversations with their learned tokens, and the text between two turns.
`find_length_problem` finds text that is too long for a model: encoding takes up to 400 bytes a character.
`check_known` refuses text that a tokenizer has no tokens for, which it would replace without a word.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from os.path import commonprefix
from typing import Any

from hflow.base.errors import BackendError, DataError, nearest, shorten
from hflow.data.text.messages import content_parts, image_urls
from hflow.types.image import ProcessedImage
from hflow.vision.processor import ImageProcessor

_CHARACTERS_PER_TOKEN = 16
"""Text with fewer characters per token that the model can read is encoded whatever it is."""


def find_length_problem(tokenizer: Any, text: str, max_tokens: int | None) -> str | None:
    """Return the reason why a text cannot fit into a sequence of a model; None if it may.

    Only the beginning of a long text is encoded. If that has twice the tokens that fit, the rest cannot make
    them so few. Without `max_tokens` there is no bound.
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


def check_known(tokenizer: Any, text: str, ids: Sequence[int]) -> None:
    """Check that no id replaces characters that the tokenizer lacks.

    The token for unknown text may have another use, such as the end of a text. Where the text names it, it is
    allowed.

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


Messages = Sequence[Mapping[str, Any]]
Schemas = Sequence[Mapping[str, Any]]
"""JSON schemas of tools."""

_GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
_REPLY = "a-reply-of-the-model"
"""Placeholder for an assistant's turn where only the text after it is needed."""


def _probes(text: str) -> list[list[dict[str, Any]]]:
    """Return conversations that say `text`, in the forms of which a template may accept only some."""
    parts = [{"type": "text", "text": text}]
    return [
        [{"role": "user", "content": text}],
        [{"role": "user", "content": text}, {"role": "assistant", "content": text}],
        [{"role": "system", "content": text}, {"role": "user", "content": text}],
        [{"role": "user", "content": parts}],
    ]


def template_problem(render: Callable[[list[dict[str, Any]]], str]) -> str | None:
    """Return the reason why a chat template cannot be used, as a sentence's end; None if it can."""
    from jinja2 import TemplateSyntaxError

    constant = None
    for pair in zip(_probes("one"), _probes("two"), strict=True):
        try:
            first, second = map(render, pair)
        except TemplateSyntaxError as error:
            return f"is not a Jinja template: {error}; fix chat_template"
        except Exception:  # noqa: BLE001 - a template may reject messages, as it likes
            continue
        if first != second:
            return None
        constant = first
    if constant is None:
        return None
    shown = shorten(" ".join(constant.split()), 40)
    return (
        f"renders {shown!r} whatever the messages are, so every prompt would be equal; set chat_template to "
        "a template that uses `messages`, or to a file with one"
    )


def written_template_problem(template: str) -> str | None:
    """Return the reason why a template's text cannot be used, without a tokenizer; None if it can."""
    from transformers.utils.chat_template_utils import render_jinja_template

    tokens = dict.fromkeys(("bos_token", "eos_token", "unk_token", "pad_token"), "")

    def render(messages: list[dict[str, Any]]) -> str:
        (text,), _ = render_jinja_template([messages], chat_template=template, **tokens)
        return str(text)

    return template_problem(render)


_OWN_VARIABLES = frozenset(
    {
        "messages",
        "tools",
        "documents",
        "add_generation_prompt",
        "bos_token",
        "eos_token",
        "unk_token",
        "pad_token",
    }
)
"""Variables of chat templates that are not settings."""


def kwargs_problem(template: str, kwargs: Mapping[str, Any]) -> str | None:
    """Return the reason why variables have no effect on a chat template; None if they have."""
    from jinja2 import TemplateError, meta
    from transformers.utils.chat_template_utils import _compile_jinja_template

    if not kwargs:
        return None
    try:
        environment = _compile_jinja_template(template).environment
        used = meta.find_undeclared_variables(environment.parse(template)) - _OWN_VARIABLES
    except TemplateError as error:
        return f"is not a Jinja template: {error}"
    for name in kwargs:
        if name not in used:
            known = ", ".join(sorted(used - set(environment.globals))) or "none"
            hint = f"{nearest(name, used)} (it uses: {known})"
            return f"does not use the variable {name!r} of template_kwargs{hint}"
    return None


def processed_images(processor: ImageProcessor | None, messages: Messages) -> list[ProcessedImage]:
    """Return the images in messages as a model takes them, in order.

    Raises:
        DataError: if the model only reads text, or does not take an image.
    """
    urls = image_urls(messages)
    if urls and processor is None:
        raise DataError(
            "a message has an image, but the model only reads text; use a vision-language model, or remove it"
        )
    return [] if processor is None else [processor.image(url) for url in urls]


def _for_template(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message with the parts that chat templates know."""
    if isinstance(message["content"], str):
        return dict(message)
    parts = [part if part["type"] == "text" else {"type": "image"} for part in message["content"]]
    return {**message, "content": parts}


class ChatTemplate:
    """A tokenizer's Jinja chat template.

    What it makes of messages is encoded as raw text is: characters that the vocabulary lacks are a
    `DataError`.
    """

    def __init__(
        self,
        tokenizer: Any,
        stop_ids: Sequence[int],
        max_tokens: int | None = None,
        kwargs: Mapping[str, Any] | None = None,
        images: ImageProcessor | None = None,
    ) -> None:
        """Check the template.

        Args:
            max_tokens: tokens of the model's longest sequence; None: there is no bound.
            kwargs: variables that the template uses.
            images: prepares images; None: the model only reads text.

        Raises:
            DataError: if it is not a Jinja template, renders the same text for all messages, or does not
                use a variable.
        """
        self._tokenizer = tokenizer
        self._kwargs = dict(kwargs or {})
        self._images = images
        self._stop_ids = frozenset(stop_ids)
        self._max_tokens = max_tokens
        problem = template_problem(
            lambda talk: tokenizer.apply_chat_template(talk, tokenize=False, **self._kwargs)
        )
        if problem is None:
            problem = kwargs_problem(str(tokenizer.chat_template), self._kwargs)
        if problem is not None:
            raise DataError(f"the chat template {problem}")

    def prompt(self, messages: Messages, tools: Schemas = ()) -> list[int]:
        """Return the ids of messages and the opening of the assistant's turn, with `tools` offered."""
        return self._encode(self._render(messages, opening=True, tools=tools))

    def continuation(self, added: Messages, end: str, tools: Schemas = ()) -> list[int]:
        """Return the ids that follow a generated assistant turn: its end, new messages, and the next opening.

        Only this text is encoded, so the tokens before it stay unchanged.

        Args:
            end: the text that ended the turn, empty if it was cut. If the template ends turns with it, it is
                not repeated.

        Raises:
            DataError: if the template hides the assistant's turn or rejects the messages.
        """
        after = self._after_reply(added, tools)
        is_end = self._closing is None or self._closing.startswith(end)
        return self._encode(after.removeprefix(end) if is_end else after)

    @cached_property
    def _closing(self) -> str | None:
        """What the template puts after an assistant's turn, whatever the user says next; None: not known."""
        try:
            texts = [self._after_reply([{"role": "user", "content": text}]) for text in "ab"]
        except DataError:  # it rejects these messages
            return None
        return commonprefix(texts)  # noqa: RUF071 - of characters

    def _after_reply(self, added: Messages, tools: Schemas = ()) -> str:
        """Return the text after an assistant's turn, with the messages after it and the next opening."""
        turns = [{"role": "user", "content": ""}, {"role": "assistant", "content": _REPLY}]
        _, reply, after = self._render([*turns, *added], opening=True, tools=tools).partition(_REPLY)
        if not reply:
            raise DataError(
                "the chat template omits the assistant's turn, so a conversation cannot be continued; "
                "fix the template"
            )
        return after

    def encode_conversation(self, messages: Messages) -> tuple[list[int], list[bool]]:
        """Return the ids of a conversation, and which of them the assistant generated.

        The template's `{% generation %}` tags mark generated text. Without tags, it is the text that the
        template adds with each assistant message after the opening, up to the turn's stop token.

        Raises:
            DataError: if the template rewrites earlier turns or rejects the messages, or these are too long
                for the model.
        """
        text = self._render(messages, opening=False)
        problem = find_length_problem(self._tokenizer, text, self._max_tokens)
        if problem is not None:
            raise DataError(problem)
        has_images = any(content_parts(messages))
        if _GENERATION_TAG.search(str(self._tokenizer.chat_template)) and not has_images:
            ids, mask = self._encode_with_tags(messages)
            check_known(self._tokenizer, text, ids)
            return ids, mask
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids, offsets = encoded["input_ids"], encoded["offset_mapping"]
        check_known(self._tokenizer, text, ids)
        mask = [False] * len(ids)
        for start, end in self._assistant_spans(messages, text):
            for t, (first, last) in enumerate(offsets):
                if start <= first and last <= end and first < last:
                    mask[t] = True
                    if ids[t] in self._stop_ids:
                        break
        return ids, mask

    def _encode_with_tags(self, messages: Messages) -> tuple[list[int], list[bool]]:
        encoded = self._tokenizer.apply_chat_template(
            list(messages), return_dict=True, return_assistant_tokens_mask=True, **self._kwargs
        )
        return encoded["input_ids"], [bool(flag) for flag in encoded["assistant_masks"]]

    def _assistant_spans(self, messages: Messages, text: str) -> list[tuple[int, int]]:
        """Return the character ranges of `text` that the template adds with each assistant message."""
        spans = []
        for i, message in enumerate(messages):
            if message.get("role") == "assistant":
                before = self._render(messages[:i], opening=True)
                after = self._render(messages[: i + 1], opening=False)
                if not (after.startswith(before) and text.startswith(after)):
                    raise DataError(
                        "the chat template rewrites earlier turns, so the assistant's tokens are unknown; "
                        "mark them with {% generation %} tags"
                    )
                spans.append((len(before), len(after)))
        return spans

    def _render(self, messages: Messages, opening: bool, tools: Schemas = ()) -> str:
        images = processed_images(self._images, messages)
        try:
            text: str = self._tokenizer.apply_chat_template(
                [_for_template(message) for message in messages] if images else list(messages),
                tools=list(tools) or None,
                tokenize=False,
                add_generation_prompt=opening,
                **self._kwargs,
            )
        except Exception as error:  # a template may raise anything
            raise DataError(f"the chat template rejects the messages: {error}") from error
        return text if self._images is None else self._images.expand(text, images)

    def _encode(self, text: str) -> list[int]:
        problem = find_length_problem(self._tokenizer, text, self._max_tokens)
        if problem is not None:
            raise BackendError(problem)
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        check_known(self._tokenizer, text, ids)
        return ids
