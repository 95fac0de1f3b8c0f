"""The interface that a generation engine implements.

An engine is called under a lock, by the thread that steps it and by the threads that interrupt it or update
its weights. torch stays on the engine's side of this border.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from hflow.models.settings import ModelSettings
from hflow.types.engine import SleepLevel
from hflow.types.image import PlacedImage
from hflow.types.recorded import Recorded

if TYPE_CHECKING:
    from torch import nn

    from hflow.data.text.tokenizer import TextTokenizer
    from hflow.weights.incoming import IncomingWeights
    from hflow.weights.loading import LoadedWeights


@dataclass(frozen=True)
class EngineSetup:
    """What a generation engine is built from."""

    settings: ModelSettings
    options: Mapping[str, Any] = field(default_factory=dict)
    """`GenConfig.engine_options`, with `quantization` or `cache_dtype` if the engine quantises, and
    `merges_adapters` if it merges adapters; with a plan, `cache_bytes`, those of each rank's cache, unless
    that grows."""
    tokenizer: TextTokenizer | None = None
    """Decodes tokens to find stop strings; None: requests have none."""
    module: nn.Module | None = None
    """A trainer's module whose parameters the engine shares; None: the engine has its own weights."""
    base: GenerationEngine | None = None
    """The engine whose frozen weights this one uses, beside adapters of its own; None: it has its own."""
    guests: tuple[EngineSetup, ...] = ()
    """The setups of the engines that will have this one as `base`. Its library serves their requests too, if
    it is in a process of its own."""
    tensor: int = 1
    """Number of tensor ranks."""
    devices: tuple[str, ...] = ()
    """CUDA device of each tensor rank, as in CUDA_VISIBLE_DEVICES; empty on a CPU."""
    cores: tuple[tuple[int, ...], ...] = ()
    """Processor cores of each tensor rank; empty: it may use all that its worker may use."""
    shares_devices: bool = False
    """Whether other replicas use the same devices while the engine sleeps."""
    receives_weights: bool = False
    """Whether `load_weights` is called before the engine first generates, so that it need not read those of
    its checkpoint, except the base of adapters."""
    records: tuple[str, ...] = ()
    """The kinds that requests may ask it to record (`RecordedKind`). An engine that always can ignores it."""
    log: str = ""
    """The file for what an engine in a process of its own logs, such as how far it has compiled; empty: only
    errors, which are gone with the process."""


@dataclass(frozen=True)
class SamplingParams:
    """Settings that decide how one sample is generated."""

    temperature: float = 1.0
    """0 means greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 means all tokens."""
    min_p: float = 0.0
    """0 means all tokens. It is applied before the others, as vLLM does."""
    max_tokens: int = 128
    """Maximum tokens to draw."""
    stop_ids: tuple[int, ...] = ()
    """Tokens that end the sample."""
    stop: tuple[str, ...] = ()
    """Strings that end the sample."""
    seed: int = 0
    num_resumed: int = 0
    """Number of the prompt's last tokens that were drawn before an interruption. A stop string may begin
    in them."""
    record: tuple[str, ...] = ()
    """What to record beside tokens, by kind (`RecordedKind`)."""


@dataclass(frozen=True)
class GenerationResult:
    """The tokens that an engine has drawn for one request; the first three tuples have equal lengths."""

    ids: tuple[int, ...]
    """Drawn tokens, without the prompt."""
    logprobs: tuple[float, ...]
    """Log-prob of each token under the temperature, over the tokens that top-p, top-k and min-p leave."""
    versions: tuple[int, ...]
    """Version of the weights that drew each token."""
    stop_reason: str
    """`stop`, `length`, or `abort` for an interrupted request."""
    recorded: Recorded = field(default_factory=dict, hash=False)
    """What was recorded of the sequence, the prompt included, by kind (`RecordedKind`). The last drawn token
    has no entry of what is recorded when a token is computed, which it was not."""


