"""`diff_plans`: what changed between two plans, and what that means for a resume. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from hflow.errors import PlanError
from hflow.planner.diff.effects import Effect, Held, Point, effect_of, held
from hflow.planner.diff.facts import TOPICS as ESTIMATED
from hflow.planner.diff.facts import estimates, graph_facts, placed_facts
from hflow.planner.diff.formatting import Fact, apart, parting, plain, same
from hflow.planner.diff.plan_rows import Lone, Rows, Subjects, model_names, node_names
from hflow.planner.serialise import decisive_rows, rows_digest

_GRAVITY = tuple(Effect)
_NUM_CHARS = 60
"""Of a value, in a sentence."""


@dataclass(frozen=True)
class Change:
    """One difference between two plans."""

    topic: str
    """`recipe`, `node`, `replica`, `weights` ..."""
    subject: str
    """What it is about, as `actor@train` or `actor_train.clip`."""
    before: str | None
    """None where only the other plan has it."""
    after: str | None
    effect: Effect
    """What it means for a resume of the first plan's checkpoint under the second."""

    @property
    def is_estimated(self) -> bool:
        """Whether it speaks of estimates, which decide nothing in a run."""
        return self.topic in ESTIMATED

    def __str__(self) -> str:
        if self.before is None:
            return f"{self.topic} {self.subject} is new: {_cut(self.after)}"
        if self.after is None:
            return f"{self.topic} {self.subject} is gone: it was {_cut(self.before)}"
        return f"{self.topic} {self.subject}: {_cut(self.before)} -> {_cut(self.after)}"


@dataclass(frozen=True)
class PlanDiff:
    """All differences between two plans, causes before what follows from them."""

    before: str
    """Digest of the first plan's rows."""
    after: str
    changes: tuple[Change, ...]

    @property
    def effect(self) -> Effect:
        """The gravest effect."""
        return max((change.effect for change in self.changes), key=_GRAVITY.index, default=Effect.SAME)

    @property
    def decided(self) -> tuple[Change, ...]:
        """Changes of what a run does; none where the digests are equal."""
        return tuple(change for change in self.changes if not change.is_estimated)

    @property
    def verdict(self) -> str:
        """What a resume would have to do, in one line."""
        if not self.changes:
            return "the plans are the same"
        gravest = [change for change in self.changes if change.effect is self.effect]
        if self.effect is Effect.REFUSE:
            return f"cannot resume: {gravest[0]}{more(len(gravest) - 1)}"
        if self.effect is Effect.RESHARD:
            cuts = ", ".join(f"{change.subject} {change.before} -> {change.after}" for change in gravest)
            rest = "; results differ from here on" if self._gives_other_results else ""
            return f"a resume would have to reshard {cuts}{rest}"
        if self.effect is Effect.NEW:
            return f"nothing to reshard; results differ from here on: {gravest[0]}{more(len(gravest) - 1)}"
        return "nothing to reshard"

    @property
    def _gives_other_results(self) -> bool:
        return any(change.effect is Effect.NEW for change in self.changes)

    def to_json(self) -> dict[str, Any]:
        """The differences as plain values for `json.dumps`."""
        return {**asdict(self), "effect": self.effect, "verdict": self.verdict}


def more(count: int) -> str:
    """`, and 3 more`, or nothing."""
    return f", and {count} more" if count else ""


def diff_plans(before: Rows, after: Rows) -> PlanDiff:
    """Compare two plans by their JSON rows, so that stored ones can be compared too.

    Args:
        before: `to_json` of the one whose checkpoint a resume would take.
        after: `to_json` of the other.

    Raises:
        PlanError: for rows of another form than this version's.
    """
    try:
        changes = tuple(_changes(before, after))
        return PlanDiff(rows_digest(before), rows_digest(after), changes)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise PlanError(
            f"the rows of a plan are not such as this version of hflow makes ({reason})"
        ) from error


def _changes(before: Rows, after: Rows) -> Iterator[Change]:
    lone = Lone(node_names(before) ^ node_names(after), model_names(before) ^ model_names(after))
    both = held(before, after)
    decided = list(_compare(facts(before, lone), facts(after, lone), both))
    yield from decided or _rest(before, after)
    can_foresee = before["forecast"] is not None and after["forecast"] is not None
    yield from _compare(estimates(before, lone, can_foresee), estimates(after, lone, can_foresee), both)


def facts(rows: Rows, lone: Lone) -> dict[str, Subjects]:
    """All that a plan decides, by topic; `lone` is what the other plan has not."""
    return {**graph_facts(rows, lone), **placed_facts(rows, lone)}


def _compare(before: dict[str, Subjects], after: dict[str, Subjects], both: Held) -> Iterator[Change]:
    for topic in {**before, **after}:
        ours, theirs = before.get(topic, {}), after.get(topic, {})
        for subject in {**ours, **theirs}:
            yield from _subject(topic, subject, ours.get(subject), theirs.get(subject), both)


def _subject(
    topic: str, subject: str, before: dict[str, Fact] | None, after: dict[str, Fact] | None, both: Held
) -> Iterator[Change]:
    if before is None or after is None:
        effect = effect_of(Point(topic, subject, "", is_lone=True), both)
        yield Change(topic, subject, _first(before), _first(after), effect)
        return
    for attribute in {**before, **after}:
        one, other = before.get(attribute), after.get(attribute)
        if one and other and same(one.value, other.value):
            continue
        shown = apart(one, other) if one and other else (_text(one), _text(other))
        name = subject + attribute if attribute.startswith(".") else f"{subject} {attribute}".rstrip()
        at = Point(topic, subject, attribute, is_lone=None in shown)
        yield Change(topic, name, *shown, effect_of(at, both))


def _text(known: Fact | None) -> str | None:
    return None if known is None else known.text


def _cut(text: str | None) -> str:
    text = str(text)
    return text if len(text) <= _NUM_CHARS else f"{text[:_NUM_CHARS]}..."


def _first(subject: dict[str, Fact] | None) -> str | None:
    """A subject in a word."""
    return None if subject is None else _text(next(iter(subject.values())))


def _rest(before: Rows, after: Rows) -> Iterator[Change]:
    """What no fact tells: rows that no planner of this version would make."""
    ours, theirs = decisive_rows(before), decisive_rows(after)
    if not same(ours, theirs):
        path, one, other = parting(ours, theirs)
        yield Change("rest", path, plain(one), plain(other), Effect.NEW)
