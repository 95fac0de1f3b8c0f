"""`Census`: what the episodes of all workers do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from hflow.types import EpisodeState

ENDED = EpisodeState.TERMINATED.value


class Census:
    """Episodes by state, as workers report them.

    Attributes:
        has_turns: whether any episode asked a model more than once. Until one did there is nothing to tell:
            of single completions it is known already how many run.
    """

    def __init__(self) -> None:
        self.has_turns = False
        self._latest: dict[int, Mapping[str, int]] = {}
        """Worker -> its last report."""
        self._sums: Counter[str] = Counter()
        self._num_reports = 0
        self._num_ended = 0
        """Episodes that had ended when the last row was closed."""

    def reported(self, worker: int, states: Mapping[str, int]) -> None:
        """A worker tells how many of its episodes are in each state; terminated are all that ever ended."""
        if states:
            self._latest[worker] = states
            self._sums.update(self.now())
            self._num_reports += 1

    def now(self) -> Counter[str]:
        """Episodes in each state, over all workers."""
        total: Counter[str] = Counter()
        for states in self._latest.values():
            total.update(states)
        return total

    def close(self) -> dict[str, float]:
        """What the row says of the time since the row before; empty for episodes of one turn.

        `episodes/STATE` is the mean over the moments at which workers reported (the last known numbers where
        none did), and `episodes/terminated` counts those that ended.
        """
        now, sums, num_reports = self.now(), self._sums, self._num_reports
        ended, self._num_ended = now[ENDED] - self._num_ended, now[ENDED]
        self._sums, self._num_reports = Counter(), 0
        if not self.has_turns:
            return {}
        means = {state: sums[state] / num_reports if num_reports else float(now[state]) for state in now}
        return {f"episodes/{state}": value for state, value in {**means, ENDED: float(ended)}.items()}
