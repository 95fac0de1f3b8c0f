"""The interface between the controller and the workers: the handle that sends messages, and their contents.

The controller (`runtime.execution.executor`) knows ids, lengths, versions and workers. Tensors stay in the
workers' stores and move from worker to worker. All messages are frozen rows of plain values.
"""

from __future__ import annotations

import abc
import asyncio
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from hflow.base.durable_files import FileChecksum
from hflow.base.waiting import WaitFor, wait_silently
from hflow.data_plane.redistribute import Moves
from hflow.planner.plan.rows import Plan, Replica
from hflow.services.client import ServiceAccess
from hflow.types.body_line import BodyLine
from hflow.types.engine import EngineStats, SleepLevel

if TYPE_CHECKING:
    from hflow.data.rows.datasets import DataSettings
    from hflow.data.text.tokenizer import TokenizerSettings
    from hflow.graph.ir import Read
    from hflow.models.settings import ModelSettings
    from hflow.weights.publisher import PublishReport


class Workers(abc.ABC):
    """All workers of a run, as the executor sees them. One instance per run.

    A method with a body here only forwards a message. `Worker` has a method of the same name that receives
    it, and `messages.MESSAGES` has a row that says how it runs. An implementation defines the abstract
    methods, and how a message reaches one worker (`_call`) or all workers of a replica (`_call_replica`).
    """

    _plan: Plan
    """Set by `start`."""
    replaceable: Mapping[int, str] = {}
    """Workers that `replace` can replace, each with its generation replica. Set by `start`."""

    @abc.abstractmethod
    async def start(
        self,
        setup: WorkerSetup,
        report_progress: Callable[[str], None] = lambda line: None,
        wait_for: WaitFor = wait_silently,
    ) -> None:
        """Create the workers, join their process groups and build replicas; returns when all are ready."""

    async def open_groups(self, worker: int, tasks: Sequence[GroupTask]) -> None:
        """Start the source of each group; results come by `poll`."""
        await self._call(worker, "open_groups", worker, tasks)

    async def detach_groups(self, worker: int, stream: str, groups: Sequence[int]) -> list[GroupTask]:
        """Stop groups and return tasks, with journals, by which any worker can continue them.

        Their engines must be asleep. Groups with a finished sample are left alone. Nothing more is reported
        about the samples of the others.
        """
        tasks: list[GroupTask] = await self._call(worker, "detach_groups", worker, stream, groups)
        return tasks

    async def compute(self, worker: int, tasks: Sequence[ComputeTask]) -> None:
        """Queue sample- and group-level bodies; results come by `poll`."""
        await self._call(worker, "compute", worker, tasks)

    async def poll(self, worker: int, num_lines: int = 0) -> WorkerReport:
        """Wait until something happens on the worker, which has reported so many lines, and return it."""
        report: WorkerReport = await self._call(worker, "poll", worker, num_lines)
        return report

    async def body_lines(self, worker: int, num_lines: int) -> tuple[BodyLine, ...]:
        """Return the lines of bodies since the last report that was received. For a run that ends."""
        lines: tuple[BodyLine, ...] = await self._call(worker, "body_lines", worker, num_lines)
        return lines

    @abc.abstractmethod
    async def transfer(self, moves: Moves) -> int:
        """Perform moves between stores and return the bytes moved.

        Nodes that are run after this call has begun find the moved fields, without waiting for its answer.
        """

    @abc.abstractmethod
    async def run(self, tasks: Mapping[int, NodeTask]) -> list[NodeResult]:
        """Run one batch node on several workers at once; its collectives need all of them.

        Returns the results in the order of `tasks`.
        """

    @abc.abstractmethod
    async def publish(self, replica: str, version: int) -> tuple[tuple[int, Span], ...]:
        """Copy weights out of the training replica, for a generation replica that pulls them.

        The copy is made before anything that is sent to the same devices later. Returns a span per sender,
        with its worker.
        """

    @abc.abstractmethod
    async def wake(self, replica: str, version: int) -> WeightsLoaded:
        """Bring a generation replica to `version` by the plan's weight route, and start it.

        It loads what was published for it; if nothing was, the weights are copied now.
        """

    def forget_weights(self, replica: str) -> None:
        """Drop what was published for a generation replica, because it has lost an engine.

        What is published later is whole, and reaches the process that takes the engine's place.
        """
        raise NotImplementedError(f"no worker is replaced, so {replica} loses no engine")

    async def sleep(self, replica: str, level: SleepLevel) -> None:
        """Interrupt and stop a generation replica; unfinished samples stay on its workers.

        With `DROP_WEIGHTS`, it must wake with another version.
        """
        await self._call_replica(self._plan.replica(replica), "sleep", replica, level)

    async def release(
        self, worker: int, samples: Sequence[int], stream: str, fields: Sequence[str] | None
    ) -> None:
        """Free fields of samples, `stream/field` names; None: all fields of their root stream.

        With None, sources and bodies that still run for these samples are stopped; a source reports a stopped
        sample as failed.
        """
        await self._call(worker, "release", samples, stream, fields)

    async def summarize(
        self, worker: int, stream: str, samples: Sequence[int]
    ) -> dict[str, tuple[float, int]]:
        """Return `stream/field` -> sum and count, for the numeric fields of these samples (not per token)."""
        sums: dict[str, tuple[float, int]] = await self._call(worker, "summarize", stream, samples)
        return sums

    async def sample_texts(self, worker: int, stream: str, samples: Sequence[int]) -> list[SampleText]:
        """Return the texts of samples that the worker holds, in all streams that their source opens."""
        texts: list[SampleText] = await self._call(worker, "sample_texts", stream, samples)
        return texts

    async def sample_values(
        self, worker: int, stream: str, samples: Sequence[int]
    ) -> dict[int, dict[str, float]]:
        """Return sample -> the numbers that the worker has of it (not per token), by field.

        Fields of streams that derive from the root stream are named `stream/field`.
        """
        values: dict[int, dict[str, float]] = await self._call(worker, "sample_values", stream, samples)
        return values

    async def save(self, model: str, directory: str) -> None:
        """Begin to save a model in HF layout, with its tokenizer and the optimizer's state.

        Returns when workers have a copy, which they write in the background while training continues. If they
        still write an earlier copy of the model, they finish that first.
        """
        await self._call_replica(self._trained_replica(model), "save", model, directory)

    async def finish_save(self, model: str, directory: str) -> dict[str, FileChecksum]:
        """Wait until a model is on disk, and return its files by their path in the directory.

        Raises:
            RunError: when a worker cannot write; the directory is then incomplete. No worker writes any more.
        """
        workers = self._trained_replica(model).workers
        finishing = (self._call(worker, "finish_save", model, directory) for worker in workers)
        answers: list[Any] = await asyncio.gather(*finishing, return_exceptions=True)
        if failed := [answer for answer in answers if isinstance(answer, BaseException)]:
            raise failed[0]
        return {path: checksum for files in answers for path, checksum in files.items()}

    async def save_samples(
        self,
        worker: int,
        directory: str,
        samples: Mapping[str, Sequence[int]],
        unfinished: Mapping[str, Sequence[int]],
    ) -> None:
        """Begin to save samples that are in no batch yet, in files of `directory` named `worker-W`.

        Returns when the worker knows what to write. It writes in the background.

        Args:
            worker: the worker that holds the samples.
            directory: the directory of all workers' samples.
            samples: root stream -> samples of which the fields in the worker's store are saved, those of
                derived streams included.
            unfinished: source -> samples of which the journals are saved, if their episodes run on the
                worker.
        """
        await self._call(worker, "save_samples", worker, directory, samples, unfinished)

    async def finish_samples(self, worker: int, directory: str) -> SavedSamples:
        """Wait until what `save_samples` began to save in a directory is on disk.

        Raises:
            RunError: when the worker cannot write.
        """
        saved: SavedSamples = await self._call(worker, "finish_samples", worker, directory)
        return saved

    async def restore_samples(
        self, worker: int, directory: str, files: Mapping[str, Mapping[str, Sequence[int]]]
    ) -> None:
        """Put saved samples into a worker's store, which need not be that which saved them.

        `files` is file of `save_samples`, such as `worker-0` -> root stream -> samples to read from it. A
        sample of which several workers held fields is read from several files.

        Raises:
            RunError: when a file cannot be read, or lacks one of the samples.
        """
        await self._call(worker, "restore_samples", directory, files)

    async def watch(self) -> None:  # noqa: B027 - workers in this process cannot hang alone
        """Watch until a worker does not answer for `WorkerSetup.hang_seconds`; then kill it and raise.

        Returns at once where no worker can hang alone.

        Raises:
            WorkerFailureError: naming the worker and what it was doing.
        """

    async def replace(self, worker: int) -> Mapping[str, Sequence[int]]:
        """Kill a worker that has failed, and build it again in a process of its own. Call it once at a time.

        Other messages to the worker wait meanwhile, except `poll`, which raises, and those that start groups
        or bodies, which are lost.

        Returns:
            Root stream -> samples that it holds again. Its engine sleeps, without weights.

        Raises:
            HflowError: when it cannot be built, or its samples cannot be restored.
        """
        raise NotImplementedError

    @abc.abstractmethod
    async def close(self) -> None:
        """Stop everything; safe to call twice."""

    def _trained_replica(self, model: str) -> Replica:
        """Return the replica that has a model's optimizer."""
        return next(r for r in self._plan.replicas if r.model == model and r.role != "gen")

    async def _call(self, worker: int, method: str, *arguments: Any) -> Any:
        """Send a message to one worker and return its answer."""
        raise NotImplementedError

    async def _call_replica(self, replica: Replica, method: str, *arguments: Any) -> None:
        """Send a message to all workers of a replica, on their devices, and wait for them."""
        raise NotImplementedError


