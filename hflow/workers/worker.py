"""The worker of one device, or of all devices of a plan in one process. It receives messages.

`messages.MESSAGES` lists the messages. The method of a message passes it to the part that handles it.
"""

from __future__ import annotations

import dataclasses
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np
import torch

from hflow.base.devices import has_cuda_api, is_gpu
from hflow.base.durable_files import FileChecksum, WriteError
from hflow.base.errors import HflowError, RunError, WorkerFailureError
from hflow.base.model_files import copy_other_files
from hflow.data.text.tokenizer import TextTokenizer, has_tokenizer
from hflow.engines.driver import EngineDriver
from hflow.engines.interface import EngineSetup, GenerationEngine
from hflow.episodes.journal import Journal
from hflow.graph.ir import Level
from hflow.models.settings import MERGED, SHARDS, RankPosition
from hflow.planner.plan.cluster import ClusterSpec
from hflow.planner.plan.routing import replaceable_workers, tensor_ranks
from hflow.planner.plan.rows import SAVE_PREFIX, Plan, Replica
from hflow.planner.plan.traits import traits
from hflow.processes.cores import allowed_cores, bind_cores, bind_to_socket, bound_cores
from hflow.processes.error_location import error_with_location
from hflow.services.client import use_services
from hflow.training.interface import ModelBackend
from hflow.types.body_line import BodyLine
from hflow.types.engine import SleepLevel
from hflow.types.node_setup import setup_of
from hflow.types.recorded import requested_kinds
from hflow.weights.loading import LoadedWeights
from hflow.weights.publisher import (
    BucketHandles,
    PublishReport,
    WeightPublisher,
    WorkerRoutes,
    channel_settings,
)
from hflow.workers.background_writer import BackgroundWriter
from hflow.workers.bodies.batch_node_runner import BatchNodeRunner, merge_tasks
from hflow.workers.bodies.body_output import BodyOutput, copy_log_levels
from hflow.workers.bodies.compute_runner import ComputeRunner
from hflow.workers.bodies.encode_runner import EncodeRunner
from hflow.workers.bodies.pool_child import run_setup
from hflow.workers.generation.engine_manager import EngineManager
from hflow.workers.generation.episode_loop import EpisodeLoop
from hflow.workers.interface import (
    BodyRetry,
    ComputeReady,
    ComputeTask,
    GroupTask,
    NodeProgram,
    NodeResult,
    NodeTask,
    SampleReady,
    SampleText,
    SavedJournals,
    SavedSamples,
    Span,
    WorkerEvent,
    WorkerReport,
    WorkerSetup,
    samples_file,
)
from hflow.workers.local_models import with_local_models
from hflow.workers.mailbox import Mailbox, pause_seconds
from hflow.workers.process_groups import ProcessGroups, ProcessRank, collective_workers
from hflow.workers.process_setup import (
    keep_freed_memory,
    used_memory_bytes,
)
from hflow.workers.storage.dataset_rows import DatasetReader, DatasetRow
from hflow.workers.storage.sample_files import SampleFiles, SampleFilesReader
from hflow.workers.storage.sample_log import SampleLog
from hflow.workers.storage.sample_store import PackedSamples, SampleRequest, SampleStore, pack, unpack
from hflow.workers.storage.sample_texts import SampleTexts
from hflow.workers.torch_determinism import use_deterministic_algorithms


