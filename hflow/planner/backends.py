"""Descriptors of training backends and generation engines, and the registry that finds them by name.

A descriptor holds everything that hflow must know about a backend outside the backend's own package: how it
shards a model, how much memory it needs, what it can run, and which function builds it on a worker.
Descriptors import neither torch nor ray, so planning needs neither.

To add a backend, write `hflow/backends/NAME/descriptor.py` and add one line to `_BACKENDS` or `_ENGINES`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal, Protocol

from hflow.errors import PlanError, nearest

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from hflow.backends.interface import ModelSettings
    from hflow.config.schema import ModelConfig
    from hflow.planner.ir import ClusterSpec, Replica
    from hflow.planner.memory.engine_load import EngineLoad
    from hflow.planner.memory.items import Items
    from hflow.planner.memory.microbatch import MicroBatch
    from hflow.planner.memory.rank import Rank
    from hflow.planner.model_shape import ModelShape

_BACKENDS = {
    "torch": "hflow.backends.torch_model.descriptor",
    "megatron": "hflow.backends.megatron.descriptor",
}
"""Training backend -> the module whose `BACKEND` describes it. The first is the default."""
_ENGINES = {
    "embedded": "hflow.backends.embedded_engine.descriptor",
    "vllm": "hflow.backends.vllm_engine.descriptor",
}
"""Generation engine -> the module whose `ENGINE` describes it. The first is the default."""

BACKENDS = tuple(_BACKENDS)
"""Names of the training backends, the default first."""
ENGINES = tuple(_ENGINES)
"""Names of the generation engines, the default first."""


@dataclass(frozen=True)
class BackendTraits:
    """How a backend or engine shards a model."""

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
    vocab_multiple: int | None = None
    """The vocabulary is padded to a multiple of this times the tensor size. None: the tensor size must divide
    the vocabulary."""
    pads_whole_vocab: bool = False
    """Whether the whole vocabulary is padded to `vocab_multiple`, which the tensor size must then divide
    (vLLM), rather than the part of each tensor rank."""
    shares_prompts: bool = False
    """Whether a forward pass computes the prompt of a group once (`data/shared_prefix.py`)."""
    has_adapters: bool = False
    """Whether it trains low-rank adapters (`models.NAME.lora`)."""
    chooses_kernels: bool = False
    """Whether different kernels can compute its layers (`models.NAME.kernels`)."""
    families: tuple[str, ...] | None = None
    """The `model_type`s that it can build. None: every causal language model of transformers."""


class TrainingMemory(Protocol):
    """Memory formulas of a training backend; usually a module. All return bytes of one rank."""

    def model_state(self, rank: Rank) -> Items:
        """Return what the rank keeps between phases: weights, optimizer state, gradients."""

    def train_step(self, rank: Rank, batch: MicroBatch) -> Items:
        """Return the peak of a train node beyond the model state."""

    def infer_step(self, rank: Rank, batch: MicroBatch) -> Items:
        """Return the peak of an infer node beyond the model state."""

    def kept_after_infer(self, rank: Rank) -> Items:
        """Return what an infer node leaves allocated until the replica trains."""


class EngineMemory(Protocol):
    """Memory formulas of a generation engine; usually a module. All return bytes of one rank."""

    def cache_bytes(self, rank: Rank, load: EngineLoad, capacity: int, used: int) -> int:
        """Return the size of the KV cache.

        Args:
            rank: a rank of the engine.
            load: the largest load of the engine.
            capacity: memory of the device.
            used: bytes of the device that everything else uses.
        """

    def decode_step(self, rank: Rank, load: EngineLoad) -> Items:
        """Return the peak of a step beyond weights and cache."""

    def process_state(self, rank: Rank, overhead: int) -> Items:
        """Return what an engine with processes of its own keeps in all phases, beside weights and cache.

        Args:
            rank: a rank of the engine.
            overhead: bytes that the runtime of a process takes on the device.
        """

    def max_sequences(self, rank: Rank, cache: int, length: float) -> int | None:
        """Return how many sequences of a length a cache of some bytes holds; None if it grows as needed."""


def _no_variables(replica: Replica, device: str) -> Mapping[str, str]:
    return {}


@dataclass(frozen=True)
class InstallProblem:
    """Why this machine cannot run a backend or an engine."""

    reason: str
    fix: str
    """The command that fixes it."""

    def __str__(self) -> str:
        return f"{self.reason}; {self.fix}"


def _no_conflict(device: str) -> InstallProblem | None:
    return None


@dataclass(frozen=True)
class Variation:
    """Why the results of a backend or an engine differ between two runs that must be equal bit for bit."""

    reason: str
    setting: str
    """What to set instead, below `models.NAME`."""


def _no_variation(device: str) -> Variation | None:
    return None


def _no_reasons(served: ServedModel) -> Iterable[str]:
    return ()


def _no_remark(served: ServedModel) -> str | None:
    return None


@dataclass(frozen=True, kw_only=True)
class Descriptor:
    """What training backends and generation engines have in common."""

    name: str
    traits: BackendTraits
    factory: Callable[..., Any]
    """Build the backend on a worker; imports torch when called."""
    packages: tuple[str, ...]
    """Importable names of the packages that it needs."""
    install: str
    """Command that installs them."""
    purpose: str = ""
    """What it is for, in a few words."""
    is_required: bool = False
    """Whether hflow cannot run without it."""
    find_conflict: Callable[[str], InstallProblem | None] = _no_conflict
    """Return why the installed packages cannot run on a kind of device (`cpu`, `cuda`). It is called when all
    packages are installed, and imports none of them."""
    environment: Callable[[Replica, str], Mapping[str, str]] = _no_variables
    """Return the environment variables of a worker that hosts this replica on this kind of device."""
    deterministic_variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of a worker that hosts it on CUDA, where runs must be equal bit for bit."""
    find_variation: Callable[[str], Variation | None] = _no_variation
    """Return why its results on a kind of device differ between two such runs; None if they do not."""

    def find_problem(self, device: str) -> InstallProblem | None:
        """Return why the packages of this machine cannot run it; None if they can.

        Args:
            device: the kind of device to run on, `cpu` or `cuda`. The device itself is not needed.
        """
        missing = [package for package in self.packages if find_spec(package) is None]
        if missing:
            verb = "is" if len(missing) == 1 else "are"
            return InstallProblem(f"{', '.join(missing)} {verb} not installed", self.install)
        return self.find_conflict(device)