# What workers are built from


@dataclass(frozen=True)
class NodeProgram:
    """What a worker needs to run one node: its bound spec and its body."""

    name: str
    verb: str
    level: str
    stream: str
    """The stream that the node works on and writes its fields to."""
    root: str
    """The root stream of its samples."""
    body: Callable[..., Any]
    reads: tuple[Read, ...]
    """The fields that the body reads."""
    provided: tuple[tuple[str, str], ...]
    returns: tuple[tuple[str, str], ...]
    """(field, unit) of each returned field."""
    metrics: bool
    models: tuple[str, ...]
    knobs: Mapping[str, Any]
    options: Mapping[str, Any]
    reported: str | None = None
    """The returned field whose value of each sample is reported to the controller."""
    scalars: Mapping[str, str] = field(default_factory=dict)
    """Returned field -> the type that the body declares, such as `float`."""
    first_pass: NodeProgram | None = None
    """The function that a train node runs on whole minibatches before its loss."""


@dataclass(frozen=True)
class WorkerSetup:
    """Everything that a worker is built from. Bodies and factories are picklable callables."""

    plan: Plan
    programs: Mapping[str, NodeProgram]
    models: Mapping[str, ModelSettings]
    engines: Mapping[str, Mapping[str, Any]]
    """Generation replica -> options of its engine."""
    datasets: Mapping[str, DataSettings]
    tokenizers: Mapping[str, TokenizerSettings]
    """Model name -> settings of its tokenizer."""
    seed: int
    factories: Mapping[str, Callable[..., Any]]
    """Backend name -> class or function that builds it.

    Training backends are called with (settings, position), and return a `training.interface.ModelBackend`.
    Engines are called with a `engines.interface.EngineSetup`.
    """
    pool_processes: int = 1
    """Processes for the bodies of samples and groups; 0: they run in the worker's own."""
    engine_logs: str = ""
    """Directory for the logs of engines in processes of their own; empty: none."""
    weights_directory: str = ""
    """Directory for weights that are sent through files; all machines must share it."""
    sample_log_directory: str = ""
    """Directory in which workers that can be replaced during a run keep copies of their samples; empty: none
    is replaced."""
    collective_timeout: float = 600.0
    """Seconds after which a collective with a missing rank fails."""
    hang_seconds: float | None = None
    """Seconds after which a worker that does not answer counts as failed; None: none does."""
    endpoint_host: str = "127.0.0.1"
    """The address that endpoints of episodes listen on."""
    recipe_directory: str = ""
    """The directory of the recipe's file on the controller's machine."""
    log_levels: Mapping[str, int] = field(default_factory=dict)
    """What the controller's process logs (`bodies.body_output.log_levels`)."""
    services: ServiceAccess | None = None
    """The remote services that bodies may call; None: there are none."""
    node_states: Mapping[str, str] = field(default_factory=dict)
    """Node -> JSON of its `State`, with which it continues (`NodeResult.state`)."""


