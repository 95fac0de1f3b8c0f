"""`Journal`: the record of one episode's effects, from which it can be replayed.

An effect is a completion, a call, an environment, a random number or a time. Effects are recorded in the
order in which they begin, with their outcomes. When an episode starts with a journal, its body runs from the
beginning, but effects that are in the journal return the recorded outcome without being performed. So no
token is drawn twice, and the episode gets to where it was. Environments and their calls are the exception:
they are made again, as only this restores their state.

A journal holds outcomes, not trajectories, which the body builds again.
"""

from __future__ import annotations

import dataclasses
import hashlib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hflow.base.errors import EpisodeError
from hflow.engines.interface import SamplingParams
from hflow.types.image import PlacedImage

_REPLAY_RULE = "A journal can only be replayed by the body that wrote it."


@dataclass(frozen=True)
class Journal:
    """The effects of one episode so far."""

    entries: tuple[JournalEntry, ...] = ()


@dataclass(frozen=True)
class JournalEntry:
    """One effect and its outcome."""

    kind: str
    """`complete`, `call`, `environment`, `random` or `time`; `restart` counts the times it began again."""
    model: str
    """The model of the engine that was called."""
    request: Mapping[str, Any]
    """What was requested, to compare with when the episode is replayed."""
    outcome: Any = None
    """For a completion a `GenerationResult`; for a call its result and whether it failed; for an environment
    its way of replay, or None if its calls are made again; else a number."""
    is_done: bool = True
    """False where the episode stopped during the effect; a completion may have some tokens then."""


class JournalRecorder:
    """Writes the journal of a running episode, and reads the one from which it started.

    Effects that run at the same time are identified by the order in which they begin. A body in which this
    order depends on timing cannot be replayed, and raises `EpisodeError`.

    Args:
        past: the journal from which the episode starts. If it cannot be replayed, the episode begins again.

    Attributes:
        has_diverged: whether the episode did something else than the journal from which it started.
        num_restarts: how often the episode began again.
    """

    def __init__(self, past: Journal | None = None) -> None:
        self.has_diverged = False
        entries = past.entries if past else ()
        self.num_restarts = sum(entry.outcome for entry in entries if entry.kind == "restart")
        self._past = tuple(entry for entry in entries if entry.kind != "restart")
        if any(entry.kind == "environment" and entry.outcome == "never" for entry in entries):
            self.num_restarts, self._past = self.num_restarts + 1, ()
        self._entries: list[JournalEntry] = []
        """The effects, in the order in which they began."""
        self._outcomes: dict[int, tuple[Any, bool]] = {}
        """Index -> the outcome recorded since, and whether it is final."""

    @property
    def interruption(self) -> str:
        """How an episode that was interrupted before continued, in one line; empty if it was not."""
        if self.num_restarts:
            times = "once" if self.num_restarts == 1 else f"{self.num_restarts} times"
            return f"the episode was interrupted {times} and began again, as an environment is never replayed"
        if self._past:
            return f"the episode was interrupted, and continued by its journal of {len(self._past)} effects"
        return ""

    @property
    def journal(self) -> Journal:
        """The entries recorded so far, and those that were not replayed yet."""
        entries = list(self._entries)
        for index, (outcome, is_done) in tuple(self._outcomes.items()):
            entries[index] = dataclasses.replace(entries[index], outcome=outcome, is_done=is_done)
        restart = [JournalEntry("restart", "", {}, self.num_restarts)] if self.num_restarts else []
        return Journal((*restart, *entries, *self._past[len(entries) :]))

    def begin(self, kind: str, model: str, request: Mapping[str, Any]) -> tuple[int, JournalEntry]:
        """Begin an effect.

        Returns:
            Its index, and its entry in the journal from which the episode started. Beyond the end of that
            journal, an entry that is not done.

        Raises:
            EpisodeError: when that journal has another effect there.
        """
        index = len(self._entries)
        entry = JournalEntry(kind, model, request, is_done=False)
        if index < len(self._past):
            self._check_same(index, self._past[index], entry)
            entry = self._past[index]
        self._entries.append(entry)
        return index, entry

    def record(self, index: int, outcome: Any, is_done: bool = True) -> None:
        """Record the outcome of an effect, or its outcome so far. May be called from any thread."""
        self._outcomes[index] = (outcome, is_done)

    def check_result(self, index: int, outcome: Any) -> None:
        """Compare the outcome of an effect that was made again with the journal's.

        Raises:
            EpisodeError: when they differ.
        """
        past = self._past[index]
        if past.outcome != outcome:
            self.has_diverged = True
            raise EpisodeError(
                f"effect {index} of the replayed episode, {past.request['tool']} of an environment, returned "
                f"{outcome['result']!r}, but the journal has {past.outcome['result']!r}. Let an environment "
                "depend on its arguments and calls only, and pass it a seed from engine.random()"
            )

    def finish(self) -> None:
        """End the episode.

        Raises:
            EpisodeError: when the journal from which it started has further effects.
        """
        if len(self._entries) < len(self._past):
            self.has_diverged = True
            raise EpisodeError(
                f"the replayed episode ended after {len(self._entries)} effects, but its journal has "
                f"{len(self._past)}. {_REPLAY_RULE}"
            )

    def _check_same(self, index: int, past: JournalEntry, now: JournalEntry) -> None:
        difference = _difference(past, now)
        if difference is not None:
            self.has_diverged = True
            raise EpisodeError(f"effect {index} of the replayed episode is {difference}. {_REPLAY_RULE}")


def completion_request(
    prompt_ids: Sequence[int], params: SamplingParams, images: Sequence[PlacedImage] = ()
) -> dict[str, Any]:
    """Return the `request` of a completion's entry: a digest of the prompt, and the limits."""
    content = hashlib.blake2b(array("q", prompt_ids).tobytes(), digest_size=8)
    for start, image in images:
        content.update(f"{start} {image.digest}".encode())
    return {
        "prompt": content.hexdigest(),
        "num_prompt": len(prompt_ids),
        "max_tokens": params.max_tokens,
        "stop": list(params.stop),
    }


def _difference(past: JournalEntry, now: JournalEntry) -> str | None:
    """Describe what the episode requests in place of a journal's entry; None where they are the same."""
    if (past.kind, past.model) != (now.kind, now.model):
        return f"{now.kind} of {now.model!r}, but the journal has {past.kind} of {past.model!r}"
    for name, value in now.request.items():
        if past.request.get(name) != value:
            return f"{now.kind} with {name}={value!r}, but the journal has {past.request.get(name)!r}"
    return None
