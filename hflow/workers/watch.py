"""What the episodes of a worker do, counted by state."""

from __future__ import annotations

from collections import Counter

from hflow.types import EpisodeState


class Watch:
    """The state of one episode. Its changes are counted in a census of all.

    Args:
        census: state -> episodes that are in it.
    """

    def __init__(self, census: Counter[EpisodeState]) -> None:
        self.state = EpisodeState.PENDING
        self._census = census
        self._doing = {EpisodeState.GENERATING: 0, EpisodeState.PROCESSING_TOOLS: 0}
        """How often at once; of both, generating names the state."""
        census[self.state] += 1

    def begin(self) -> None:
        """The body begins."""
        self._become(EpisodeState.INTERACTING)

    def end(self) -> None:
        """The body has ended, or never began."""
        self._become(EpisodeState.TERMINATED)

    def doing(self, state: EpisodeState) -> Doing:
        """While the block runs, the episode generates or processes tools."""
        return Doing(self, state)

    def count(self, state: EpisodeState, change: int) -> None:
        """It does so once more, or once less."""
        self._doing[state] += change
        if self.state is EpisodeState.TERMINATED:
            return
        for one, num in self._doing.items():
            if num:
                self._become(one)
                return
        self._become(EpisodeState.INTERACTING)

    def _become(self, state: EpisodeState) -> None:
        self._census[self.state] -= 1
        self._census[state] += 1
        self.state = state


class Doing:
    """A block in which an episode does something."""

    __slots__ = ("_state", "_watch")

    def __init__(self, watch: Watch, state: EpisodeState) -> None:
        self._watch = watch
        self._state = state

    def __enter__(self) -> None:
        self._watch.count(self._state, 1)

    def __exit__(self, *error: object) -> None:
        self._watch.count(self._state, -1)
