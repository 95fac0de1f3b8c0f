"""`Stepper`: the engine of a library as the loop of its process calls it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from hflow.engines.interface import DrawnTokens, GenerationResult
from hflow.engines.request import Decode, GenerationRequest
from hflow.models.settings import ModelSettings
from hflow.types.engine import SleepLevel
from hflow.types.image import ProcessedImage

if TYPE_CHECKING:
    from hflow.weights.loading import LoadedWeights

Results = list[tuple[int, GenerationResult]]


class Stepper(Protocol):
    """The methods of `GenerationEngine` that need the library. Each does what its namesake there says.

    It is built from `ProcessSettings` and a `Decode` to find stop strings, which is None without a tokenizer.
    Then it has all processes of its ranks. It keeps the tokens of each request with their log-probs and
    versions, and decides when the request ends. The worker raises an `HflowError` of a method that it waits
    for; any other error ends the process.
    """

    @property
    def num_unfinished(self) -> int:
        """Number of requests that wait or run."""

    def make_guest(self, settings: ModelSettings, decode: Decode | None) -> Stepper:
        """Return the stepper of another model that uses the weights of this one, beside adapters of its own.

        Its requests run together with those of this one. Called for each of `ProcessSettings.guests`, which
        only an engine with the trait `shares_base` has.
        """
        raise NotImplementedError

    def add(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue requests, which the worker has checked. Their images have no pixels: `keep_images`."""

    def keep_images(self, new: Sequence[ProcessedImage], forgotten: Sequence[str]) -> None:
        """Keep images for the requests that are added from now on.

        Args:
            new: images that were not sent before.
            forgotten: digests of kept images that no later request has.
        """

    def cancel(self, request_ids: Sequence[int]) -> None:
        """Remove requests. Those that have finished already are ignored."""

    def step(self) -> Results:
        """Draw one token for each request that the library schedules; return the finished requests."""

    def drawn(self, starts: Mapping[int, int]) -> dict[int, DrawnTokens]:
        """Return the tokens of unfinished requests from a position on."""

    def interrupt(self) -> Results:
        """Remove all requests, and return the tokens that each has drawn."""

    def load_weights(self, incoming: Sequence[bytes], version: int) -> LoadedWeights:
        """Load the weights of a version. Running requests keep their tokens, and are prefilled again.

        `incoming` has the pickled `IncomingWeights` of each rank.
        """

    def set_version(self, version: int) -> None:
        """Use the weights of the checkpoint, or random weights, as a version."""

    def sleep(self, level: SleepLevel) -> None:
        """Free device memory, if `ProcessSettings.sleeps`."""

    def wake_weights(self) -> None:
        """Allocate the weights."""

    def wake_cache(self) -> None:
        """Allocate the KV cache."""
