"""Which row of its dataset each group of a stream reads."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from hflow.base.errors import RunError, reason_of
from hflow.types import State
from hflow.types.group_result import GroupResult


class DatasetRows(Protocol):
    """The order in which a stream reads its dataset.

    The order is a pure function of the position, so that a run can resume at any position.
    """

    @property
    def num_rows(self) -> int:
        """Rows of the dataset."""
        ...

    def row(self, position: int) -> int:
        """Return the row at a position. Positions beyond the dataset are in the next epoch."""
        ...


@dataclass(frozen=True)
class SampledRows:
    """The rows of a trained stream, of which a function chooses the next one."""

    order: DatasetRows
    """The order without it."""
    choose: Callable[..., Any]
    """(state, finished, position, order) -> (row, reason)."""
    judge: str | None
    """The node whose number is a sample's reward."""
    key: str
    """The key of the configuration that names the function, for errors."""

    @property
    def num_rows(self) -> int:
        """Rows of the dataset."""
        return self.order.num_rows

    def row(self, position: int) -> int:
        """Return the row at a position of the order without the function."""
        return self.order.row(position)


class RowCursor:
    """Maps the ascending group ids of one stream to rows.

    Args:
        endless: True for the trained stream, which reads epoch after epoch. A side stream reads its
            dataset once per evaluation; groups beyond its end have no row.
    """

    def __init__(self, rows: DatasetRows, endless: bool, first_group: int = 0) -> None:
        self._rows = rows
        self._endless = endless
        self._first_group = first_group

    def row(self, group: int) -> int | None:
        """Return the row of a group; None if the evaluation has no more rows."""
        position = group - self._first_group
        if self._endless or position < self._rows.num_rows:
            return self._rows.row(position)
        return None

    def restart(self) -> None:
        """Let the next group read the first row. Called when an evaluation is over."""
        self._first_group += self._rows.num_rows

    def reason(self, group: int) -> str:
        """Return the reason for which a sampler chose the row of a group; empty without a sampler."""
        return ""


class SampledCursor(RowCursor):
    """Lets a sampler choose the row of each new group, and keeps the row until the group has ended.

    The results of groups become known when a batch is formed: those of its groups, and of groups that were
    refused since the last one, in ascending order. Where the next step's groups are opened after that, as in
    a synchronous run, the choice does not depend on the time at which samples finish.

    Args:
        saved: what `save` returned when the checkpoint was taken; None: the run begins.

    Raises:
        RunError: if the sampler fails.
    """

    def __init__(self, rows: SampledRows, group_size: int, saved: str | None = None) -> None:
        super().__init__(rows, endless=True)
        self._sampled = rows
        self._size = group_size
        known: Mapping[str, Any] = json.loads(saved) if saved else {}
        self._state = State(known.get("state", {}))
        self._position: int = known.get("position", 0)
        self._open: dict[int, tuple[int, str]] = {
            int(group): (row, reason) for group, (row, reason) in known.get("open", {}).items()
        }
        self._rewards: dict[int, float] = {int(sample): x for sample, x in known.get("rewards", {}).items()}
        self._num_refused: dict[int, int] = {int(group): n for group, n in known.get("refused", {}).items()}
        self._ended: dict[int, GroupResult] = {
            int(group): GroupResult(row, tuple(rewards), refused)
            for group, (row, rewards, refused) in known.get("ended", {}).items()
        }
        """Results that the sampler does not know before the next batch is formed."""
        self._finished = [
            GroupResult(row, tuple(rewards), out) for row, rewards, out in known.get("news", ())
        ]

    def row(self, group: int) -> int:
        """Return the row of a group; a new one's is chosen now."""
        if group not in self._open:
            self._open[group] = self._choose()
        return self._open[group][0]

    def reason(self, group: int) -> str:
        """Return the sampler's reason for the row of an open group."""
        return self._open[group][1]

    def add_reward(self, node: str, sample: int, value: float | None) -> None:
        """Note a node's number for a sample."""
        if node == self._sampled.judge and value is not None and sample // self._size in self._open:
            self._rewards[sample] = value

    def refuse(self, group: int, samples: Iterable[int]) -> None:
        """Note samples that left the run. A group without others has ended."""
        if group in self._open:
            self._num_refused[group] = self._num_refused.get(group, 0) + len(tuple(samples))
            if self._num_refused[group] == self._size:
                whole = range(group * self._size, (group + 1) * self._size)
                is_complete = all(sample in self._rewards for sample in whole)
                self._end(group, whole if is_complete else (), is_refused=True)

    def form_batch(self, groups: Iterable[int], samples: Iterable[int]) -> None:
        """Note the groups of a batch with their remaining samples: the sampler may know their results now."""
        remaining = set(samples)
        for group in groups:
            whole = range(group * self._size, (group + 1) * self._size)
            self._end(group, sorted(remaining.intersection(whole)), is_refused=False)
        self._finished += [self._ended[group] for group in sorted(self._ended)]
        self._ended.clear()

    def save(self) -> str:
        """Return everything as JSON, for a checkpoint."""
        self._check_state()
        return json.dumps(
            {
                "state": self._state,
                "position": self._position,
                "open": self._open,
                "rewards": self._rewards,
                "refused": self._num_refused,
                "ended": {group: (r.row, r.rewards, r.is_refused) for group, r in self._ended.items()},
                "news": [(r.row, r.rewards, r.is_refused) for r in self._finished],
            }
        )

    def _end(self, group: int, samples: Iterable[int], *, is_refused: bool) -> None:
        rewards = tuple(self._rewards[sample] for sample in samples if sample in self._rewards)
        self._ended[group] = GroupResult(self._open.pop(group)[0], rewards, is_refused)
        self._num_refused.pop(group, None)
        for sample in range(group * self._size, (group + 1) * self._size):
            self._rewards.pop(sample, None)

    def _choose(self) -> tuple[int, str]:
        rows, finished, self._finished = self._sampled, tuple(self._finished), []
        try:
            chosen = rows.choose(self._state, finished, self._position, rows.order)
        except Exception as error:
            raise RunError(
                f"{rows.key} raised {type(error).__name__}: {reason_of(error)}; correct it"
            ) from error
        is_pair = isinstance(chosen, tuple) and len(chosen) == 2
        if not is_pair or type(chosen[0]) is not int or not isinstance(chosen[1], str):
            raise RunError(
                f"{rows.key} returned {chosen!r:.60}; return the row, an int, and a reason, a text"
            )
        if not 0 <= chosen[0] < rows.num_rows:
            raise RunError(f"{rows.key} chose row {chosen[0]}; return one from 0 to {rows.num_rows - 1}")
        if self._position == 0:
            self._check_state()
        self._position += 1
        return chosen[0], chosen[1]

    def _check_state(self) -> None:
        try:
            is_same = json.loads(json.dumps(self._state, allow_nan=False)) == self._state
        except (TypeError, ValueError):
            is_same = False
        if not is_same:
            raise RunError(
                f"the state of {self._sampled.key} is not the same after it was saved as JSON; keep only "
                "finite numbers, texts, lists, and dicts whose keys are texts in it"
            )
