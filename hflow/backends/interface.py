"""The interfaces that a training backend and a generation engine implement.

A worker owns backends and engines, and passes fields to them as `hflow.data.batch.Batch`: numpy arrays,
packed without padding. torch stays on the backend's side of this border.

Axes: S sequences, T packed tokens of S sequences, P prompts (groups), K entries of one token.

**Ranks.** A replica of a model spans one or more ranks (processes with one device each); a `ModelBackend` is
one rank's shard of it. The ranks are laid out as data x tensor x pipeline axes. For each data index one rank,
its *head*, receives samples and returns results: the rank with tensor index 0 on the last pipeline stage. The
other ranks are called at the same time with empty lists.

**Collectives.** All ranks of a replica make the same calls in the same order, so every method that says
"collective" may communicate over `RankPosition.group`. The others may not.

**Threads.** A worker calls its backends from one thread, one call at a time. An engine is called under a
lock, by the thread that steps it and by the threads that interrupt it or update its weights.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hflow.backends.settings import ModelSettings, RankPosition
from hflow.base.errors import BackendError
from hflow.metrics import declare
from hflow.types.engine import SleepLevel

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from hflow.base.files import WriteFiles
    from hflow.data.batch import Batch
    from hflow.data.tokenizer import TextTokenizer
    from hflow.graph.ir import Read
    from hflow.types.tensor_slices import Block
    from hflow.weights.incoming import IncomingWeights
    from hflow.weights.loading import LoadedWeights


LOSS = declare("{node}/loss", "", "loss of a train node, averaged over the step's updates", live="last")
GRAD_NORM = declare("{node}/grad_norm", "", "norm of the gradient before clipping, averaged over the updates")
LEARNING_RATE = declare("{node}/lr", "", "learning rate of the step's last update")
SKIPPED_UPDATES = declare(
    "{node}/skipped_updates",
    "updates",
    "updates of the step that were skipped because their gradient was not finite, with "
    "optim.on_nonfinite=skip",
)
NUM_TRAINED_TOKENS = declare("{node}/num_tokens", "tokens", "learned tokens of the batch")
ENGINE_GAP = declare(
    "{node}/engine_gap",
    "nats",
    "mean absolute difference of the engine's and the trainer's log-probs with the same weights",
)
ENGINE_GAP_MAX = declare("{node}/engine_gap.max", "nats", "largest of these differences")
ENGINE_KL = declare(
    "{node}/engine_kl", "nats", "KL(engine ‖ trainer) per token, with the same weights (estimator k3)"
)
NUM_ENGINE_TOKENS = declare(
    "{node}/engine_tokens", "tokens", "tokens that these three compare; 0 if all are of older weights"
)
BEHAV_GAP = declare(
    "{node}/behav_gap",
    "nats",
    "mean absolute difference of the engine's and the trainer's log-probs, also of tokens that older weights "
    "drew",
)
BEHAV_GAP_MAX = declare("{node}/behav_gap.max", "nats", "largest of these differences")
BEHAV_KL = declare(
    "{node}/behav_kl", "nats", "KL(engine ‖ trainer) per token, also of tokens that older weights drew"
)
REROUTED = declare(
    "{node}/rerouted",
    "",
    "share of tokens and layers for which the trainer's router would have chosen other experts than the "
    "engine's, which it replays (routing_replay)",
)

FIRST_PASS_STREAM = "@first_pass"
"""The stream of the fields that a train node's first pass reads of the model, and of its result."""


def _ignore(samples: Sequence[int]) -> None:
    """Do nothing with samples that are skipped."""


@dataclass(frozen=True)
class NodeCall:
    """A node's body and everything that its call needs besides the data.

    `hflow.data.batch_arguments.bind_batch` makes the body's keyword arguments from this and a batch.
    """

    node: str
    body: Callable[..., Any]
    reads: tuple[Read, ...]
    """The fields that the body reads."""
    provided: tuple[tuple[str, str], ...]
    """(parameter, kind) of what the framework passes, such as `("output", "output")`."""
    returns: tuple[tuple[str, str], ...]
    """(field, unit) of each result, in order."""
    metrics: bool
    """Whether the last result is a dict of metrics."""
    knobs: Mapping[str, Any]
    """Hyper-parameters by parameter name."""
    options: Mapping[str, Any]
    """The node's options: `mask`, `prox`, and of a train node `reduce` and `epochs`."""
    temperature: float = 1.0
    """Generation temperature of the model's policy: log-probs and entropy divide logits by it."""
    is_first_writer: bool = True
    """Whether no other node changes the node's model before it in the same step."""
    on_skipped: Callable[[Sequence[int]], object] = _ignore
    """Called with this rank's samples of a minibatch whose update is skipped; by default nothing happens."""
    first_pass: NodeCall | None = None
    """The function that a train node runs on whole minibatches before its loss. It reads the model's output
    as fields of `FIRST_PASS_STREAM`, where the body finds what it returns."""
    seed: int = 0
    """Seed of the run."""