# What the controller sends


@dataclass(frozen=True)
class GroupTask:
    """Start one group of a stream on this worker."""

    stream: str
    group: int
    row: int
    """Row of the stream's dataset; the worker reads it."""
    samples: tuple[int, ...]
    journals: Any = None
    """For samples that continue what another worker began: sample -> journal, or a reference to that. After a
    run was resumed, `SavedJournals`."""


@dataclass(frozen=True)
class SavedJournals:
    """Where the journals of a group's unfinished samples are; one that has none begins from its row."""

    directory: str
    """The directory of `Workers.save_samples`."""
    files: Mapping[int, str]
    """Sample -> name of the file, such as `worker-0`."""


class ComputeTask(NamedTuple):
    """Run a sample-level node on one sample, or a group-level node on a group's samples."""

    node: str
    key: int
    samples: tuple[int, ...]


@dataclass(frozen=True)
class ShardInput:
    """The samples of one dp rank by minibatch; a node that does not train has one minibatch."""

    dp: int
    minibatches: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class NodeTask:
    """Run a batch node for a step on the shards of this worker.

    A worker has several shards if it hosts several dp ranks, and none if it is not the head of its tensor and
    pipeline ranks.
    """

    node: str
    step: int
    shards: tuple[ShardInput, ...]

    @property
    def activity(self) -> str:
        """What the workers do meanwhile, for errors."""
        return f"running node {self.node!r}, step {self.step + 1}"

    @property
    def samples(self) -> tuple[int, ...]:
        """All samples of its shards."""
        return tuple(s for shard in self.shards for minibatch in shard.minibatches for s in minibatch)


