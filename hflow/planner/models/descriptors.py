"""Descriptors of training backends and generation engines.

A descriptor holds everything that hflow must know about a backend outside the backend's own package: how it
shards a model, how much memory it needs, what it can run, and which function builds it on a worker.
Descriptors import neither torch nor ray, so planning needs neither. `planner.plan.traits` has the registry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Protocol

from hflow.base.devices import is_gpu
from hflow.planner.plan.traits import BACKENDS, ENGINES, BackendTraits, is_engine

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from hflow.config.schema import ModelConfig
    from hflow.engines.interface import ApiServer, EngineSetup
    from hflow.models.settings import ModelSettings
    from hflow.planner.forecast.memory.parts import EngineLoad, Items, MicroBatch
    from hflow.planner.forecast.memory.rank import Rank
    from hflow.planner.plan.cluster import ClusterSpec
    from hflow.planner.plan.hardware import Hardware
    from hflow.planner.plan.rows import Replica
    from hflow.shapes.model_shape import ModelShape


class TrainingMemory(Protocol):
    """Memory formulas of a training backend; usually a module. All return bytes of one rank."""

    def model_state(self, rank: Rank) -> Items:
        """Return the items that the rank keeps between phases: weights, optimizer state, gradients."""

    def train_step(self, rank: Rank, batch: MicroBatch) -> Items:
        """Return the peak of a train node beyond the model state."""

    def infer_step(self, rank: Rank, batch: MicroBatch) -> Items:
        """Return the peak of an infer node beyond the model state."""

    def kept_after_infer(self, rank: Rank) -> Items:
        """Return the items that an infer node leaves allocated until the replica trains."""


class EngineMemory(Protocol):
    """Memory formulas of a generation engine; usually a module. All return bytes of one rank."""

    def cache_bytes(self, rank: Rank, load: EngineLoad, capacity: int, used: int) -> int:
        """Return the size of the KV cache for the engine's largest load.

        `capacity` is the memory of the device, of which everything else uses `used` bytes.
        """

    def decode_step(self, rank: Rank, load: EngineLoad) -> Items:
        """Return the peak of a step beyond weights and cache."""

    def layer_being_loaded(self, rank: Rank, num_parts: int) -> Items:
        """Return the peak on a GPU while new weights are loaded, beyond the buckets that they arrive in.

        Each tensor arrives in `num_parts` slices.
        """

    def process_state(self, rank: Rank, overhead: int) -> Items:
        """Return the items that an engine's own processes keep in all phases, beside weights and cache.

        The runtime of a process takes `overhead` bytes on the device.
        """

    def max_sequences(self, rank: Rank, cache: int, length: float) -> int | None:
        """Return the sequences of a length that a cache of some bytes holds; None if it grows as needed."""


def _no_variables(replica: Replica, device: str) -> Mapping[str, str]:
    return {}


@dataclass(frozen=True)
class InstallProblem:
    """A reason why this machine cannot run a backend or an engine."""

    reason: str
    fix: str
    """The command that fixes it."""

    def __str__(self) -> str:
        return f"{self.reason}; {self.fix}"


def _no_conflict(device: str) -> InstallProblem | None:
    return None


@dataclass(frozen=True)
class Variation:
    """A reason why results of a backend or an engine differ between runs that must be equal bit for bit."""

    reason: str
    setting: str
    """The setting that avoids it, below `models.NAME`."""


@dataclass(frozen=True)
class TrialRun:
    """A small run by which `hflow doctor` tries one part of hflow on real devices."""

    name: str
    purpose: str
    overrides: tuple[str, ...]
    """Settings. `{n}` is the number of devices, `{half}` half of it, `{cache_gib}` what fills a GPU."""
    num_devices: int | None = None
    """Devices that it runs on; None: all."""
    min_devices: int = 1
    multiple: int = 1
    """The number of devices that are used is a multiple of this."""
    package: str | None = None
    """Importable name of a package that it needs."""
    on_cpu: bool = True
    """Whether it can run on CPUs too."""
    min_memory_gib: float = 0.0
    """GPU memory that it needs."""
    precision: str | None = None
    """What a GPU must compute in, beside fp32 and bf16."""
    fills_memory: bool = False
    """Whether the engine's KV cache takes the GPU's memory, which must be free while it sleeps."""
    replays_experts: bool = False
    """Whether the trainer replays the experts that the engine records."""
    recipe: str = "grpo"
    is_repeated: bool = False
    """Whether it runs twice, and both must end with the same weights and optimizer, bit for bit."""


def _no_variation(device: str) -> Variation | None:
    return None


def _no_reasons(served: ServedModel) -> Iterable[str]:
    return ()


def _no_remark(served: ServedModel) -> str | None:
    return None


def _no_objection(shape: ModelShape, device: str) -> str | None:
    return None


@dataclass(frozen=True, kw_only=True)
class Descriptor:
    """The parts that training backends and generation engines have in common."""

    name: str
    traits: BackendTraits
    factory: Callable[..., Any]
    """Build the backend on a worker; imports torch when called."""
    packages: tuple[str, ...]
    """Importable names of the packages that it needs."""
    install: str
    """Command that installs them."""
    distributions: tuple[str, ...] = ()
    """Names of the distributions whose versions must be the same in all processes of a run."""
    trial_runs: tuple[TrialRun, ...] = ()
    """Runs that try it on real devices."""
    purpose: str = ""
    """The purpose, in a few words."""
    is_required: bool = False
    """Whether hflow cannot run without it."""
    find_conflict: Callable[[str], InstallProblem | None] = _no_conflict
    """Return the reason why the packages cannot run on a kind of device (`cpu`, `cuda`); None if they can. It
    is called when all of them are installed, and imports none of them."""
    environment: Callable[[Replica, str], Mapping[str, str]] = _no_variables
    """Return the environment variables of a worker that hosts this replica on this kind of device."""
    deterministic_variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of a worker that hosts it on CUDA, where runs must be equal bit for bit."""
    find_variation: Callable[[str], Variation | None] = _no_variation
    """Return the reason why two such runs differ on a kind of device; None if they do not."""

    def find_problem(self, device: str) -> InstallProblem | None:
        """Return the reason why this machine's packages cannot run it on `cpu` or `cuda`; None if they can.

        The device itself is not needed.
        """
        missing = [package for package in self.packages if find_spec(package) is None]
        if missing:
            verb = "is" if len(missing) == 1 else "are"
            return InstallProblem(f"{', '.join(missing)} {verb} not installed", self.install)
        return self.find_conflict(device)