class DrawnTokens(NamedTuple):
    """Tokens of a request that is still generating. Both tuples have the same length."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]


class GenerationEngine(abc.ABC):
    """A generation engine: a copy of a model, a KV cache and a scheduler.

    `hflow.engines.driver.EngineDriver` owns one. Its thread calls `add`, `cancel` and
    `step`; the worker's thread calls the other methods, between two steps. A lock serializes the calls, so
    an engine need not be thread-safe, but it may be called from different threads.

    An engine begins awake, without requests. While it generates, it has the weights of one version.
    """

    @abc.abstractmethod
    def add(
        self,
        request_id: int,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        images: Sequence[PlacedImage] = (),
    ) -> None:
        """Queue a request; later calls of `step` draw its tokens.

        Args:
            request_id: a number that no other unfinished request has.
            prompt_ids: tokens to continue, including those drawn before an interruption.
            params: how to draw.
            images: the images of the prompt.

        Raises:
            BackendError: if the prompt is empty, too long or has unknown tokens, if there are stop strings
                and the engine cannot decode tokens, or if it does not record what the request asks for.
        """

    @abc.abstractmethod
    def cancel(self, request_id: int) -> None:
        """Remove a waiting or running request; no result is returned for it."""

    @abc.abstractmethod
    def step(self) -> list[tuple[int, GenerationResult]]:
        """Admit waiting requests and draw one token for each running one; return the finished requests.

        Called in a loop while `num_unfinished` is positive.

        Raises:
            BackendError: if the model's output is unusable (NaN). It ends the engine.
        """

    @abc.abstractmethod
    def drawn(self, starts: Mapping[int, int]) -> dict[int, DrawnTokens]:
        """Return the tokens of running requests from a position on, to stream them.

        Called between two steps. Requests that wait, or have finished, may be missing.

        Args:
            starts: request id -> the number of its drawn tokens that are already known.
        """

    @abc.abstractmethod
    def interrupt(self) -> list[tuple[int, GenerationResult]]:
        """Remove all requests; return each one's result so far, with stop reason `abort`.

        Requests that have finished since the last `step` are returned too, with their own stop reason. Called
        before the engine sleeps. The driver adds the aborted requests again when it wakes.
        """

    @property
    @abc.abstractmethod
    def num_unfinished(self) -> int:
        """Number of requests that wait or run."""

    @abc.abstractmethod
    def load_weights(self, incoming: Sequence[IncomingWeights], version: int) -> LoadedWeights:
        """Copy new weights in, tensor by tensor, and drop the KV cache, which the old weights made.

        Called while the engine is awake, maybe with running requests: they keep their tokens and are
        prefilled again. `hflow.weights.loading.load_verified` does the checks for one rank.

        Args:
            incoming: for each rank of the engine, tensor ranks in order, what was sent to it: HF names with
                full-shape tensors, tied ones under any of their names. A rank may be in another process.
            version: version of these weights; tokens drawn from now on carry it.

        Returns:
            What the ranks loaded.

        Raises:
            BackendError: if names or shapes differ from the model's.
            RunError: if a rank then holds other weights than were sent.
        """

    @abc.abstractmethod
    def set_version(self, version: int) -> None:
        """Report that weights shared with a trainer have changed, and drop the KV cache.

        Called in place of `load_weights` where the engine uses the parameters of
        `ModelBackend.shared_module`, and with the first version of a model that is never trained.
        """

    @abc.abstractmethod
    def sleep(self, level: SleepLevel) -> None:
        """Free the KV cache, and the memory of weights that are not shared, on an accelerator.

        Called after `interrupt`, so that training can use the device. On a CPU nothing needs to be freed.

        Args:
            level: `KEEP_WEIGHTS` (1) keeps a copy of the weights in host memory, for an engine that may wake
                with the same version. `DROP_WEIGHTS` (2) drops them, for an engine that loads others when it
                wakes; a `step` before that raises a `BackendError`. Never `PAUSE`.
        """

    @abc.abstractmethod
    def wake_weights(self) -> None:
        """Allocate the weights that `sleep` freed; after level 1 they have their old values.

        Called before `load_weights` or `set_version`.
        """

    @abc.abstractmethod
    def wake_cache(self) -> None:
        """Allocate the KV cache that `sleep` freed. Called after new weights are loaded, before `add`."""

    @abc.abstractmethod
    def close(self) -> None:
        """End what the engine runs outside this process. Called once; the engine is not used afterwards."""


class ApiServer(Protocol):
    """An engine's own OpenAI-compatible server, in a process of its own."""

    @property
    def port(self) -> int:
        """The port that the server listens on, once it was started."""

    def start(self) -> None:
        """Start the process.

        Raises:
            ConfigError: if the port is in use, or the host is not this machine's.
        """

    def wait_ready(self) -> None:
        """Wait until requests can be sent, or until `close`.

        Raises:
            RunError: if the process ends before.
        """

    def wait(self) -> None:
        """Wait until `close`.

        Raises:
            RunError: if the process ends before.
        """

    def close(self) -> None:
        """End the process and all of its children. Safe to call twice."""