@dataclass(frozen=True)
class ServedModel:
    """What a generation engine has to serve, as far as the plan knows it."""

    replica: Replica
    config: ModelConfig
    cluster: ClusterSpec
    shape: ModelShape | None
    """None if the planner does not know the model's family or sizes."""
    family: str | None
    """The model's `model_type`; None if neither its checkpoint nor its configuration is at hand."""


@dataclass(frozen=True, kw_only=True)
class Backend(Descriptor):
    """A training backend: trains models and infers with them.

    `factory` is called with `ModelSettings` and `RankPosition` and returns a `ModelBackend`.
    """

    memory: TrainingMemory
    needs_process_per_rank: bool = False
    """Whether several ranks cannot share a process, as `workers=inproc` would need."""
    update_dtypes: tuple[str, ...] = ("fp32", "bf16")
    """Compute dtypes in which update nodes may change its weights."""
    check_model: Callable[[ModelSettings, PreTrainedConfig], None] | None = None
    """Check a model's settings and HF config before any worker starts.

    Raises:
        BackendError: when the model cannot be built, or its checkpoint does not match.
    """


@dataclass(frozen=True, kw_only=True)
class EngineKind(Descriptor):
    """A kind of generation engine.

    `factory` is called with an `EngineSetup` and returns a `GenerationEngine`.
    """

    memory: EngineMemory
    preferred_on: tuple[str, ...] = ()
    """Kinds of devices on which it is the default where it is installed and can serve the model."""
    check: Callable[[ServedModel], Iterable[str]] = _no_reasons
    """Return why it cannot serve a model, each with what to set instead. It imports neither torch nor the
    engine's packages."""
    remark: Callable[[ServedModel], str | None] = _no_remark
    """Return what the plan says about how it runs a model; None: nothing. It imports as little as `check`."""
    has_own_process: bool = False
    """Whether it runs in a process of its own, so that it never shares a module with a trainer and needs
    devices and cores by name. Only the head of its tensor ranks builds it."""
    has_own_attention: bool = False
    """Whether it chooses attention kernels itself, unlike the backends (`types.attention_kernel`)."""
    merges_adapters: bool = False
    """Whether it adds the adapters of a model to its weights, of which it keeps a copy in host memory. An
    engine that does not has the adapters beside them."""
    recording_factory: Callable[..., Any] | None = None
    """As `factory`, with a dictionary in front in which the engine records the tokens that it samples."""
    replaying_factory: Callable[..., Any] | None = None
    """As `factory`, with such a dictionary in front, from which the engine takes its tokens."""