@dataclass(frozen=True)
class TrainShard:
    """One data index's samples of a step, minibatch by minibatch (each may be empty)."""

    minibatches: tuple[Batch, ...]


class ModelBackend(abc.ABC):
    """One rank's shard of a model that runs infer and train nodes.

    To add a backend, implement this class, describe it in `hflow/backends/NAME/descriptor.py` and add it to
    the registry in `hflow/planner/plan/traits.py`; `torch_model` is an example. Results may not depend on the
    layout: losses and metrics use denominators that are global over the replica.
    """

    @abc.abstractmethod
    def __init__(self, settings: ModelSettings, position: RankPosition) -> None:
        """Build the model and load or draw its weights. A collective; called once, when the worker starts.

        Args:
            settings: what to build.
            position: the replica's ranks and layout.

        Raises:
            BackendError: if the settings, the architecture, the layout or the checkpoint is unusable.
        """

    @abc.abstractmethod
    def infer(self, call: NodeCall, shards: Sequence[Batch]) -> list[Batch]:
        """Run an infer node: a forward without gradient, then the body. A collective.

        Called whenever an infer node fires.

        Args:
            call: the node's body.
            shards: this rank's samples, one batch for each data index that it hosts: one on a head, several
                where one process hosts several ranks, none on other ranks. A batch may be empty. Columns are
                what the body reads, `input_ids` and `loss_mask` (int and bool `[T]`) among them.

        Returns:
            For each shard a batch of the same samples in the same order, whose columns are the returned
            fields: `[T]` or `[T, K]` per token, `[S]` per sequence or group (repeated on its members); floats
                are
            fp32. An empty list on ranks without shards.

        Raises:
            BackendError: if a sequence is too long for the model or has tokens outside its vocabulary.
            RunError: if the body returns a wrong shape, or the policy's temperature is 0.
        """

    @abc.abstractmethod
    def train(self, call: NodeCall, shards: Sequence[TrainShard], step: int) -> dict[str, float]:
        """Run a train node: all epochs and minibatches of a step, one optimizer step each. A collective.

        Called once per step for each train node.

        Args:
            call: the node's body, which returns a loss with one entry per token, sequence or group.
            shards: this rank's samples, as in `infer`. All shards of all ranks have the same number of
                minibatches.
            step: number of the step, which is also the version of the weights at its start.

        Returns:
            On heads, the body's metrics averaged over the whole step, and `loss` and `grad_norm` (means over
            the optimizer steps) and `lr` (of the last one), which a step without an update lacks, and
            `num_tokens` (learned tokens of the batch). An empty dict on other ranks.

        Raises:
            BackendError: if the model is frozen, or as in `infer`.
            RunError: if the loss has a wrong shape or does not depend on the model, or a gradient is not
                finite.
        """

    @property
    @abc.abstractmethod
    def dtype(self) -> torch.dtype:
        """The dtype of the forward pass, in which `weights` yields tensors."""

    def on_device(self, *, changes: bool = False) -> AbstractContextManager[None]:
        """Have the weights on the device while the context is open, also those of an offloaded model.

        Methods of this class that use weights open it themselves, except `blocks`, which returns views.
        Contexts may be nested. Not a collective.

        Args:
            changes: whether the weights may be changed.
        """
        return nullcontext()

    @abc.abstractmethod
    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield `(HF name, full tensor)` of what training changes, in `dtype`. A collective.

        Every rank exhausts it. Of a model with adapters these alone change, and have names of their own
        (`common/adapter.py`).

        Called after a train step to update engines whose route cannot send slices. Tied weights come once,
        under their first name. A tensor may share storage with the model, so the caller copies what it keeps.
        """

    @abc.abstractmethod
    def blocks(self) -> Iterator[Block]:
        """Yield the blocks that this rank holds of what training changes, as views. Not a collective.

        Called to send slices of the weights to engines, and by update nodes, which write into the views. They
        are valid while `on_device` is open.
        Values are in the dtype that the rank stores, which may differ from `dtype`.

        Blocks of one rank do not overlap, and those of all ranks together cover the model. Tied weights have
        their first name, also on a rank that uses them for the output only. Two replicas of one architecture
        and layout yield the same blocks in the same order.
        """

    def shared_module(self) -> nn.Module | None:
        """Return the HF module whose parameters an engine in this process may use, or None.

        Called once, when engines are built. Only a backend that holds whole weights, updates them in place
        and stores them in the engine's dtype can return one. The engine then needs no copy of the weights.
        """
        return None

    def without_adapters(self, settings: ModelSettings) -> ModelBackend:
        """Return a backend of the frozen model without adapters, which uses this one's weights.

        Called when models are built, if the plan says that a frozen model has no weights of its own.

        Args:
            settings: those of the frozen model.
        """
        raise BackendError(f"{type(self).__name__} has no adapters that could be turned off")

    @abc.abstractmethod
    def save(self, directory: str) -> WriteFiles:
        """Copy the model, and return the function that writes it in HF layout. A collective.

        Called when a checkpoint is due. The function writes this rank's part of `config.json` and
        safetensors, of a trainable model in `dtype`, and may run while the model is trained further. Of a
        model with adapters it writes these, in peft's layout.
        """

    @abc.abstractmethod
    def save_shards(self, directory: str) -> WriteFiles:
        """Copy fp32 weights and the optimizer's state; return the function that writes them. A collective.

        Called after `save`, for a trainable model. Each rank copies and writes its own part; the checkpoint
        is complete when all ranks have. It is written over an older one.

        Raises:
            BackendError: if this rank does not see the directory in which the shards' directory is.
        """

    @abc.abstractmethod
    def load_shards(self, directory: str) -> None:
        """Load weights and the optimizer's state that any backend wrote by `save_shards` in any layout.

        A collective; called once after `__init__`, when a run resumes. A frozen model loads the weights only.
        Each rank reads only what it holds.

        Raises:
            BackendError: if there is no checkpoint, or it is of another model; names the config key or
                tensors.
        """


@dataclass(frozen=True)
class EngineSetup:
    """What a generation engine is built from."""

    settings: ModelSettings
    options: Mapping[str, Any] = field(default_factory=dict)
    """`models.NAME.gen`: `max_running` and `max_model_len`. With a plan, an engine whose cache does not grow
    has also `cache_bytes`, those of each rank's KV cache."""
    tokenizer: TextTokenizer | None = None
    """Decodes tokens to find stop strings; None: requests have none."""
    module: nn.Module | None = None
    """A trainer's module whose parameters the engine shares; None: the engine has its own weights."""
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
    records_experts: bool = False
    """Whether requests may have `routing_replay`. An engine that always can ignores it."""


