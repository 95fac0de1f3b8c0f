"""A `Stepper` without a library, for `ProcessEngine`: each token is the one before it plus one."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from typing_extensions import override

from hflow.base.errors import BackendError
from hflow.engines.interface import DrawnTokens
from hflow.engines.process.engine_process import ProcessSettings
from hflow.engines.process.stepper import Results, Stepper
from hflow.engines.request import Decode, GenerationRequest, stop_reason
from hflow.models.settings import ModelSettings
from hflow.types.engine import SleepLevel

if TYPE_CHECKING:
    from hflow.weights.loading import LoadedWeights


class CountingStepper(Stepper):
    """Draws one token for each request in a step. Token 9 is an error of the library."""

    def __init__(self, settings: ProcessSettings, decode: Decode | None) -> None:
        """Keep what the process was started with."""
        self.settings = settings
        self._decode = decode
        self._requests: dict[int, GenerationRequest] = {}
        self._version = 0
        self._is_asleep = False

    @property
    @override
    def num_unfinished(self) -> int:
        return len(self._requests)

    @override
    def make_guest(self, settings: ModelSettings, decode: Decode | None) -> CountingStepper:
        return CountingStepper(replace(self.settings, settings=settings), decode)

    @override
    def add(self, requests: Sequence[GenerationRequest]) -> None:
        self._requests |= {request.request_id: request for request in requests}

    @override
    def cancel(self, request_ids: Sequence[int]) -> None:
        for request_id in request_ids:
            self._requests.pop(request_id, None)

    @override
    def step(self) -> Results:
        assert not self._is_asleep
        finished: Results = []
        for request in list(self._requests.values()):
            token = request.ids[-1] + 1
            if token == 9:
                raise ValueError(os.environ["COUNTING_ERROR"])
            request.append(token, -float(self.settings.arguments["scale"]), self._version)
            if (reason := stop_reason(request, self._decode)) is not None:
                finished.append((request.request_id, request.result(reason)))
                del self._requests[request.request_id]
        return finished

    @override
    def drawn(self, starts: Mapping[int, int]) -> dict[int, DrawnTokens]:
        known = [number for number in starts if number in self._requests]
        return {number: self._requests[number].drawn(starts[number]) for number in known}

    @override
    def interrupt(self) -> Results:
        results = [(number, request.result("abort")) for number, request in self._requests.items()]
        self._requests.clear()
        return results

    @override
    def load_weights(self, incoming: Sequence[bytes], version: int) -> LoadedWeights:
        raise BackendError(f"{len(incoming)} ranks have no weights")

    @override
    def set_version(self, version: int) -> None:
        self._version = version

    @override
    def sleep(self, level: SleepLevel) -> None:
        self._is_asleep = True

    @override
    def wake_weights(self) -> None:
        pass

    @override
    def wake_cache(self) -> None:
        self._is_asleep = False
