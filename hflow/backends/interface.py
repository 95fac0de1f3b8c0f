"""What workers ask of a training backend and of a generation engine.

Fields cross this border as `hflow.data.batch.Batch` (numpy, packed); everything torch stays
inside. A backend holds one replica's shard on one worker; where several dp shards of a replica
map to one worker (in-process runs), it is handed several batches and treats them as that many
ranks, which changes no result as all denominators are global.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hflow.metrics import declare

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.distributed import ProcessGroup

    from hflow.data.batch import Batch
    from hflow.types.tensor_slices import Block


LOSS = declare("{node}/loss", "", "loss of a train node, averaged over the step's updates", live="last")
GRAD_NORM = declare("{node}/grad_norm", "", "norm of the gradient before clipping, averaged over the updates")
LEARNING_RATE = declare("{node}/lr", "", "learning rate of the step's last update")
NUM_TRAINED_TOKENS = declare("{node}/num_tokens", "tokens", "learned tokens of the batch")

SHARDS = "shards"
"""Directory beside a model's HF files that holds what is trained of it (`ModelBackend.save_shards`)."""


@dataclass(frozen=True)
class OptimSettings:
    """AdamW and its learning-rate schedule."""

    lr: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    warmup_steps: int = 0
    schedule: str = "constant"
    """`constant | linear | cosine`, over `total_steps` optimizer steps after the warm-up."""
    min_lr_ratio: float = 0.0
    total_steps: int = 0
    clip_grad: float = 1.0
    """Maximum global gradient norm; 0 turns clipping off."""


@dataclass(frozen=True)
class ModelSettings:
    """How to build one replica of a model."""

    name: str
    head: str = "lm"
    trainable: bool = False
    path: str | None = None
    """A local HF checkpoint directory; its weights and config are used."""
    architecture: Mapping[str, Any] | None = None
    """An HF config as a dict with `model_type`, for a model that starts from random weights."""
    seed: int = 0
    dtype: str = "fp32"
    device: str = "cpu"
    activation_checkpointing: bool = False
    sequence_parallel: bool | None = None
    """Whether tensor ranks also share the tokens of what lies between their matrices (megatron). None: on
    CUDA, where it costs nothing and saves memory; over gloo it costs time."""
    tokens_per_microbatch: int = 16384
    optim: OptimSettings = field(default_factory=OptimSettings)
    save_optimizer: bool = True
    """Whether what is saved of a trainable model includes the optimizer's state."""
    resume: bool = False
    """Whether to start with the optimizer's state that was saved beside `path`."""


@dataclass(frozen=True)
class RankPosition:
    """A process's place in its replica: the group of all its ranks, and how they are laid out.

    A rank of the group is `p * (data * tensor) + d * tensor + t`, the training order.
    """

    group: ProcessGroup | None = None
    """The replica's ranks; None where one process hosts them all."""
    data: int = 1
    tensor: int = 1
    pipe: int = 1


@dataclass(frozen=True)
class NodeCall:
    """A body with everything bound but its data.

    `bind(batch, seqs, output)` in `hflow.data.batch_arguments` makes the keyword arguments.
    """

    node: str
    body: Callable[..., Any]
    reads: tuple[Any, ...]
    """`hflow.graph.ir.Read` rows."""
    provided: tuple[tuple[str, str], ...]
    returns: tuple[tuple[str, str], ...]
    """(field, unit)."""
    metrics: bool
    knobs: Mapping[str, Any]
    options: Mapping[str, Any]
    temperature: float = 1.0
    """Generation temperature of the model's policy: log-probs and entropy divide logits by it."""


@dataclass(frozen=True)
class TrainShard:
    """One dp rank's samples of a step, minibatch by minibatch (each may be empty)."""

    minibatches: tuple[Batch, ...]


