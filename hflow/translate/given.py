"""`Given`: the values of a configuration file of another library, read key by key.

What is read is translated, unless the reader leaves it with a reason. So no key is lost: one that no code
reads is left too.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from hflow.base.errors import nearest, shorten
from hflow.translate.table import Row, find_row

Place = Literal["translated", "automatic", "left"]
Reason = Literal["differs", "value", "manual", "missing", "unknown", "no effect"]
_TRUE, _FALSE = ("true", "yes", "on"), ("false", "no", "off")


@dataclass(frozen=True)
class Entry:
    """One key of the input: translated, chosen by hflow, or left, with the reason."""

    key: str
    value: Any
    place: Place
    ours: tuple[str, ...] = ()
    """hflow's keys."""
    reason: Reason | None = None
    """Why the key is left. `differs`: its setting was written, and means something else; `value`: the value
    has no counterpart, or was not understood; `manual`: hflow has it in another form, which the note names;
    `missing`: the key has no counterpart; `unknown`: it is not a key of
    this version; `no effect`: it has none beside the other keys."""
    note: str = ""
    is_given: bool = True
    """False for a key that the file does not set, whose default is worth a note."""
    is_default: bool = False
    """Whether the value is the other library's default."""

    @property
    def needs_attention(self) -> bool:
        """Whether the key is left, and may change a run. Without a counterpart it does not at its default."""
        is_absent = self.reason in ("manual", "missing") and self.is_default
        changes_nothing = self.reason == "no effect" or is_absent
        return self.place == "left" and not changes_nothing

    def to_json(self) -> dict[str, Any]:
        """Return the entry as a mapping."""
        return {
            "key": self.key,
            "value": self.value,
            "place": self.place,
            "ours": list(self.ours),
            "reason": self.reason,
            "note": self.note,
            "is_given": self.is_given,
        }


class Given:
    """The values of a file, by dotted key, and the other library's defaults of all other keys.

    A value of another type than expected is left with a message, and the default is used in its place.
    """

    def __init__(self, values: Mapping[str, Any], rows: Sequence[Row], defaults: Mapping[str, Any]) -> None:
        """Take the values of the file and the defaults by dotted key, and the table of the library."""
        self.values = values
        self.rows = rows
        self.defaults = defaults
        self._read: set[str] = set()
        self._notes: dict[str, tuple[Reason, str]] = {}

    def value(self, key: str) -> Any:
        """Return the value of a key, or its default."""
        self._read.add(key)
        return self.values[key] if key in self.values else self.defaults[key]

    def is_set(self, key: str) -> bool:
        """Return whether the file sets a key to another value than null."""
        return self.values.get(key) is not None

    def number(self, key: str) -> float | int | None:
        """Return a number. YAML takes `1e-6` for text, which counts as a number too."""
        value = self.value(key)
        number: float | int | None = self.defaults[key]
        if isinstance(value, str):
            try:
                return float(value)
            except ValueError:
                self._not_understood(key, "a number")
        elif value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
            return value
        else:
            self._not_understood(key, "a number")
        return number

    def whole(self, key: str) -> int | None:
        """Return a whole number."""
        value = self.number(key)
        if value is not None and value != int(value):
            self._not_understood(key, "a whole number")
            value = self.defaults[key]
        return None if value is None else int(value)

    def flag(self, key: str) -> bool:
        """Return true or false. Null is false."""
        value = self.value(key)
        if isinstance(value, str) and value.lower() in (*_TRUE, *_FALSE):
            return value.lower() in _TRUE
        if value is not None and not isinstance(value, bool):
            self._not_understood(key, "true or false")
            value = self.defaults[key]
        return bool(value)

    def text(self, key: str) -> str | None:
        """Return a text."""
        value = self.value(key)
        if value is not None and not isinstance(value, str):
            self._not_understood(key, "text")
            value = self.defaults[key]
        return None if value is None else str(value)

    def choice(self, key: str, choices: Collection[Any], note: str = "") -> Any:
        """Return a value; the default if it is none of the choices, which leaves the key with the note."""
        value = self.value(key)
        if value in choices:
            return value
        self.leave(key, note or f"hflow has no counterpart of {shorten(repr(value), 60)}")
        return self.defaults[key]

    def leave(self, key: str, note: str) -> None:
        """Leave a key to the user: its value has no counterpart. The first note counts."""
        self._note(key, "value", note)

    def differs(self, key: str, note: str) -> None:
        """Say that a key is translated, and what is different in hflow."""
        self._note(key, "differs", note)

    def ignore(self, prefix: str, switch: str) -> None:
        """Say that keys which begin so have no effect, as another key turns them off."""
        for key in self.values:
            if key.startswith(prefix):
                self._note(key, "no effect", f"{switch} decides")

    def _note(self, key: str, reason: Reason, note: str) -> None:
        self._read.add(key)
        self._notes.setdefault(key, (reason, note))

    def _not_understood(self, key: str, expected: str) -> None:
        value = shorten(repr(self.values[key]), 60)
        default = self.defaults[key]
        self.leave(key, f"{value} was not understood; {expected} is expected, and {default!r} is taken")

    def entries(self) -> list[Entry]:
        """Return an entry for each key of the file, in its order, and for each default that has a note."""
        given = [self._entry(key) for key in self.values]
        others = [key for key in self._notes if key not in self.values]
        return given + [
            Entry(key, self.defaults[key], "left", self._ours(key), *self._notes[key], is_given=False)
            for key in others
        ]

    def _ours(self, key: str) -> tuple[str, ...]:
        row = find_row(self.rows, key)
        return row.ours if row is not None else ()

    def _entry(self, key: str) -> Entry:
        value, row = self.values[key], find_row(self.rows, key)
        if row is None or (key not in self.defaults and key not in self._notes):
            note = f"it is no key of this version{nearest(key, self.defaults)}"
            return Entry(key, value, "left", reason="unknown", note=note)
        is_default = key in self.defaults and value == self.defaults[key]
        if key in self._notes:
            reason, note = self._notes[key]
            return Entry(key, value, "left", row.ours, reason, note, is_default=is_default)
        if row.status == "automatic":
            return Entry(key, value, "automatic", row.ours, note=_plain(row.note), is_default=is_default)
        if row.status != "same":
            return Entry(key, value, "left", (), row.status, _plain(row.note), is_default=is_default)
        if key in self._read:
            return Entry(key, value, "translated", row.ours, is_default=is_default)
        note = "no effect beside the other keys"
        return Entry(key, value, "left", row.ours, "no effect", note, is_default=is_default)


def _plain(note: str) -> str:
    """Return a note of a table without the marks of Markdown. A link to a page names its file."""
    named = re.sub(r"\[([^\]]*)\]\(\.\./(\w[^)#]*)[^)]*\)", r"\1 (docs/\2)", note)
    return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", named).replace("`", "")