class Worker:
    """Hosts the ranks that the plan maps onto some worker indices.

    Messages to the device (lane `device` in `messages.MESSAGES`) must come one at a time, in the same order
    on all workers. The others may come from any thread at any time.
    """

    def __init__(
        self,
        setup: WorkerSetup,
        hosted: Sequence[int],
        rank: ProcessRank | None = None,
        host: str = "127.0.0.1",
        devices: Sequence[str] = (),
    ) -> None:
        """Join the process groups, and build models, engines, tokenizers and the pool.

        Without a rank, this process takes part in no collective. `devices` is the CUDA device of each worker
        of the plan, as on its machine; empty on CPUs.
        """
        copy_log_levels(setup.log_levels)
        use_services(setup.services)
        self._restore = ExitStack()
        self._restore.callback(bind_cores(setup.plan.cluster.cores_of(hosted[0])))
        if _uses_one_gpu(setup, hosted) and not setup.plan.cluster.cores:
            bind_to_socket(0)
        if setup.plan.cluster.device == "cpu":
            keep_freed_memory()
        if setup.plan.deterministic:
            self._restore.callback(use_deterministic_algorithms())
        setup = with_local_models(setup, {replica.model for replica in hosted_replicas(setup, hosted)})
        self._setup = setup
        self._plan = setup.plan
        self._hosted = tuple(hosted)
        self._devices = tuple(devices)
        self._lends_memory = lends_memory(setup.plan, hosted)
        self._peak_bytes = 0
        pause = pause_seconds(setup.plan.cluster.num_devices)
        self._mailboxes = {index: Mailbox(index, pause) for index in hosted}
        self._store = SampleStore()
        self._writer = BackgroundWriter()
        self._sample_files: dict[tuple[str, str], SampleFiles] = {}
        """Name and directory -> samples that are being written there under this name."""
        self._log = self._open_log()
        self._rows = DatasetReader(self._plan, setup.datasets)
        self._texts = SampleTexts(setup, self._store)
        self._build_generation(*self._build_models(rank))
        routes = WorkerRoutes(self._plan, hosted, self._backends)
        channels = channel_settings(
            self._plan, hosted, setup.weights_directory, host, setup.collective_timeout
        )
        self._publisher = WeightPublisher(routes, channels, self._plan.cluster.device)
        self._build_bodies()
        self._output = BodyOutput(self._mailboxes[hosted[0]].add_lines, setup.pool_processes == 0)

    def _build_models(
        self, rank: ProcessRank | None
    ) -> tuple[dict[str, EngineDriver], frozenset[str], dict[str, TextTokenizer]]:
        """Join the process groups and build replicas; returns the engines, and the tokenizers of episodes."""
        setup, plan = self._setup, self._plan
        device, timeout = plan.cluster.device, setup.collective_timeout
        process_groups = ProcessGroups(rank, plan.replicas, device, timeout) if rank else None
        replicas = hosted_replicas(setup, self._hosted)
        self._backends = build_backends(setup, replicas, process_groups)
        self._lend_memory()
        for placement in plan.placements:
            if placement.node.startswith(SAVE_PREFIX) and placement.replicas[0] in self._backends:
                self._backends[placement.replicas[0]].pin_copies()  # while engines load
        if process_groups and has_ranks_beside_trainers(plan):
            process_groups.wait_for_all()
        tokenizers = build_tokenizers(setup, "generate")
        return (
            *build_engines(setup, replicas, self._hosted, self._devices, self._backends, tokenizers),
            tokenizers,
        )

    def _build_generation(
        self,
        drivers: dict[str, EngineDriver],
        sharing: frozenset[str],
        tokenizers: dict[str, TextTokenizer],
    ) -> None:
        programs = {
            name: program
            for name, program in self._programs("generate").items()
            if set(self._plan.placement(name).replicas) <= drivers.keys()
        }
        self._episodes = EpisodeLoop(
            self._plan,
            programs,
            self._store,
            drivers,
            tokenizers,
            self._setup.seed,
            self._fail,
            self._setup.pool_processes,
            self._setup.endpoint_host,
        )
        self._engines = EngineManager(
            self._plan, drivers, self._backends, sharing, self._episodes, self._add_span
        )

    def _build_bodies(self) -> None:
        """Build the parts that run bodies. They start processes, so all that can fail is built before."""
        setup = self._setup
        self._set_up_nodes()
        tokenizers = build_tokenizers(setup, "encode")
        self._encoder = EncodeRunner(
            self._plan, self._programs("encode"), self._store, tokenizers, self._fail
        )
        programs = {
            name: program
            for name, program in self._programs("compute").items()
            if program.level != "batch" and (setup_of(program.body) is None or self._runs(name))
        }
        self._computes = ComputeRunner(
            programs,
            self._store,
            setup.pool_processes,
            setup.seed,
            self._add_retry,
            self._fail,
            self._add_span,
            self._mailboxes[self._hosted[0]].add_lines,
        )
        self._batch_nodes = BatchNodeRunner(
            self._plan,
            setup.programs,
            self._store,
            self._backends,
            self._computes,
            setup.node_states,
            setup.seed,
            self._hosted,
        )

    def _set_up_nodes(self) -> None:
        """Run the setup of nodes that this process runs itself; those in the pool are set up there.

        Raises:
            RunError: when one fails.
        """
        for name, program in self._setup.programs.items():
            is_pooled = program.verb == "compute" and program.level != "batch"
            if not is_pooled and self._runs(name) and (problem := run_setup(program.body)):
                raise RunError(f"node {name!r}: {problem}")

    def _runs(self, node: str) -> bool:
        """Return whether a hosted worker runs a node."""
        return not self._plan.workers_of(node).isdisjoint(self._hosted)

    def _programs(self, verb: str) -> dict[str, NodeProgram]:
        return {name: program for name, program in self._setup.programs.items() if program.verb == verb}

    # Messages that may come at any time

    def open_groups(self, worker: int, tasks: Sequence[GroupTask]) -> None:
        """Start the sources of groups."""
        sink = self._mailboxes[worker].put
        self._mailboxes[worker].expect(sum(len(task.samples) for task in tasks))
        by_verb: dict[str, list[tuple[GroupTask, DatasetRow]]] = {"encode": [], "generate": []}
        for task in tasks:
            row = self._rows.row(task.stream, task.row)
            by_verb[self._verb(self._plan.graph.stream(task.stream).source)].append((task, row))
        self._encoder.open_groups(by_verb["encode"], sink)
        self._episodes.open_groups(by_verb["generate"], sink, self._journals_of(tasks))

    def detach_groups(self, worker: int, stream: str, groups: Sequence[int]) -> list[GroupTask]:
        """Stop groups of unfinished samples; returns tasks by which other workers continue them."""
        tasks = self._episodes.detach_groups(self._plan.graph.stream(stream).source, groups)
        self._mailboxes[worker].expect(-sum(len(task.samples) for task in tasks))
        return tasks

    def compute(self, worker: int, tasks: Sequence[ComputeTask]) -> None:
        """Queue sample- and group-level bodies."""
        sink = self._mailboxes[worker].put
        self._mailboxes[worker].expect(len(tasks))
        by_verb: dict[str, list[ComputeTask]] = {"encode": [], "generate": [], "compute": []}
        for task in tasks:
            by_verb[self._verb(task.node)].append(task)
        self._encoder.derive(by_verb["encode"], sink)
        self._episodes.derive(by_verb["generate"], sink)
        self._computes.submit(by_verb["compute"], sink)

    def poll(self, worker: int, num_lines: int = 0) -> WorkerReport:
        """Wait for events of one hosted index, which has reported so many lines of bodies before."""
        report = self._mailboxes[worker].wait(num_lines)
        if self._log is not None and (samples := self._samples_in(report.events)):
            self._log.add(samples)
        is_first = worker == self._hosted[0]  # reports the episodes of all hosted indices
        counts = self._episodes.state_counts().items() if is_first else ()
        episodes = {state.value: count for state, count in counts}
        return dataclasses.replace(
            report,
            engine_stats=self._engines.take_stats(),
            episodes=episodes,
            peak_bytes=self._peak_bytes if len(self._hosted) == 1 else 0,
        )

    def body_lines(self, worker: int, num_lines: int) -> tuple[BodyLine, ...]:
        """Return the lines of bodies after those that were received before."""
        self._computes.read_output()
        return self._mailboxes[worker].lines_after(num_lines)

    def needs_weights(self, replica: str, version: int) -> bool:
        """Return whether an engine here has weights of another version."""
        return self._engines.needs_weights(replica, version)

    def free_weights(self, replica: str, num_losses: int = 0) -> None:
        """Free what was published here for a generation replica after so many losses of its engines."""
        self._publisher.free(replica, num_losses)
        self._lend_memory()

    def export(self, requests: list[SampleRequest]) -> list[PackedSamples]:
        """Pack samples for another worker."""
        return [pack(self._store, samples, fields) for samples, fields in requests]

    def receive(self, packed: PackedSamples) -> int:
        """Store what another worker exported, and return its bytes."""
        num_bytes = unpack(self._store, packed)
        if self._log is not None:
            for stream, batch in packed.items():
                self._log.add({self._log.root_of(stream): batch.samples.tolist()})
        return num_bytes

    def release(self, samples: Sequence[int], stream: str, fields: Sequence[str] | None) -> None:
        """Free `stream/field` names of samples; None: all fields, and everything that runs for them."""
        if fields is not None:
            self._store.release_fields(samples, fields)
            return
        family = self._family(stream)
        self._store.release(samples, family)
        if self._log is not None:
            self._log.release(stream, samples)
        self._computes.cancel(samples)
        for member in family:
            self._episodes.cancel(member, samples)

    def summarize(self, stream: str, samples: Sequence[int]) -> dict[str, tuple[float, int]]:
        """Return sum and count of each numeric field of a root stream's samples."""
        return self._store.summarize(self._family(stream), samples)

    def sample_texts(self, stream: str, samples: Sequence[int]) -> list[SampleText]:
        """Return the texts of a root stream's samples."""
        return self._texts.texts(stream, samples)

    def sample_values(self, stream: str, samples: Sequence[int]) -> dict[int, dict[str, float]]:
        """Return the numbers of a root stream's samples."""
        return self._store.numbers(stream, self._family(stream), samples)

    def finish_save(self, model: str, directory: str) -> Mapping[str, FileChecksum]:
        """Wait until a model's files are on disk, and return them by their path in the directory."""
        return self._writer.finish(model, directory)

    def save_samples(
        self,
        worker: int,
        directory: str,
        samples: Mapping[str, Sequence[int]],
        unfinished: Mapping[str, Sequence[int]],
    ) -> None:
        """Begin to write samples of root streams, and journals of unfinished episodes, by their source."""
        stored = {
            self._plan.graph.stream(stream).source: {
                member: self._store.stored(member, ids) for member in self._family(stream)
            }
            for stream, ids in samples.items()
        }
        journals = {
            node: self._episodes.journals(node, ids)
            for node, ids in unfinished.items()
            if self._verb(node) == "generate"
        }
        name = samples_file(worker)
        files = self._sample_files[name, directory] = SampleFiles(Path(directory), name, stored, journals)
        self._writer.start(name, directory, files.write)

    def finish_samples(self, worker: int, directory: str) -> SavedSamples:
        """Wait until what `save_samples` began to write to a directory is on disk."""
        name = samples_file(worker)
        files = self._sample_files.pop((name, directory), None)
        if files is None:
            raise WriteError(f"worker {worker} was started again while it wrote the checkpoint")
        checksums = self._writer.finish(name, directory)
        return SavedSamples(checksums, tuple(files.not_saved), tuple(files.without_journal))

    def restore_samples(self, directory: str, files: Mapping[str, Mapping[str, Sequence[int]]]) -> None:
        """Put samples of root streams into the store, from files that any worker wrote."""
        for name, samples in files.items():
            reader = SampleFilesReader(Path(directory), name)
            for stream, ids in samples.items():
                for member, stored in reader.samples(self._family(stream), ids).items():
                    self._store.put_stored(member, stored)
                if self._log is not None:
                    self._log.add({stream: ids})

    def restore_log(self) -> Mapping[str, Sequence[int]]:
        """Put the samples of the process whose place this one takes into the store, and return them."""
        assert self._log is not None, "this worker has no log of its samples"
        return self._log.restore()

    # Messages to the device, one at a time

    def run(self, tasks: Mapping[int, NodeTask]) -> list[NodeResult]:
        """Run a batch node on the shards of hosted indices.

        Raises:
            RunError: when the node fails; the message names node, step, worker and line.
        """
        start = time.time()
        merged = merge_tasks(tasks)
        try:
            metrics = self._batch_nodes.run(merged)
        except HflowError as error:
            reason = str(error).removeprefix(f"node {merged.node!r}: ")
            raise type(error)(f"{self._describe(merged)}: {reason}") from error
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            body = self._setup.programs[merged.node].body
            raise RunError(f"{self._describe(merged)}: {error_with_location(error, body)}") from error
        self._note_memory()
        self._lend_memory()
        span = Span(merged.node, "device", start, time.time(), {"step": merged.step + 1})
        return [
            NodeResult(
                task.node,
                task.step,
                task.samples,
                metrics,
                span,
                worker,
                self._values(task),
                self._batch_nodes.state_text(task.node),
                tuple(sample for sample in task.samples if sample in self._batch_nodes.skipped),
            )
            for worker, task in tasks.items()
        ]

    def _values(self, task: NodeTask) -> tuple[float, ...]:
        """Return the node's reported field of each sample; empty if it reports none.

        A number of a float32 tensor is reported as the shortest decimal that names it: 0.7, and not
        0.699999988, which a threshold of 0.7 would refuse.
        """
        program = self._setup.programs[task.node]
        if program.reported is None or not task.samples:
            return ()
        batch = self._store.gather(program.stream, [f"{program.stream}/{program.reported}"], task.samples)
        values = np.asarray(batch.columns[program.reported].values)
        return tuple(float(str(x)) if x.dtype == np.float32 else float(x) for x in values)

    def publish(self, replica: str, version: int, num_losses: int = 0) -> tuple[BucketHandles, PublishReport]:
        """Put what a replica needs of the weights where its workers take it; it lost `num_losses` engines."""
        published = self._publisher.publish(replica, version, num_losses)
        self._lend_memory()
        return published

    def load_weights(self, replica: str, version: int, *published: BucketHandles) -> LoadedWeights | None:
        """Bring a stopped engine to a version of the weights; returns what it loaded, if anything.

        Without what senders published, a training replica here has the weights.
        """
        if self._publisher.needs_handover(replica, version):
            return self._hand_over(replica, version)
        if not self._engines.has(replica):
            return None
        incoming = self._publisher.incoming(replica, published) if published else None
        loaded = self._engines.load_weights(replica, version, incoming)
        self._note_memory()
        self._publisher.loaded(replica)
        return loaded

    def _hand_over(self, replica: str, version: int) -> LoadedWeights | None:
        """Hand weights over to the rank on this device, while an engine of this worker loads its ranks'."""
        loading: Future[LoadedWeights | None] | None = None
        with ThreadPoolExecutor(1, "hflow-weights") as thread:
            if self._engines.has(replica):
                incoming = self._publisher.handed_over(replica)
                loading = thread.submit(self._engines.load_weights, replica, version, incoming)
            try:
                has_failed = (lambda: False) if loading is None else loading.done
                checksum = self._publisher.hand_over(replica, version, has_failed)
            except WorkerFailureError:
                if loading is not None:
                    loading.result()  # its error says more
                raise
            loaded = None if loading is None else loading.result()
        self._note_memory()
        self._lend_memory()
        if loaded is None:
            return None
        return dataclasses.replace(loaded, local_checksums=(checksum,) * len(loaded.checksums))

    def wake(self, replica: str) -> None:
        """Let an engine generate. It has its weights, and what only their loading needed is free."""
        self._engines.wake(replica)

    def sleep(self, replica: str, level: SleepLevel) -> None:
        """Interrupt an engine and free its memory, as far as its level says."""
        self._note_memory()
        self._engines.sleep(replica, level)

    def save(self, model: str, directory: str) -> None:
        """Copy a model and the optimizer's state, and begin to write them, with the model's other files."""
        self._writer.wait(model)
        replica = next(r for r in self._plan.replicas if r.model == model and r.role != "gen")
        backend, settings = self._backends[replica.name], self._setup.models[model]
        with backend.on_device():
            writes = [backend.save(directory)]
            if settings.trainable and settings.save_optimizer:
                writes.append(backend.save_shards(f"{directory}/{SHARDS}"))
        if replica.workers[0] in self._hosted:
            has_merged = settings.lora is not None and settings.lora.save_merged
            for target in (directory, *([f"{directory}/{MERGED}"] if has_merged else [])):
                writes.append(partial(self._write_other_files, model, Path(target)))
        self._lend_memory()
        self._writer.start(model, directory, lambda: [path for write in writes for path in write()])

    def _write_other_files(self, model: str, directory: Path) -> list[Path]:
        """Write what belongs to a saved model beside its weights, such as its tokenizer."""
        source, tokenizer = self._setup.models[model].path, self._setup.tokenizers.get(model)
        paths = [] if source is None else copy_other_files(Path(source), directory, (SHARDS, MERGED))
        if tokenizer is not None and (tokenizer.chat_template is not None or not has_tokenizer(directory)):
            paths += TextTokenizer(tokenizer).save(str(directory))
        return paths

    def close(self) -> None:
        """End threads and processes. Safe to call twice."""
        for mailbox in self._mailboxes.values():
            mailbox.close()
        self._output.close()
        self._computes.close()
        self._encoder.close()
        self._episodes.close()
        self._engines.close()
        self._publisher.close()
        self._writer.close()
        self._restore.close()

    def _journals_of(self, tasks: Sequence[GroupTask]) -> dict[int, Journal]:
        """Return the journals with which samples of these groups continue."""
        readers: dict[tuple[str, str], SampleFilesReader] = {}
        journals: dict[int, Journal] = {}
        for task in tasks:
            if not isinstance(task.journals, SavedJournals):
                journals |= task.journals or {}
                continue
            directory, source = task.journals.directory, self._plan.graph.stream(task.stream).source
            for sample, name in task.journals.files.items():
                if (directory, name) not in readers:
                    readers[directory, name] = SampleFilesReader(Path(directory), name)
                journal = readers[directory, name].journal(source, sample)
                if journal is not None:
                    journals[sample] = journal
        return journals

    def _open_log(self) -> SampleLog | None:
        """Return the log of this worker's samples, if another process may take the worker's place."""
        (worker, *others), directory = self._hosted, self._setup.sample_log_directory
        if others or not directory or worker not in replaceable_workers(self._plan):
            return None
        families = {stream.name: self._family(stream.name) for stream in self._plan.schedule.streams}
        return SampleLog(Path(directory) / str(worker), self._store, families)

    def _samples_in(self, events: Sequence[WorkerEvent]) -> dict[str, list[int]]:
        """Return the samples for which something is done, by root stream."""
        samples: dict[str, dict[int, None]] = {}
        nodes = {node.name: node for node in self._plan.schedule.nodes}
        sizes = {stream.name: stream.group_size for stream in self._plan.schedule.streams}
        for event in events:
            if isinstance(event, SampleReady):
                samples.setdefault(event.stream, {})[event.sample] = None
            elif isinstance(event, ComputeReady):
                node, size = nodes[event.node], 1
                if node.level is Level.GROUP:
                    size = sizes[node.stream]
                members = range(event.key * size, (event.key + 1) * size)
                samples.setdefault(node.stream, {}).update(dict.fromkeys(members))
        return {root: list(ids) for root, ids in samples.items()}

    def _family(self, stream: str) -> list[str]:
        """Return a root stream, the streams of the same source, and all streams that derive from them."""
        streams = self._plan.graph.streams
        source = self._plan.graph.stream(stream).source
        family = {s.name for s in streams if s.source == source}
        while more := {s.name for s in streams if s.parent in family} - family:
            family |= more
        return sorted(family)

    def _verb(self, node: str) -> str:
        return self._setup.programs[node].verb

    def _describe(self, task: NodeTask) -> str:
        workers = ", ".join(map(str, self._hosted))
        return f"node {task.node!r}, step {task.step + 1}, worker {workers}"

    def _fail(self, error: BaseException) -> None:
        for mailbox in self._mailboxes.values():
            mailbox.fail(error)

    def _add_retry(self, retry: BodyRetry) -> None:
        self._mailboxes[self._hosted[0]].add_retry(retry)

    def _note_memory(self) -> None:
        """Remember the most memory in use. Called when much is."""
        self._peak_bytes = max(self._peak_bytes, used_memory_bytes())

    def _lend_memory(self) -> None:
        """Free what this process keeps for later, if an engine may need it first."""
        if self._lends_memory:
            torch.get_device_module(self._plan.cluster.device).empty_cache()

    def _add_span(self, span: Span) -> None:
        self._mailboxes[self._hosted[0]].add_span(span)