# What the workers answer and report


@dataclass(frozen=True)
class Span:
    """Something that a worker did, for the trace. Times are in seconds since the epoch."""

    name: str
    lane: str
    start: float
    end: float
    args: Mapping[str, Any] = field(default_factory=dict)


def build_phase(plan: Plan) -> str:
    """Return the line that says which models and engines workers begin to build."""
    built = replicas_text(plan, range(plan.cluster.num_devices))
    return f"building {built}" if built else "preparing workers"


def replicas_text(plan: Plan, workers: Container[int]) -> str:
    """Return the replicas that have ranks on some workers, as in `actor@train (torch), actor@gen (vllm)`."""
    names = (
        f"{replica.name} ({replica.backend})"
        for replica in plan.replicas
        if any(worker in workers for worker in replica.workers)
    )
    return ", ".join(names)


def publish_span(report: PublishReport) -> Span:
    """Return the span of a publication."""
    args: dict[str, Any] = {"version": report.version, "bytes": report.num_bytes}
    if report.num_bytes != report.whole_bytes or report.base is not None:
        args |= {"whole_bytes": report.whole_bytes, "changes_since": report.base}
    if report.near_bytes:
        args["near_bytes"] = report.near_bytes
    return Span(f"publish {report.replica}", "weights", report.start, report.end, args)


@dataclass(frozen=True)
class NodeResult:
    """The result of a batch node on one worker, without tensors."""

    node: str
    step: int
    samples: tuple[int, ...]
    """Samples whose output fields are now in this worker's store. These are on the heads of a replica."""
    metrics: Mapping[str, float]
    span: Span
    worker: int = 0
    """Index of the worker that ran it."""
    values: tuple[float, ...] = ()
    """The reported field of each of `samples`; empty if the node reports none."""
    state: str | None = None
    """JSON of the node's `State` after the call; None if the node has none."""
    skipped: tuple[int, ...] = ()
    """The samples in an update that was skipped, as the gradient was not finite."""


@dataclass(frozen=True)
class WeightsLoaded:
    """What the workers of a generation replica report when it wakes; empty if it had the weights already.

    Checksums (`weights.checksum`) are in the order of the replica's workers.
    """

    num_bytes: int = 0
    """Bytes that they pulled from other workers."""
    sent_checksums: tuple[int, ...] = ()
    """The checksum of the weights that each was sent, computed by the senders, plus that of its own."""
    engine_checksums: tuple[int, ...] = ()
    """The checksum of what each generates with now, computed in its engine."""


