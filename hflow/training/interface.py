"""The interface that a training backend implements.

A worker owns backends, and passes fields to them as `hflow.data.batches.batch.Batch`: numpy arrays,
packed without padding. torch stays on the backend's side of this border.

Axes: S sequences, T packed tokens of S sequences, P prompts (groups), K entries of one token.

**Ranks.** A replica of a model spans one or more ranks (processes with one device each); a `ModelBackend` is
one rank's shard of it. The ranks are laid out as data x tensor x pipeline axes. For each data index one rank,
its *head*, receives samples and returns results: the rank with tensor index 0 on the last pipeline stage. The
other ranks are called at the same time with empty lists.

**Collectives.** All ranks of a replica make the same calls in the same order, so every method that says
"collective" may communicate over `RankPosition.group`. The others may not.

**Threads.** A worker calls its backends from one thread, one call at a time.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hflow.base.errors import BackendError
from hflow.metrics import declare
from hflow.models.settings import ModelSettings, RankPosition
from hflow.types import Unit

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from hflow.base.durable_files import WriteFiles
    from hflow.data.batches.batch import Batch
    from hflow.graph.ir import Read
    from hflow.types.tensor_slices import Block


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
NUM_COMPUTED_TOKENS = declare(
    "{node}/computed_tokens",
    "tokens",
    "tokens that passed through the model in all epochs; a prompt that a group shares may count once",
)
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
OBSERVED_NLL = declare(
    "{node}/observed_nll", "nats", "mean of -log p of the observed tokens, for a train node with observed="
)
REROUTED = declare(
    "{node}/rerouted",
    "",
    "share of tokens and layers for which the trainer's router would have chosen other experts than the "
    "engine's, which it replays (routing_replay)",
)

BALANCE_LOSS = declare(
    "{node}/balance_loss",
    "",
    "loss of models.NAME.balance before its coefficient, the mean over layers; 1: all experts have the same "
    "load",
)
MAX_LOAD = declare(
    "{node}/max_load",
    "",
    "tokens of the busiest expert divided by the mean of its layer, in the layer where it is largest, with "
    "models.NAME.balance",
)

FIRST_PASS_STREAM = "@first_pass"
"""The stream of the fields that a train node's first pass reads of the model, and of its result."""


def _ignore(samples: Sequence[int]) -> None:
    """Do nothing with samples that are skipped."""


@dataclass(frozen=True)
class NodeCall:
    """A node's body and everything that its call needs besides the data.

    `hflow.data.batches.batch_arguments.bind_batch` makes the body's keyword arguments from this and a batch.
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
    """The node's options: `mask`, `observed`, `prox`, and of a train node `reduce` and `epochs`."""
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

    @property
    def keeps_groups_whole(self) -> bool:
        """Whether a group stays in one micro-batch, as the body reads or returns groups."""
        returns_groups = any(unit == Unit.GROUP for _, unit in self.returns)
        return returns_groups or any(read.field == "group" for read in self.reads)


@dataclass(frozen=True)
class TrainShard:
    """One data index's samples of a step, minibatch by minibatch (each may be empty)."""

    minibatches: tuple[Batch, ...]


class ModelBackend(abc.ABC):
    """One rank's shard of a model that runs infer and train nodes.

    To add a backend, implement this class, describe it in `training/NAME/descriptor.py` and add it to the
    registry in `planner/plan/traits.py`; `training/fsdp` is an example. Results may not depend on the layout:
    losses and metrics use denominators that are global over the replica.
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
        (`models/adapter.py`).

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

    def share_weights(self, settings: ModelSettings) -> ModelBackend:
        """Return a backend of another model on this one's frozen weights, with the adapters of its settings.

        Called when models are built, if the plan says that a model has no weights of its own. Without `lora`
        it is the frozen model without adapters. With `lora` it trains its own, which no other model reads.

        Args:
            settings: settings of the other model.
        """
        raise BackendError(f"{type(self).__name__} does not share its weights")

    def pin_copies(self) -> None:  # noqa: B027  optional
        """Begin to pin the host memory to which `save` and `save_shards` copy, on a thread.

        Called once, after the model is built, if the run saves it. Without it the first save pins the memory.
        """

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
