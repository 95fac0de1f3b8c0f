"""Names that megatron imports: the trackers are its own, and it recomputes under them with FP8 only."""

from collections.abc import Iterator
from contextlib import contextmanager


class CudaRNGStatesTracker:
    """A name that megatron derives from."""


@contextmanager
def activation_recompute_forward(**options: bool) -> Iterator[None]:
    """Do nothing, as there is no FP8 whose scales would be restored."""
    yield