@dataclass(frozen=True)
class SamplingParams:
    """Settings that decide how one sample is generated."""

    temperature: float = 1.0
    """0 means greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 means all tokens."""
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
    routing_replay: bool = False
    """Whether to record the experts that compute each token."""


@dataclass(frozen=True)
class GenerationResult:
    """The tokens that an engine has drawn for one request; the first three tuples have equal lengths."""

    ids: tuple[int, ...]
    """Drawn tokens, without the prompt."""
    logprobs: tuple[float, ...]
    """Log-prob of each token under the temperature, over the whole vocabulary. With top-p or top-k, vLLM
    reports that of the tokens they leave, so a plan allows these only where no log-prob is used."""
    versions: tuple[int, ...]
    """Version of the weights that drew each token."""
    stop_reason: str
    """`stop`, `length`, or `abort` for an interrupted request."""
    routed_experts: tuple[bytes, ...] = ()
    """The experts that computed each of the first tokens, the prompt's among them (`RoutingFormat`), for
    requests with `routing_replay`. The last drawn token has none, as it was not computed."""


def extended(first: tuple[bytes, ...], later: tuple[bytes, ...]) -> tuple[bytes, ...]:
    """Return the experts of a sequence that was computed twice: where both recorded, the first ones.

    These computed the distribution from which the next token was drawn.
    """
    return first + later[len(first) :]


class GenerationEngine(abc.ABC):
    """A generation engine: a copy of a model, a KV cache and a scheduler.

    `hflow.workers.generation.engine_driver.EngineDriver` owns one. Its thread calls `add`, `cancel` and
    `step`; the worker's thread calls the other methods, between two steps. A lock serializes the calls, so
    an engine need not be thread-safe, but it may be called from different threads.

    An engine begins awake, without requests. While it generates, it has the weights of one version.
    """

    @abc.abstractmethod
    def add(self, request_id: int, prompt_ids: Sequence[int], params: SamplingParams) -> None:
        """Queue a request; later calls of `step` draw its tokens.

        Args:
            request_id: a number that no other unfinished request has.
            prompt_ids: tokens to continue, including those drawn before an interruption.
            params: how to draw.

        Raises:
            BackendError: if the engine cannot serve the request, such as a prompt that is too long.
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
    def interrupt(self) -> list[tuple[int, GenerationResult]]:
        """Remove all requests; return what each has so far, with stop reason `abort`.

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

        Called while the engine is awake, maybe with running requests: they keep their tokens.
        `hflow.weights.loading.load_verified` does the checks for one rank.

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