@dataclass(frozen=True)
class TrajectoryCounts:
    """One of several trajectories that an episode returned."""

    length: int
    """All its tokens."""
    num_learned: int
    """Without those that are learned in an earlier trajectory of the episode."""
    num_turns: int
    oldest: int
    """Lowest weight version among its learned tokens; -1 if there is none."""
    newest: int


@dataclass(frozen=True)
class SampleReady:
    """A source finished a sample; its trajectories are in this worker's store."""

    stream: str
    sample: int
    length: int
    """Tokens of all its trajectories."""
    num_learned: int
    oldest: int
    """Lowest weight version among its generated tokens; -1 if none was generated."""
    newest: int
    segments: tuple[tuple[int, int], ...] = ()
    """Runs of generated tokens of one version, in order: (version, number of tokens). With several
    trajectories, the total of each version."""
    num_turns: int = 0
    value: float | None = None
    """The reported field, as in `ComputeReady`."""
    trajectories: tuple[TrajectoryCounts, ...] = ()
    """The members of a sample whose episode returns a list."""
    interruption: str = ""
    """How an interrupted episode continued (`episodes.journal.JournalRecorder.interruption`)."""


@dataclass(frozen=True)
class SampleTurn:
    """Consecutive tokens of a sample of which all or none are trained."""

    role: str
    """Roles of the messages in it, such as `system, user`."""
    text: str
    """With special tokens."""
    is_trained: bool
    tokens: tuple[tuple[str, float, int], ...] = ()
    """For generated tokens: the text of each, its log-prob by the engine in nats, and the version of the
    weights that drew it; empty for all others, and for long turns."""
    images: tuple[str, ...] = ()
    """Small copies of its images, as data URLs."""


@dataclass(frozen=True)
class SampleText:
    """The text of a sample in one stream."""

    stream: str
    sample: int
    group: int
    turns: tuple[SampleTurn, ...]


class ComputeReady(NamedTuple):
    """A sample- or group-level node finished; its fields are in this worker's store."""

    node: str
    key: int
    keep: bool = True
    value: float | None = None
    """The sample's value of the node's reported field; None if there is none."""


@dataclass(frozen=True)
class Failed:
    """A body failed on a sample or group."""

    node: str
    key: int
    reason: Literal["failed", "timeout"]
    message: str


WorkerEvent = SampleReady | ComputeReady | Failed


@dataclass(frozen=True)
class BodyRetry:
    """A sample- or group-level body failed, and is tried again."""

    node: str
    key: int
    message: str
    """The failure's message."""
    start: float
    """When it failed, in seconds since the epoch."""
    wait: float
    """Seconds until it is tried again."""


def samples_file(worker: int) -> str:
    """Return the name, without its ending, of the files in which a worker saves samples."""
    return f"worker-{worker}"


@dataclass(frozen=True)
class NotSaved:
    """A sample, or the journal of one, that a checkpoint cannot hold."""

    source: str
    """The node that makes the sample."""
    sample: int
    reason: str


@dataclass(frozen=True)
class SavedSamples:
    """What a worker has saved of the samples that are in no batch yet."""

    files: Mapping[str, FileChecksum] = field(default_factory=dict)
    """By their name in the directory; empty if there was nothing to save."""
    not_saved: tuple[NotSaved, ...] = ()
    """Samples of which nothing is saved, as one of their values is not JSON. They must be made again."""
    without_journal: tuple[NotSaved, ...] = ()
    """Unfinished samples whose journal is not JSON. They begin again from their row."""


@dataclass(frozen=True)
class WorkerReport:
    """Everything that happened on a worker since the last poll."""

    worker: int
    events: tuple[WorkerEvent, ...]
    spans: tuple[Span, ...] = ()
    retries: tuple[BodyRetry, ...] = ()
    """Bodies that are tried again."""
    lines: tuple[BodyLine, ...] = ()
    """What bodies in the worker's process have printed. Only the first worker of a process reports it."""
    engine_stats: EngineStats = field(default_factory=EngineStats)
    """What its engines did since the last poll."""
    episodes: Mapping[str, int] = field(default_factory=dict)
    """`types.EpisodeState` -> episodes of the worker's process that are in this state now; for the terminated
    state, all that ever ended. Only the first worker of a process reports it."""
    peak_bytes: int = 0
    """The most memory that was seen in use on the worker's device; 0 if it is not known."""
