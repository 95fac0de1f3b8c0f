"""What a training backend or a generation engine builds a model from, and the names of what it saves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hflow.config.schema import LoraConfig, Offload, OptimConfig

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

SHARDS = "shards"
"""Subdirectory of a saved model that holds its sharded checkpoint (`ModelBackend.save_shards`)."""
SHARDS_INDEX = "shards.json"
"""File of that checkpoint that lists its tensors, and says after how many optimizer steps it was saved."""
MERGED = "merged"
"""Subdirectory of a saved adapter that holds the merged model, where that is saved too."""


@dataclass(frozen=True)
class ModelSettings:
    """Settings from which a backend or an engine builds a model."""

    name: str
    head: str = "lm"
    """`lm`, `value` (a critic) or `score` (a reward model)."""
    trainable: bool = False
    path: str | None = None
    """A local HF checkpoint directory; its weights and config are used."""
    architecture: Mapping[str, Any] | None = None
    """An HF config as a dict with `model_type`, for a model that starts from random weights."""
    seed: int = 0
    """Seed of the random weights."""
    dtype: str = "fp32"
    """`fp32` or `bf16`: the dtype of the forward and backward pass."""
    device: str = "cpu"
    """`cpu` or `cuda`."""
    activation_checkpointing: bool = False
    offload_activations: bool = False
    """Whether the inputs of recomputed layers are in host memory until the backward pass needs them."""
    compile: bool = False
    """Whether `torch.compile` compiles the decoder layers."""
    offload: Offload = "none"
    """What is in host memory while no node uses it: `none`, `optimizer` (with gradients and master weights)
    or `all` (with the weights)."""
    sequence_parallel: bool | None = None
    """Whether tensor ranks also split the tokens between their matrices (megatron). None turns it on for
    CUDA, where it saves memory at no cost, and off for gloo, where it costs time."""
    kernels: str = "torch"
    """What computes the layers (megatron): `torch` or `transformer_engine`."""
    tokens_per_microbatch: int = 16384
    """Maximum tokens of a micro-batch; a longer sequence is a micro-batch of its own."""
    lora: LoraConfig | None = None
    """Adapters that are trained in place of the weights; None: the weights are."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    num_updates: int = 0
    """Optimizer steps of the model until the end of the run, over which its learning rate decays. Those that
    a resumed optimizer had made before the run count too."""
    save_optimizer: bool = True
    """Whether saving a trainable model includes its optimizer's state."""
    resume: bool = False
    """Whether to load the optimizer's state that was saved."""
    saved: str | None = None
    """The directory in which it was saved; None: `path`."""

    @property
    def shards(self) -> str:
        """The directory of the sharded checkpoint that a resumed model loads."""
        return f"{self.saved or self.path}/{SHARDS}"


@dataclass(frozen=True)
class RankPosition:
    """The process group of a replica and its layout.

    Rank r of the group has data index d, tensor index t, pipeline stage p and context index c, with
    `r = ((p * data + d) * context + c) * tensor + t`.
    """

    group: ProcessGroup | None = None
    """The replica's ranks; None where one process hosts them all."""
    data: int = 1
    tensor: int = 1
    pipe: int = 1
    context: int = 1
    expert: int = 1
    """Number of neighbouring data and context ranks that divide the experts of a layer."""