class ModelBackend(abc.ABC):
    """One replica's shard of a model for inference and training."""

    @abc.abstractmethod
    def __init__(self, settings: ModelSettings, position: RankPosition) -> None:
        """Build it.

        Args:
            settings: what to build.
            position: this process's place among the replica's ranks.
        """

    @abc.abstractmethod
    def infer(self, call: NodeCall, shards: Sequence[Batch]) -> list[Batch]:
        """Run a no-grad forward and the body; return a batch of the returned fields per shard."""

    @abc.abstractmethod
    def train(self, call: NodeCall, shards: Sequence[TrainShard], step: int) -> dict[str, float]:
        """Run all minibatches and epochs of one step; return globally averaged metrics."""

    @property
    @abc.abstractmethod
    def dtype(self) -> torch.dtype:
        """What the model computes in, and `weights` are in."""

    @abc.abstractmethod
    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield HF-named full tensors one by one, in `dtype`; a collective over the replica's ranks."""

    @abc.abstractmethod
    def blocks(self) -> Iterator[Block]:
        """Yield all that this rank holds of the weights, in the dtype that it keeps; not a collective.

        No two blocks of a rank overlap, and those of all ranks together are the model. Tied weights come
        under their first name, also on a rank that has them for the output only. Replicas of one
        architecture and layout yield alike.
        """

    def shared_module(self) -> nn.Module | None:
        """The HF module whose storage an engine in this process may share; None: it has its own copy.

        Only a backend that holds whole weights, updated in place, in the dtype that the engine
        computes in, can offer one.
        """
        return None

    @abc.abstractmethod
    def save(self, directory: str) -> None:
        """Write the model in HF layout (`config.json`, safetensors); a collective."""

    @abc.abstractmethod
    def save_shards(self, directory: str) -> None:
        """Write fp32 weights and the optimizer's state, each rank what it holds; a collective.

        The directory appears when all of it is written, and replaces what was there.
        """

    @abc.abstractmethod
    def load_shards(self, directory: str) -> None:
        """Take weights and optimizer's state from what `save_shards` wrote in any layout and backend.

        A frozen model takes the weights. Each rank reads only what it holds.

        Raises:
            BackendError: when there is none, or it is of another model; keys or tensors are named.
        """


@dataclass(frozen=True)
class SamplingParams:
    """How one sample is generated."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 means all tokens."""
    max_tokens: int = 128
    stop_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    seed: int = 0
    num_resumed: int = 0
    """How many of the prompt's last tokens were drawn before an interruption: a stop string may
    reach back into them."""


@dataclass(frozen=True)
class GenerationResult:
    """What an engine returns for one request; all four tuples have one length."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    stop_reason: str


class GenerationEngine(abc.ABC):
    """One generation engine: a model copy, a KV cache and a scheduler, stepped by its owner."""

    @abc.abstractmethod
    def add(self, request_id: int, prompt_ids: Sequence[int], params: SamplingParams) -> None:
        """Queue a request; tokens are drawn at later steps."""

    @abc.abstractmethod
    def cancel(self, request_id: int) -> None:
        """Forget a request, waiting or running; nothing is returned for it."""

    @abc.abstractmethod
    def step(self) -> list[tuple[int, GenerationResult]]:
        """Admit waiting requests, draw one token for every running one; return the finished."""

    @abc.abstractmethod
    def interrupt(self) -> list[tuple[int, GenerationResult]]:
        """Abort everything; return what each unfinished request has so far (`abort`)."""

    @property
    @abc.abstractmethod
    def num_unfinished(self) -> int:
        """Requests waiting or running."""

    @abc.abstractmethod
    def load_weights(self, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        """Take new weights between two steps; caches made with the old ones are dropped."""

    @abc.abstractmethod
    def weights(self) -> Mapping[str, Tensor]:
        """HF name -> the tensor that it generates with; tied ones under each of their names."""

    @abc.abstractmethod
    def set_version(self, version: int) -> None:
        """Declare that weights shared with a trainer have changed; caches are dropped."""

    @abc.abstractmethod
    def sleep(self) -> None:
        """Free the KV cache (and weights that are its own) until `wake`."""

    @abc.abstractmethod
    def wake(self) -> None:
        """Allocate again."""