def lends_memory(plan: Plan, hosted: Sequence[int]) -> bool:
    """Return whether an engine in a process of its own uses the GPU of one of these workers, in turns.

    It allocates its cache when it wakes, by what the plan says is free; torch keeps what a node has freed.
    """
    return is_gpu(plan.cluster.device) and bool(_engines_beside(plan, hosted))


def has_ranks_beside_trainers(plan: Plan) -> bool:
    """Return whether an engine with tensor ranks, in processes of their own, uses devices that also train.

    It takes memory on all of them when it starts, so their models must have been loaded.
    """
    engines = _engines_beside(plan, collective_workers(plan.replicas))
    return any(replica.layout.tensor > 1 for replica in engines)


def _engines_beside(plan: Plan, workers: Sequence[int]) -> list[Replica]:
    """Return generation replicas that use devices of these workers from processes of their own."""
    return [
        replica
        for replica in plan.replicas
        if replica.role == "gen"
        and traits(replica.backend).has_own_process
        and not set(replica.workers).isdisjoint(workers)
    ]


def hosted_replicas(setup: WorkerSetup, hosted: Sequence[int]) -> list[Replica]:
    """Return the plan's replicas that have a rank among these workers, in the plan's order."""
    return [replica for replica in setup.plan.replicas if set(replica.workers) & set(hosted)]


