"""`ProcessEngine`: the worker's side of an engine that runs in a process of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle
from typing_extensions import override

from hflow.data.text.tokenizer import TokenizerSettings
from hflow.engines.interface import (
    DrawnTokens,
    EngineSetup,
    GenerationEngine,
    GenerationResult,
    SamplingParams,
)
from hflow.engines.process.engine_process import (
    EngineCall,
    EngineProcess,
    FinishedRequests,
    ProcessSettings,
)
from hflow.engines.process.sent_images import SentImages, without_pixels
from hflow.engines.request import new_request
from hflow.models.hf_config import auto_model, max_length, read_config, translate_errors
from hflow.models.settings import ModelSettings
from hflow.types.engine import SleepLevel
from hflow.types.image import PlacedImage
from hflow.weights.incoming import IncomingWeights
from hflow.weights.loading import LoadedWeights

_STEP_SECONDS = 0.002
"""Longest time that `step` waits for results, while the process draws tokens."""


@dataclass(frozen=True)
class EngineLaunch:
    """How the engine of a library is started."""

    library: str
    """The library's name, for errors."""
    stepper: str
    """`module:CLASS` of its `Stepper`."""
    environment: Mapping[str, str]
    """Environment variables of the process, besides those of the worker."""
    arguments: Callable[[str, int], Mapping[str, Any]]
    """A directory with the model's `config.json`, and its weights if it has a path, and the maximum tokens of
    a sequence, prompt included -> the arguments of the library's engine."""


class ProcessEngine(GenerationEngine):
    """Passes requests, results and weights between a worker and the process of its engine.

    The process draws tokens whether or not `step` is called. New requests are sent, and finished ones are
    received, by `step`. Models on one base have one process, and an engine here each.
    """

    def __init__(self, setup: EngineSetup, launch: EngineLaunch) -> None:
        """Start the process and build the engine in it, or use the process of the engine that is the base.

        Raises:
            BackendError: if the library cannot build the model.
        """
        self._model = setup.settings.name
        config = read_config(setup.settings).get_text_config()
        self._max_length = _longest_sequence(setup, config)
        self._vocab_size = int(config.vocab_size)
        self._decode = None if setup.tokenizer is None else setup.tokenizer.decode_answer
        self._records = setup.records
        self._outbox: list[EngineCall] = []
        self._sent_images = SentImages()
        self._unfinished: set[int] = set()
        self._finished: list[tuple[int, GenerationResult]] = []
        """Received, but not returned yet."""
        self._is_guest = setup.base is not None
        if isinstance(setup.base, ProcessEngine):
            self._process: EngineProcess = setup.base._process
            return
        name = engine_name(setup, launch)
        self._process = EngineProcess(name, Path(setup.log) if setup.log else None)
        self._process.start(launch.environment, process_settings(setup, launch, self._process.directory))

    @property
    @override
    def num_unfinished(self) -> int:
        """Number of requests that wait or run, or whose results have not been returned."""
        return len(self._unfinished)

    @override
    def add(
        self,
        request_id: int,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        images: Sequence[PlacedImage] = (),
    ) -> None:
        request = new_request(
            request_id,
            prompt_ids,
            params,
            self._max_length,
            self._vocab_size,
            self._decode,
            self._records,
            without_pixels(images),
        )
        new, forgotten = self._sent_images.take_new(images)
        if new or forgotten:
            self._outbox.append(self._call_of("keep_images", (new, forgotten)))
        self._unfinished.add(request_id)
        self._outbox.append(self._call_of("add", ([request],)))

    @override
    def cancel(self, request_id: int) -> None:
        self._unfinished.discard(request_id)
        self._outbox.append(self._call_of("cancel", ([request_id],)))

    @override
    def step(self) -> list[tuple[int, GenerationResult]]:
        """Send new requests, and return those that have finished. It waits for a few milliseconds at most."""
        self._flush()
        if not self._finished and isinstance(
            message := self._process.receive(self._model, _STEP_SECONDS), FinishedRequests
        ):
            self._finished.extend(message.results)
        while isinstance(message := self._process.receive(self._model, 0), FinishedRequests):
            self._finished.extend(message.results)
        return self._take_finished()

    @override
    def drawn(self, starts: Mapping[int, int]) -> dict[int, DrawnTokens]:
        """Ask the process, which answers after the step that it performs."""
        tokens: dict[int, DrawnTokens] = self._call("drawn", starts)
        return tokens

    @override
    def interrupt(self) -> list[tuple[int, GenerationResult]]:
        aborted: list[tuple[int, GenerationResult]] = self._call("interrupt")
        self._finished.extend(aborted)
        return self._take_finished()

    @override
    def load_weights(self, incoming: Sequence[IncomingWeights], version: int) -> LoadedWeights:
        pickled = [cloudpickle.dumps(rank) for rank in incoming]
        loaded: LoadedWeights = self._call("load_weights", pickled, version)
        return loaded

    @override
    def set_version(self, version: int) -> None:
        self._call("set_version", version)

    @override
    def sleep(self, level: SleepLevel) -> None:
        """Free the device's memory, where the engine shares its devices. A CPU's is not freed."""
        self._call("sleep", level)

    @override
    def wake_weights(self) -> None:
        self._call("wake_weights")

    @override
    def wake_cache(self) -> None:
        self._call("wake_cache")

    @override
    def close(self) -> None:
        if not self._is_guest:
            self._process.close()

    def _call(self, method: str, *arguments: Any) -> Any:
        """Let the process perform a call after those before it, and return its result."""
        self._outbox.append(self._call_of(method, arguments, has_reply=True))
        self._flush()
        return self._process.wait_reply(self._model, self._finished)

    def _call_of(self, method: str, arguments: tuple[Any, ...], *, has_reply: bool = False) -> EngineCall:
        return EngineCall(self._model, method, arguments, has_reply)

    def _flush(self) -> None:
        if self._outbox:
            calls, self._outbox = self._outbox, []
            self._process.send(calls)

    def _take_finished(self) -> list[tuple[int, GenerationResult]]:
        finished, self._finished = self._finished, []
        finished = [(request_id, result) for request_id, result in finished if request_id in self._unfinished]
        self._unfinished.difference_update(request_id for request_id, _ in finished)
        return finished


