"""Names of the training backends and generation engines, and the traits that tell them apart.

To add one, write `descriptor.py` in `training/NAME` or `engines/NAME`, and add one line to `BACKENDS` or
`ENGINES`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from hflow.base.registry import Registry

BACKENDS = Registry(
    "backend",
    "hflow.backends",
    {
        "torch": "hflow.training.fsdp.descriptor:BACKEND",
        "megatron": "hflow.training.megatron.descriptor:BACKEND",
    },
)
"""The training backends, each with its descriptor."""
ENGINES = Registry(
    "engine",
    "hflow.engines",
    {
        "embedded": "hflow.engines.embedded.descriptor:ENGINE",
        "vllm": "hflow.engines.vllm.descriptor:ENGINE",
    },
)
"""The generation engines, each with its descriptor. No engine may have the name of a backend."""


@dataclass(frozen=True)
class BackendTraits:
    """The traits of a backend or engine in which it is one choice of a few."""

    sharded_over_data: Literal["nothing", "optimizer", "everything"]
    """What the data axis shards: nothing (every data rank holds its tensor and pipeline shard whole), the
    optimizer state (Megatron's distributed optimizer), or weights, gradients and optimizer state (FSDP2: the
    first axis of each tensor in equal blocks of rows, of which the last ones may be short or empty)."""
    overlaps_optimizer: bool = False
    """Whether the collectives of a sharded optimizer state run beside the passes: gradients are scattered
    during the last backward pass, new weights gathered during the first forward pass. FSDP always does."""
    overlaps_tensor: bool = False
    """Whether sums over tensor ranks run beside products (`tp_comm_overlap` of Transformer Engine)."""
    is_model_parallel: bool = False
    """Whether it has a tensor axis. Without one, replicas grow along the data axis only."""
    has_pipeline_axis: bool = False
    """Whether it divides the layers over pipeline stages as well."""
    has_context_axis: bool = False
    """Whether it divides the tokens of each sequence over context ranks."""
    has_expert_axis: bool = False
    """Whether it divides the experts of a layer over data and context ranks."""
    sends_expert_copies: bool = False
    """Whether a token is sent once for each of its experts, and the copies are gathered by the tensor ranks
    that divide an expert. Otherwise it is sent once to each rank that has some of its experts."""
    has_exchange_kernels: bool = False
    """Whether kernels that are made for it, such as DeepEP's, send tokens to experts. Otherwise NCCL does, a
    copy for each expert of a token."""
    vocab_multiple: int | None = None
    """The vocabulary is padded to a multiple of this times the tensor size. None: the tensor size must divide
    the vocabulary."""
    pads_whole_vocab: bool = False
    """Whether the whole vocabulary is padded to `vocab_multiple`, which the tensor size must then divide
    (vLLM), rather than the part of each tensor rank."""
    shares_prompts: bool = False
    """Whether a forward pass computes the prompt of a group once (`data/batches/shared_prefix.py`)."""
    has_adapters: bool = False
    """Whether it trains low-rank adapters (`models.NAME.lora`)."""
    shares_base: bool = False
    """Whether an engine serves several models with adapters on one base (`models.NAME.base_of`)."""
    rounds_base: bool = False
    """Whether the matrices beside adapters may be in 4 bits (`models.NAME.lora.base`)."""
    chooses_kernels: bool = False
    """Whether different kernels can compute its layers (`models.NAME.kernels`)."""
    compiles_layers: bool = False
    """Whether it compiles the layers of a model (`models.NAME.compile`)."""
    families: tuple[str, ...] | None = None
    """The `model_type`s that it can build. None: every causal language model of transformers."""
    has_own_process: bool = False
    """Whether it runs in a process of its own, so that it never shares a module with a trainer and needs
    devices and cores by name. Only the head of its tensor ranks builds it."""
    has_own_attention: bool = False
    """Whether it chooses attention kernels itself, unlike the backends (`types.kernels`)."""
    adapter_ranks: tuple[int, ...] = ()
    """The ranks that an engine's buffers of adapters can have. Smaller adapters are padded with zeros. Empty:
    any rank."""
    captured_families: tuple[str, ...] | None = ()
    """The `model_type`s of which an engine's decode steps are CUDA graphs on a GPU, without adapters. None:
    all, also with adapters."""
    logit_passes: float = 0.0
    """How often drawing a token on a GPU reads or writes a logit, where no figure of its host counts that."""
    schedules_ahead_on: tuple[str, ...] = ()
    """Types of devices on which an engine prepares a decode step while the device computes the one before
    (asynchronous scheduling)."""
    precisions: tuple[tuple[str, str], ...] = ()
    """The keys and values of `gen` by which an engine can round to less than the model's dtype."""
    records: tuple[str, ...] = ()
    """The kinds that an engine records of the requests that ask for them (`types/recorded.py`)."""
    records_up_to_top_k: bool = False
    """Whether it needs `top_k` to record which tokens sampling leaves (`types/sampling_mask.py`)."""

    @property
    def shards_weights(self) -> bool:
        """Whether the data axis shards weights, so that there may be a replicate axis (HSDP)."""
        return self.sharded_over_data == "everything"

    def captures(self, family: str | None, has_adapters: bool) -> bool:
        """Return whether an engine's decode steps of a model are CUDA graphs on a GPU."""
        families = self.captured_families
        return families is None or (family in families and not has_adapters)

    def padded_rank(self, r: int) -> int:
        """Return the rank of an engine's buffers of adapters of rank `r`."""
        return min((rank for rank in self.adapter_ranks if rank >= r), default=r)

    @property
    def has_all_families(self) -> bool:
        """Whether it can build every causal language model of transformers."""
        return self.families is None


Trait = Literal[
    "is_model_parallel",
    "shards_weights",
    "has_context_axis",
    "has_expert_axis",
    "has_adapters",
    "rounds_base",
    "chooses_kernels",
    "compiles_layers",
    "has_own_process",
    "has_all_families",
]
"""A trait that a message tells the user to choose a backend for."""


def is_engine(name: str) -> bool:
    """Return whether a name is that of a generation engine, rather than of a training backend."""
    return name not in BACKENDS.own and name in ENGINES


@cache
def traits(name: str) -> BackendTraits:
    """Return the traits of a training backend or generation engine.

    Raises:
        PlanError: for an unknown name.
    """
    described: Any = (ENGINES if is_engine(name) else BACKENDS).load(name)
    found: BackendTraits = described.traits
    return found


def first_with(trait: Trait, names: Iterable[str] = BACKENDS) -> str:
    """Return the first training backend (or engine, given `ENGINES`) that has a trait, to suggest it."""
    return next(name for name in names if getattr(traits(name), trait))