def build_backends(
    setup: WorkerSetup, replicas: Sequence[Replica], process_groups: ProcessGroups | None
) -> dict[str, ModelBackend]:
    """Build training and inference replicas, with the optimizer's state on resume. May be a collective."""
    backends: dict[str, ModelBackend] = {}
    for replica in replicas:
        if replica.role != "gen" and not replica.base_of:
            settings = setup.models[replica.model]
            group = process_groups.group(replica) if process_groups else None
            position = RankPosition(group, replica.layout)
            backends[replica.name] = setup.factories[replica.backend](settings, position)
    for replica in sorted(replicas, key=lambda replica: replica.role == "infer"):  # after what has adapters
        if replica.role != "gen" and replica.base_of:
            owner = backends[replica.base_of]
            backends[replica.name] = owner.share_weights(setup.models[replica.model])
    for replica in replicas:
        if replica.role != "gen" and (settings := setup.models[replica.model]).resume:
            backends[replica.name].load_shards(settings.shards)
    return backends


def build_engines(
    setup: WorkerSetup,
    replicas: Sequence[Replica],
    hosted: Sequence[int],
    devices: Sequence[str],
    backends: Mapping[str, ModelBackend],
    tokenizers: Mapping[str, TextTokenizer],
) -> tuple[dict[str, EngineDriver], frozenset[str]]:
    """Build one engine for each generation replica that has a dp-head here.

    Returns:
        The engines, and the names of those that share storage with a trainer here.
    """
    routed = {route.dst for route in setup.plan.weights}
    source = {route.dst: route.src for route in setup.plan.weights if route.how == "shared"}
    recorded = defaultdict[str, set[str]](set)
    for program in setup.programs.values():
        for model in program.models:
            recorded[model].update(kind.name for kind in requested_kinds(program.options))
    setups: dict[str, EngineSetup] = {}
    sharing = set()
    for replica in replicas:
        dp_heads = [dp_head for dp_head in replica.heads if dp_head in hosted]
        if replica.role != "gen" or not dp_heads:
            continue
        module = backends[source[replica.name]].shared_module() if replica.name in source else None
        if module is not None:
            sharing.add(replica.name)
        ranks = tensor_ranks(replica, dp_heads[0])
        cores = [_cores(setup.plan.cluster, worker, len(ranks)) for worker in ranks]
        setups[replica.name] = EngineSetup(
            settings=setup.models[replica.model],
            options=setup.engines[replica.name],
            tokenizer=tokenizers[replica.model],
            module=module,
            tensor=len(ranks),
            devices=_devices(replica, ranks, devices),
            cores=tuple(cores) if all(cores) else (),
            shares_devices=any(
                other.name not in (replica.name, replica.base_of)
                and replica.name != other.base_of
                and not set(other.groups).isdisjoint(replica.groups)
                for other in setup.plan.replicas
            ),
            receives_weights=replica.name in routed and module is None,
            records=tuple(sorted(recorded[replica.model])),
            log=str(Path(setup.engine_logs, f"{replica.name}-{dp_heads[0]}.log"))
            if setup.engine_logs
            else "",
        )
    engines: dict[str, GenerationEngine] = {}
    by_name = {replica.name: replica for replica in replicas}
    for name in sorted(setups, key=lambda name: bool(by_name[name].base_of)):  # bases first
        replica = by_name[name]
        guests = tuple(other for key, other in setups.items() if by_name[key].base_of == name)
        base = engines[replica.base_of] if replica.base_of else None
        made = dataclasses.replace(setups[name], base=base, guests=guests)
        engines[name] = setup.factories[replica.backend](made)
    return {name: EngineDriver(engine) for name, engine in engines.items()}, frozenset(sharing)


