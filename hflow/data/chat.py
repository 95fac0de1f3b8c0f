"""Chat templates: encodes whole conversations with their learned tokens, and the text between two turns."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateSyntaxError

from hflow.data.unknown_tokens import check_known
from hflow.errors import DataError

Messages = Sequence[Mapping[str, Any]]
Schemas = Sequence[Mapping[str, Any]]
"""JSON schemas of tools."""

_GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
_REPLY = "a-reply-of-the-model"
"""Placeholder for an assistant's turn where only the text after it is needed."""


class ChatTemplate:
    """A tokenizer's Jinja chat template.

    What it makes of messages is encoded as raw text is: characters that the vocabulary lacks are a
    `DataError`.
    """

    def __init__(self, tokenizer: Any) -> None:
        """Check the template's syntax.

        Raises:
            DataError: if it is not a Jinja template.
        """
        self._tokenizer = tokenizer
        try:
            tokenizer.apply_chat_template([{"role": "user", "content": ""}], tokenize=False)
        except TemplateSyntaxError as error:
            raise DataError(
                f"the chat template is not a Jinja template: {error}; fix chat_template"
            ) from error
        except Exception:  # noqa: BLE001 - the template may reject these messages, as it likes
            return

    def prompt(self, messages: Messages, tools: Schemas = ()) -> list[int]:
        """Return the ids of messages and the opening of the assistant's turn, with `tools` offered."""
        return self._encode(self._render(messages, opening=True, tools=tools))

    def continuation(self, added: Messages, last_id: int | None, tools: Schemas = ()) -> list[int]:
        """Return the ids that follow a generated assistant turn: its end, new messages, and the next opening.

        Only this text is encoded, so the tokens before it stay unchanged.

        Args:
            added: messages after the assistant's turn.
            last_id: the turn's last token. If it is a special token with which the template ends the turn,
                that is not repeated.
            tools: schemas of the tools that the conversation offers.

        Raises:
            DataError: if the template hides the assistant's turn or rejects the messages.
        """
        turns = [{"role": "user", "content": ""}, {"role": "assistant", "content": _REPLY}]
        _, reply, after = self._render([*turns, *added], opening=True, tools=tools).partition(_REPLY)
        if not reply:
            raise DataError(
                "the chat template omits the assistant's turn, so a conversation cannot be continued; "
                "fix the template"
            )
        is_special = last_id in self._tokenizer.all_special_ids
        end = str(self._tokenizer.convert_ids_to_tokens(last_id)) if is_special else ""
        return self._encode(after.removeprefix(end))

    def encode_conversation(
        self, messages: Messages, stop_ids: Sequence[int]
    ) -> tuple[list[int], list[bool]]:
        """Return the ids of a conversation, and which of them the assistant generated.

        The template's `{% generation %}` tags mark generated text. Without tags, it is the text that the
        template adds with each assistant message after the opening, up to the turn's stop token.

        Raises:
            DataError: if the template rewrites earlier turns or rejects the messages.
        """
        text = self._render(messages, opening=False)
        if _GENERATION_TAG.search(str(self._tokenizer.chat_template)):
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
                    if ids[t] in stop_ids:
                        break
        return ids, mask

    def _encode_with_tags(self, messages: Messages) -> tuple[list[int], list[bool]]:
        encoded = self._tokenizer.apply_chat_template(
            list(messages), return_dict=True, return_assistant_tokens_mask=True
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
        try:
            text: str = self._tokenizer.apply_chat_template(
                list(messages), tools=list(tools) or None, tokenize=False, add_generation_prompt=opening
            )
        except Exception as error:  # a template may raise anything
            raise DataError(f"the chat template rejects the messages: {error}") from error
        return text

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        check_known(self._tokenizer, text, ids)
        return ids