def engine_name(setup: EngineSetup, launch: EngineLaunch) -> str:
    """Return the engine's name, for errors."""
    return f"the {launch.library} engine of {setup.settings.name!r}"


def process_settings(setup: EngineSetup, launch: EngineLaunch, directory: Path) -> ProcessSettings:
    """Return the settings from which the process builds its engine.

    The config of a model without a checkpoint is written to `directory`, a temporary one.
    """
    settings, config, together = setup.settings, read_config(setup.settings), (setup, *setup.guests)
    model = settings.path or write_config(settings, config, directory / "model")
    return ProcessSettings(
        name=engine_name(setup, launch),
        library=launch.library,
        stepper=launch.stepper,
        settings=settings,
        arguments=launch.arguments(model, max(_longest_sequence(one, config) for one in together)),
        temporary=str(directory),
        tokenizer=_tokenizer_settings(setup),
        cores=tuple(sorted({core for cores in setup.cores for core in cores})),
        reads_checkpoint=reads_checkpoint(setup),
        sleeps=setup.shares_devices and settings.device != "cpu",
        records=tuple(sorted({kind for one in together for kind in one.records})),
        guests=tuple((guest.settings, _tokenizer_settings(guest)) for guest in setup.guests),
    )


def _tokenizer_settings(setup: EngineSetup) -> TokenizerSettings | None:
    return None if setup.tokenizer is None else setup.tokenizer.settings


def _longest_sequence(setup: EngineSetup, config: Any) -> int:
    """Return the maximum tokens of a sequence: what is configured, or what the model's positions allow."""
    longest: int = setup.options["max_model_len"]
    return min(longest, max_length(config) or longest)


def reads_checkpoint(setup: EngineSetup) -> bool:
    """Return whether the engine reads the weights of a checkpoint when it is built.

    It does not where all of them are replaced before it generates. Adapters replace none: they are beside the
    weights that the engine was built with, or are added to these.
    """
    is_replaced = setup.receives_weights and setup.settings.lora is None
    return setup.settings.path is not None and not is_replaced


def write_config(settings: ModelSettings, config: Any, directory: Path) -> str:
    """Write the config of a model with random weights, as libraries read it; return the directory."""
    with translate_errors(settings.name):
        architecture: Any = auto_model(config)._model_mapping[type(config)]
        config.architectures = [architecture.__name__]
        config.save_pretrained(directory)
    return str(directory)
