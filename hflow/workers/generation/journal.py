"""The journal of an episode: its effects in the order in which they began, and what came of them.

An episode that starts with a journal is replayed: the effects that are in it return what it says,
without being done again. So no token is drawn twice, and the episode comes to where it was.
"""

from __future__ import annotations

import dataclasses
import hashlib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hflow.backends.interface import GenerationResult, SamplingParams
from hflow.errors import EpisodeError


@dataclass(frozen=True)
class JournalEntry:
    """One effect of an episode."""

    kind: str
    """`complete`, `call`, `random` or `time`."""
    model: str
    """Of the engine that was asked."""
    request: Mapping[str, Any]
    outcome: Any = None
    """Tokens as `GenerationResult`; a tool's result and whether it failed; a number."""
    is_done: bool = True
    """False where the episode was left in it; a completion may have tokens already."""

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> JournalEntry:
        """The effect of a plain row."""
        effect = cls(**row)
        if effect.kind != "complete" or effect.outcome is None:
            return effect
        said = effect.outcome
        ids, logprobs, versions = (tuple(said[name]) for name in ("ids", "logprobs", "versions"))
        return dataclasses.replace(
            effect, outcome=GenerationResult(ids, logprobs, versions, said["stop_reason"])
        )


@dataclass(frozen=True)
class Journal:
    """The effects of one episode, as far as it came."""

    entries: tuple[JournalEntry, ...] = ()

    def to_json(self) -> list[dict[str, Any]]:
        """As plain values; `from_json` reads them, on any worker."""
        return [effect.to_json() for effect in self.entries]

    @classmethod
    def from_json(cls, rows: Sequence[Mapping[str, Any]]) -> Journal:
        """The journal of plain rows."""
        return cls(tuple(map(JournalEntry.from_json, rows)))


class JournalRecorder:
    """Writes the journal of a running episode, and reads the one that it started from.

    Effects that run at the same time are told apart by the order in which they begin; a body that
    makes this order depend on which of them ends first cannot be replayed, and is refused.
    """

    def __init__(self, past: Journal | None = None) -> None:
        self._past = past.entries if past else ()
        self._effects: list[JournalEntry] = []
        """As they began."""
        self._outcomes: dict[int, tuple[Any, bool]] = {}
        """What came of them since, and whether they are done."""
        self.has_diverged = False
        """Whether the episode did something else than its journal says."""

    def begin(self, kind: str, model: str, request: Mapping[str, Any]) -> tuple[int, JournalEntry]:
        """The next effect: its index, and what the journal has of it, or an effect that is not done.

        Raises:
            EpisodeError: when the journal has another effect there.
        """
        index = len(self._effects)
        effect = JournalEntry(kind, model, request, is_done=False)
        if index < len(self._past):
            self._compare(index, self._past[index], effect)
            effect = self._past[index]
        self._effects.append(effect)
        return index, effect

    def keep(self, index: int, outcome: Any, is_done: bool = True) -> None:
        """Write what came of an effect, so far or in the end. May be called from any thread."""
        self._outcomes[index] = (outcome, is_done)

    def finish(self) -> None:
        """The episode ended.

        Raises:
            EpisodeError: when the journal goes on.
        """
        if len(self._effects) < len(self._past):
            self.has_diverged = True
            raise EpisodeError(
                f"the episode ended after {len(self._effects)} effects, its journal has {len(self._past)}; "
                "it can only be replayed by the body that wrote it"
            )

    def _compare(self, index: int, past: JournalEntry, now: JournalEntry) -> None:
        what = _difference(past, now)
        if what is not None:
            self.has_diverged = True
            raise EpisodeError(
                f"effect {index} of the replayed episode is {what}; it can only be replayed by the body that "
                "wrote it"
            )

    @property
    def journal(self) -> Journal:
        """What is written, and what is yet to be replayed."""
        effects = list(self._effects)
        for index, (outcome, is_done) in tuple(self._outcomes.items()):
            effects[index] = dataclasses.replace(effects[index], outcome=outcome, is_done=is_done)
        return Journal((*effects, *self._past[len(effects) :]))


def completion_request(prompt_ids: Sequence[int], params: SamplingParams) -> dict[str, Any]:
    """What tells one completion from another, in short."""
    digest = hashlib.blake2b(array("q", prompt_ids).tobytes(), digest_size=8).hexdigest()
    return {
        "prompt": digest,
        "num_prompt": len(prompt_ids),
        "max_tokens": params.max_tokens,
        "stop": list(params.stop),
    }


def _difference(past: JournalEntry, now: JournalEntry) -> str | None:
    """What the episode asks for in the place of the journal's effect, in words; None where it is the same."""
    if (past.kind, past.model) != (now.kind, now.model):
        return f"{now.kind} of {now.model!r}, the journal has {past.kind} of {past.model!r}"
    for name in now.request:
        if past.request.get(name) != now.request[name]:
            return f"{now.kind} with {name}={now.request[name]!r}, the journal has {past.request.get(name)!r}"
    return None
