"""What the episodes of a worker do, counted by state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from hflow.types import EpisodeState


class Watch:
    """The state of one episode. Its changes are counted in a census of all.

    Args:
        census: state -> episodes that are in it.
    """

    def __init__(self, census: Counter[EpisodeState]) -> None:
        self.state = EpisodeState.PENDING
        self._census = census
        self._doing: Counter[EpisodeState] = Counter()
        census[self.state] += 1

    def begin(self) -> None:
        """The body begins."""
        self._become(EpisodeState.INTERACTING)

    def end(self) -> None:
        """The body has ended, or never began."""
        self._become(EpisodeState.TERMINATED)

    @contextmanager
    def doing(self, state: EpisodeState) -> Iterator[None]:
        """While the block runs, the episode generates or processes tools."""
        self._doing[state] += 1
        self._settle()
        try:
            yield
        finally:
            self._doing[state] -= 1
            self._settle()

    def _settle(self) -> None:
        """Of several things at once, generating names the state."""
        if self.state is EpisodeState.TERMINATED:
            return
        order = (EpisodeState.GENERATING, EpisodeState.PROCESSING_TOOLS)
        self._become(next((state for state in order if self._doing[state]), EpisodeState.INTERACTING))

    def _become(self, state: EpisodeState) -> None:
        self._census[self.state] -= 1
        self._census[state] += 1
        self.state = state
