"""`diff_plans`: the differences between two plans, and what they mean for a resume."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from hflow.base.errors import PlanError
from hflow.planner.diff.effects import Difference, Effect, TrainedNames, effect_of, trained_names
from hflow.planner.diff.values import (
    ESTIMATED_TOPICS,
    ROUNDED_TOPICS,
    Rows,
    ShownValue,
    Subjects,
    Unmatched,
    distinct_texts,
    estimated_values,
    first_difference,
    format_plain,
    graph_values,
    is_equal,
    model_names,
    node_names,
    placement_values,
)
from hflow.planner.plan.serialise import decisive_rows, rows_digest

_BY_SEVERITY = tuple(Effect)
CAUSES = ("recipe", "stream", "model", "node", "setting", "schedule", "cluster")
"""Topics of what a user changes; the rows of others follow from them."""
_NUM_CHARS = 60
"""Maximum length of a value in a sentence."""


@dataclass(frozen=True)
class Change:
    """One difference between two plans."""

    topic: str
    """`recipe`, `node`, `replica`, `weights` ..."""
    subject: str
    """The place of the difference, such as `actor@train` or `actor_train.clip`."""
    before: str | None
    """None if only the other plan has it."""
    after: str | None
    effect: Effect
    """The effect on resuming the first plan's checkpoint with the second plan."""

    @property
    def is_estimated(self) -> bool:
        """Whether it is a difference of estimates, which decide nothing in a run."""
        return self.topic in ESTIMATED_TOPICS

    def __str__(self) -> str:
        if self.before is None:
            return f"{self.topic} {self.subject} is new: {_cut(self.after)}"
        if self.after is None:
            return f"{self.topic} {self.subject} is gone: it was {_cut(self.before)}"
        return f"{self.topic} {self.subject}: {_cut(self.before)} -> {_cut(self.after)}"


@dataclass(frozen=True)
class PlanDiff:
    """All differences between two plans, causes before their consequences."""

    before: str
    """Digest of the first plan's rows."""
    after: str
    changes: tuple[Change, ...]

    @property
    def effect(self) -> Effect:
        """The most severe effect."""
        return max((change.effect for change in self.changes), key=_BY_SEVERITY.index, default=Effect.SAME)

    @property
    def decided(self) -> tuple[Change, ...]:
        """Changes of what a run does; none if the digests are equal."""
        return tuple(change for change in self.changes if not change.is_estimated)

    def decided_by_user(self, effect: Effect) -> tuple[Change, ...]:
        """Return the changes with an effect, without those that follow from others and change no result."""
        return tuple(
            change
            for change in self.decided
            if change.effect is effect and (effect is not Effect.SAME or change.topic in CAUSES)
        )

    @property
    def verdict(self) -> str:
        """The work of a resume, in one line."""
        if not self.changes:
            return "the plans are the same"
        worst = [change for change in self.changes if change.effect is self.effect]
        if self.effect is Effect.REFUSE:
            return f"cannot resume: {worst[0]}{and_more(len(worst) - 1)}"
        if self.effect is Effect.RESHARD:
            cuts = ", ".join(f"{change.subject} {change.before} -> {change.after}" for change in worst)
            rest = "; results differ from here on" if self._changes_results else ""
            return f"a resume would have to reshard {cuts}{rest}"
        if self.effect is Effect.NEW:
            return f"nothing to reshard; results differ from here on: {worst[0]}{and_more(len(worst) - 1)}"
        return "nothing to reshard"

    @property
    def _changes_results(self) -> bool:
        return any(change.effect is Effect.NEW for change in self.changes)

    def to_json(self) -> dict[str, Any]:
        """Return the differences as plain values for `json.dumps`."""
        return {**asdict(self), "effect": self.effect, "verdict": self.verdict}


def and_more(count: int) -> str:
    """Return `, and 3 more`, or an empty text."""
    return f", and {count} more" if count else ""


def diff_plans(before: Rows, after: Rows) -> PlanDiff:
    """Compare two plans by the rows of `to_json`, so that saved plans can be compared too.

    A checkpoint of the plan before would be resumed by the one after.

    Raises:
        PlanError: for rows that another version of hflow wrote.
    """
    try:
        changes = tuple(_changes(before, after))
        return PlanDiff(rows_digest(before), rows_digest(after), changes)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise PlanError(
            f"this plan was written by another version of hflow, which stores other rows ({reason})"
        ) from error


def _changes(before: Rows, after: Rows) -> Iterator[Change]:
    unmatched = Unmatched(node_names(before) ^ node_names(after), model_names(before) ^ model_names(after))
    trained = trained_names(before, after)
    decided = list(_compare(decided_values(before, unmatched), decided_values(after, unmatched), trained))
    yield from decided or _other_changes(before, after)
    has_forecasts = before["forecast"] is not None and after["forecast"] is not None
    yield from _compare(
        estimated_values(before, unmatched, has_forecasts),
        estimated_values(after, unmatched, has_forecasts),
        trained,
    )


def decided_values(rows: Rows, unmatched: Unmatched) -> dict[str, Subjects]:
    """Return everything that a plan decides, by topic, without what only one plan has."""
    return {**graph_values(rows, unmatched), **placement_values(rows, unmatched)}


def _compare(
    before: dict[str, Subjects], after: dict[str, Subjects], trained: TrainedNames
) -> Iterator[Change]:
    for topic in {**before, **after}:
        ours, theirs = before.get(topic, {}), after.get(topic, {})
        for subject in {**ours, **theirs}:
            yield from _subject(topic, subject, ours.get(subject), theirs.get(subject), trained)


def _subject(
    topic: str,
    subject: str,
    before: dict[str, ShownValue] | None,
    after: dict[str, ShownValue] | None,
    trained: TrainedNames,
) -> Iterator[Change]:
    if not isinstance(subject, str):
        raise TypeError(f"{topic} {subject!r} is not a name")
    if before is None or after is None:
        effect = effect_of(Difference(topic, subject, "", is_unmatched=True), trained)
        yield Change(topic, subject, _first(before), _first(after), effect)
        return
    for attribute in {**before, **after}:
        one, other = before.get(attribute), after.get(attribute)
        if one and other and is_equal(one.value, other.value):
            continue
        if one and other and topic in ROUNDED_TOPICS and one.text == other.text:
            continue
        shown = distinct_texts(one, other) if one and other else (_text(one), _text(other))
        name = subject + attribute if attribute.startswith(".") else f"{subject} {attribute}".rstrip()
        difference = Difference(topic, subject, attribute, is_unmatched=None in shown)
        yield Change(topic, name, *shown, effect_of(difference, trained))


def _text(value: ShownValue | None) -> str | None:
    return None if value is None else value.text


def _cut(text: str | None) -> str:
    text = str(text)
    return text if len(text) <= _NUM_CHARS else f"{text[:_NUM_CHARS]}..."


def _first(subject: dict[str, ShownValue] | None) -> str | None:
    """Return the main text of a subject."""
    return None if subject is None else _text(next(iter(subject.values())))


def _other_changes(before: Rows, after: Rows) -> Iterator[Change]:
    """Yield a difference that no value shows, in rows that this version does not write."""
    ours, theirs = decisive_rows(before), decisive_rows(after)
    if not is_equal(ours, theirs):
        path, one, other = first_difference(ours, theirs)
        yield Change("rest", path, format_plain(one), format_plain(other), Effect.NEW)