def _devices(replica: Replica, ranks: Sequence[int], devices: Sequence[str]) -> tuple[str, ...]:
    """Return the CUDA devices of an engine's tensor ranks; none on CPUs.

    Raises:
        RunError: when this machine has fewer.
    """
    if devices and len(ranks) > 1 and max(ranks) >= len(devices):
        raise RunError(
            f"{replica.name} needs {len(ranks)} CUDA devices for its tensor ranks, but only "
            f"{', '.join(devices)} can be used; set a smaller gen.layout, or CUDA_VISIBLE_DEVICES"
        )
    return tuple(devices[worker % len(devices)] for worker in ranks) if devices else ()


def _uses_one_gpu(setup: WorkerSetup, hosted: Sequence[int]) -> bool:
    """Return whether this process itself computes on a GPU. One with an engine beside it alone does not."""
    if not has_cuda_api(setup.plan.cluster.device) or len(hosted) > 1:
        return False
    return any(not traits(replica.backend).has_own_process for replica in hosted_replicas(setup, hosted))


def _cores(cluster: ClusterSpec, worker: int, num_ranks: int) -> tuple[int, ...]:
    """Return the processor cores of a tensor rank of an engine; none if it is bound to none.

    Several ranks need cores of their own on a CPU, so each of them gets one if the plan binds no cores. On
    GPUs a rank binds itself to some of these, beside its GPU, which may be on another socket than the worker.
    """
    if cores := cluster.cores_of(worker):
        return bound_cores(cores)
    if cluster.device != "cpu":
        return allowed_cores()
    if num_ranks == 1 or num_ranks > len(allowed_cores()):
        return ()
    core = worker % len(allowed_cores())
    return bound_cores(range(core, core + 1))


def build_tokenizers(setup: WorkerSetup, verb: str) -> dict[str, TextTokenizer]:
    """Return tokenizers of the models that nodes of a verb use. Each thread needs its own instances."""
    models = {
        model for program in setup.programs.values() if program.verb == verb for model in program.models
    }
    return {model: TextTokenizer(setup.tokenizers[model]) for model in sorted(models)}