@cache
def training_backend(name: str) -> Backend:
    """Return the descriptor of a training backend.

    Raises:
        PlanError: for an unknown name.
    """
    backend = importlib.import_module(_module(_BACKENDS, "backend", name)).BACKEND
    assert isinstance(backend, Backend)
    assert backend.name == name
    return backend


@cache
def engine_kind(name: str) -> EngineKind:
    """Return the descriptor of a generation engine.

    Raises:
        PlanError: for an unknown name.
    """
    engine = importlib.import_module(_module(_ENGINES, "engine", name)).ENGINE
    assert isinstance(engine, EngineKind)
    assert engine.name == name
    return engine


def descriptor(name: str) -> Descriptor:
    """Return the descriptor of a training backend or generation engine.

    Raises:
        PlanError: for an unknown name.
    """
    return engine_kind(name) if name in _ENGINES else training_backend(name)


def traits(name: str) -> BackendTraits:
    """Return the traits of a training backend or generation engine.

    Raises:
        PlanError: for an unknown name.
    """
    return descriptor(name).traits


def factories() -> dict[str, Callable[..., Any]]:
    """Return the factories of all backends and engines, by name."""
    return {name: descriptor(name).factory for name in (*BACKENDS, *ENGINES)}


def model_parallel_backend() -> str:
    """Return the name of the first training backend with a tensor and a pipeline axis."""
    return next(name for name in BACKENDS if traits(name).is_model_parallel)


def context_backend() -> str:
    """Return the name of the first training backend with a context axis."""
    return next(name for name in BACKENDS if traits(name).has_context_axis)


def expert_backend() -> str:
    """Return the name of the first training backend with an expert axis."""
    return next(name for name in BACKENDS if traits(name).has_expert_axis)


def adapter_backend() -> str:
    """Return the name of the first training backend that trains low-rank adapters."""
    return next(name for name in BACKENDS if traits(name).has_adapters)


def kernel_backend() -> str:
    """Return the name of the first training backend whose layers different kernels can compute."""
    return next(name for name in BACKENDS if traits(name).chooses_kernels)


def backend_of_any_family() -> str:
    """Return the name of the first training backend that builds every language model of transformers."""
    return next(name for name in BACKENDS if traits(name).families is None)


def engine_of_any_family() -> str:
    """Return the name of the first engine that generates with every language model of transformers."""
    return next(name for name in ENGINES if traits(name).families is None)


def _module(registry: Mapping[str, str], what: str, name: str) -> str:
    if name not in registry:
        raise PlanError(f"unknown {what} {name!r}{nearest(name, registry)} (known: {', '.join(registry)})")
    return registry[name]