@dataclass(frozen=True)
class ServedModel:
    """The model that a generation engine has to serve, as far as the plan knows it."""

    replica: Replica
    config: ModelConfig
    cluster: ClusterSpec
    hardware: Hardware
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
    """Return the reasons why it cannot serve a model, each with a fix. It imports neither torch nor the
    engine's packages."""
    remark: Callable[[ServedModel], str | None] = _no_remark
    """Return the plan's remark on how it runs a model; None: no remark. It imports as little as `check`."""
    find_merging: Callable[[ServedModel], str | None] = _no_remark
    """Return the reason why it merges a model's adapters with its weights, of which it then keeps a copy;
    None: it computes with them beside its weights. It imports as little as `check`."""
    find_unservable: Callable[[ModelShape, str], str | None] = _no_objection
    """Return the reason why it cannot serve a model of this shape on a kind of device; None if it can."""
    server: Callable[[EngineSetup, str, int, str | None], ApiServer] | None = None
    """Build the engine's own OpenAI-compatible server from (setup, host, port, API key). None: it has none,
    and `hflow serve` answers with hflow's endpoint."""
    recording_factory: Callable[..., Any] | None = None
    """A `factory` that takes a dictionary first, in which the engine records the tokens that it samples."""
    replaying_factory: Callable[..., Any] | None = None
    """A `factory` that takes such a dictionary first, from which the engine takes its tokens."""

    def objections(self, served: ServedModel) -> Iterator[str]:
        """Yield the reasons why it cannot serve a model as configured, each with a fix."""
        yield from self.check(served)
        captures = self.traits.captures(served.family, served.config.lora is not None)
        if not served.config.gen.cuda_graphs and not (is_gpu(served.cluster.device) and captures):
            yield (
                f"models.{served.replica.model}.gen.cuda_graphs is false, but decode steps of "
                f"{served.replica.name} ({self.name}, {served.cluster.device}) are no CUDA graphs. Remove it."
            )


@cache
def training_backend(name: str) -> Backend:
    """Return the descriptor of a training backend.

    Raises:
        PlanError: for an unknown name.
    """
    return BACKENDS.describe(name, Backend)


@cache
def engine_kind(name: str) -> EngineKind:
    """Return the descriptor of a generation engine.

    Raises:
        PlanError: for an unknown name.
    """
    return ENGINES.describe(name, EngineKind)


def descriptor(name: str) -> Descriptor:
    """Return the descriptor of a training backend or generation engine.

    Raises:
        PlanError: for an unknown name.
    """
    return engine_kind(name) if is_engine(name) else training_backend(name)


def factories() -> dict[str, Callable[..., Any]]:
    """Return the factories of all backends and engines, by name."""
    return {name: descriptor(name).factory for name in (*BACKENDS, *ENGINES)}
