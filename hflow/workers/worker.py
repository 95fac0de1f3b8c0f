"""`Worker`: one device's process, or all of them in one. A message comes in, a part acts on it.

open_groups         encode bodies on a thread, episodes on the engines' loop
detach_groups             episodes, as journals
compute             the pool of body processes; encode bodies for views
poll                the mailbox
run                 batch nodes
export, receive     the store, packed
publish, wake, free slices of weights out of a training replica, into an engine; what lay between
sleep               engines stop, unfinished samples stay
release, summarize  the store
save                a model and its tokenizer
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence

from hflow.backends.interface import SHARDS, ModelBackend, RankPosition
from hflow.data.tokenizer import TextTokenizer
from hflow.errors import HflowError, RunError
from hflow.planner.ir import Replica
from hflow.workers.bodies.batch_node_runner import BatchNodeRunner, merge_tasks
from hflow.workers.bodies.compute_runner import ComputeRunner
from hflow.workers.bodies.encode_runner import EncodeRunner
from hflow.workers.error_location import error_with_location
from hflow.workers.generation.engine_driver import EngineDriver
from hflow.workers.generation.engine_manager import EngineManager, EngineUpdate
from hflow.workers.generation.episode_loop import EpisodeLoop
from hflow.workers.interface import (
    ComputeOrder,
    GroupOrder,
    NodeProgram,
    NodeResult,
    NodeTask,
    Report,
    Span,
    WorkerSetup,
)
from hflow.workers.mailbox import Mailbox, pause_seconds
from hflow.workers.process_groups import Membership, World
from hflow.workers.process_setup import bind_cores
from hflow.workers.storage.dataset_rows import DatasetReader, DatasetRow
from hflow.workers.storage.sample_store import SampleStore
from hflow.workers.weights.publisher import Handles, Sent, WeightPublisher, WorkerRoutes, transports
from hflow.workers.weights.transfer import Parcel, Wanted, pack, unpack
from hflow.workers.weights.transports.interface import Transport

# -------------------- Builds what a worker hosts of the plan's replicas, by the launcher's factories.


def hosted_replicas(setup: WorkerSetup, hosted: Sequence[int]) -> list[Replica]:
    """The plan's replicas that have a rank among these workers, in the plan's order."""
    return [replica for replica in setup.plan.replicas if set(replica.workers) & set(hosted)]


def build_backends(
    setup: WorkerSetup, replicas: Sequence[Replica], world: World | None
) -> dict[str, ModelBackend]:
    """Training and inference replicas, with the optimizer's state where they go on; may be a collective."""
    backends: dict[str, ModelBackend] = {}
    for replica in replicas:
        if replica.role != "gen":
            settings, layout = setup.models[replica.model], replica.layout
            group = world.group(replica) if world else None
            seat = RankPosition(group, layout.data, layout.tensor, layout.pipe)
            backend = backends[replica.name] = setup.factories[replica.backend](settings, seat)
            if settings.resume:
                backend.load_shards(f"{settings.path}/{SHARDS}")
    return backends


def build_engines(
    setup: WorkerSetup,
    replicas: Sequence[Replica],
    backends: Mapping[str, ModelBackend],
    tokenizers: Mapping[str, TextTokenizer],
) -> tuple[dict[str, EngineDriver], frozenset[str]]:
    """Generation replicas, and which of them use the storage of the replica that trains here."""
    source = {route.dst: route.src for route in setup.plan.weights if route.how == "shared"}
    drivers: dict[str, EngineDriver] = {}
    sharing = set()
    for replica in replicas:
        if replica.role != "gen":
            continue
        module = backends[source[replica.name]].shared_module() if replica.name in source else None
        if module is not None:
            sharing.add(replica.name)
        engine = setup.factories[replica.backend](
            setup.models[replica.model],
            setup.engines[replica.name],
            module,
            tokenizers[replica.model].decode,
        )
        drivers[replica.name] = EngineDriver(engine)
    return drivers, frozenset(sharing)


def build_tokenizers(setup: WorkerSetup, verb: str) -> dict[str, TextTokenizer]:
    """Tokenizers of the models that nodes of a verb use. A thread needs instances of its own."""
    models = {
        model for program in setup.programs.values() if program.verb == verb for model in program.models
    }
    return {model: TextTokenizer(setup.tokenizers[model]) for model in sorted(models)}


class Worker:
    """Hosts the ranks that the plan maps onto some worker indices.

    Messages to the device (`run, publish, wake, sleep, save`) must come one at a time, in an
    order that is the same on all workers; the others may come from any thread at any time.
    """

    def __init__(
        self,
        setup: WorkerSetup,
        hosted: Sequence[int],
        store: Transport,
        member: Membership | None = None,
    ) -> None:
        """Join the world, build models, engines, tokenizers and the pool.

        Args:
            setup: what to build.
            hosted: the worker indices that live here.
            store: the way of weights between processes, where the plan names no other.
            member: this process's place among several; None where all indices live here.
        """
        bind_cores(setup.plan.cluster.cores_of(hosted[0]))
        self._setup = setup
        self._plan = setup.plan
        self._hosted = tuple(hosted)
        pause = pause_seconds(setup.plan.cluster.num_devices)
        self._mailboxes = {index: Mailbox(index, pause) for index in hosted}
        self._store = SampleStore()
        self._rows = DatasetReader(self._plan, setup.datasets)
        self._build_generation(*self._build_models(member))
        routes = WorkerRoutes(self._plan, hosted, self._backends)
        ways = transports(self._plan, setup.exchange, hosted[0], store)
        self._shipments = WeightPublisher(routes, hosted[0], ways)
        self._build_bodies()

    def _build_models(
        self, member: Membership | None
    ) -> tuple[dict[str, EngineDriver], frozenset[str], dict[str, TextTokenizer]]:
        """Join the world and build replicas; engines are returned, with the tokenizers of episodes."""
        setup, plan = self._setup, self._plan
        world = (
            World(member, plan.replicas, plan.cluster.device, setup.collective_timeout) if member else None
        )
        replicas = hosted_replicas(setup, self._hosted)
        self._backends = build_backends(setup, replicas, world)
        tokenizers = build_tokenizers(setup, "generate")
        return (*build_engines(setup, replicas, self._backends, tokenizers), tokenizers)

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
        )
        self._engines = EngineManager(
            self._plan, drivers, self._backends, sharing, self._episodes, self._note
        )

    def _build_bodies(self) -> None:
        """Last, as it starts processes: whatever can be refused has been built by then."""
        setup = self._setup
        tokenizers = build_tokenizers(setup, "encode")
        self._encoder = EncodeRunner(
            self._plan, self._programs("encode"), self._store, tokenizers, self._fail
        )
        rows = {name: p for name, p in self._programs("compute").items() if p.level != "batch"}
        self._computes = ComputeRunner(rows, self._store, setup.pool_processes, self._fail)
        self._batch_nodes = BatchNodeRunner(
            self._plan, setup.programs, self._store, self._backends, self._computes
        )

    def _programs(self, verb: str) -> dict[str, NodeProgram]:
        return {name: program for name, program in self._setup.programs.items() if program.verb == verb}

    # ------------------------------------------------------------------------- at any time
    def open_groups(self, worker: int, orders: Sequence[GroupOrder]) -> None:
        """Start sources."""
        sink = self._mailboxes[worker].put
        self._mailboxes[worker].expect(sum(len(order.samples) for order in orders))
        by_verb: dict[str, list[tuple[GroupOrder, DatasetRow]]] = {"encode": [], "generate": []}
        for order in orders:
            row = self._rows.row(order.stream, order.row)
            by_verb[self._verb(self._plan.graph.stream(order.stream).source)].append((order, row))
        self._encoder.open_groups(by_verb["encode"], sink)
        journals = {s: held for order in orders for s, held in (order.journals or {}).items()}
        self._episodes.open_groups(by_verb["generate"], sink, journals)

    def detach_groups(self, worker: int, stream: str, groups: Sequence[int]) -> list[GroupOrder]:
        """Stop groups whose samples all run; returns orders by which others go on with them."""
        orders = self._episodes.detach_groups(self._plan.graph.stream(stream).source, groups)
        self._mailboxes[worker].expect(-sum(len(order.samples) for order in orders))
        return orders

    def compute(self, worker: int, orders: Sequence[ComputeOrder]) -> None:
        """Queue sample- and group-level bodies."""
        sink = self._mailboxes[worker].put
        self._mailboxes[worker].expect(len(orders))
        by_verb: dict[str, list[ComputeOrder]] = {"encode": [], "generate": [], "compute": []}
        for order in orders:
            by_verb[self._verb(order.node)].append(order)
        self._encoder.derive(by_verb["encode"], sink)
        self._episodes.derive(by_verb["generate"], sink)
        self._computes.submit(by_verb["compute"], sink)

    def poll(self, worker: int) -> Report:
        """Wait for events of one hosted index."""
        report = self._mailboxes[worker].wait()
        first = worker == self._hosted[0]  # which speaks for all indices that live here
        states = {state.value: num for state, num in self._episodes.state_counts().items()} if first else {}
        return dataclasses.replace(report, drawn=self._engines.take_stats(), episodes=states)

    def lacks(self, replica: str, version: int) -> bool:
        """Whether an engine here has other weights than those of a version."""
        return self._engines.needs_weights(replica, version)

    def free_weights(self, replica: str) -> None:
        """Free what was published here for a generation replica."""
        self._shipments.free(replica)

    def export(self, wanted: Wanted) -> list[Parcel]:
        """Pack fields of samples for another worker."""
        return [pack(self._store, samples, fields) for samples, fields in wanted]

    def receive(self, parcel: Parcel) -> int:
        """Take what another worker exported; returns its bytes."""
        return unpack(self._store, parcel)

    def release(self, samples: Sequence[int], stream: str, fields: Sequence[str] | None) -> None:
        """Free `stream/field` names of samples, or (None) all that their root stream has of them."""
        if fields is not None:
            self._store.release_fields(samples, fields)
            return
        family = self._family(stream)
        self._store.release(samples, family)
        self._computes.cancel(samples)
        for member in family:
            self._episodes.cancel(member, samples)

    def summarize(self, stream: str, samples: Sequence[int]) -> dict[str, tuple[float, int]]:
        """Sums and counts of the numeric fields of a root stream's samples."""
        return self._store.summarize(self._family(stream), samples)

    # ---------------------------------------------------------------------- one at a time
    def run(self, tasks: Mapping[int, NodeTask]) -> list[NodeResult]:
        """Run a batch node on the shards of all hosted indices.

        Raises:
            RunError: when the node failed; the message names node, step, worker and line.
        """
        start = time.time()
        task = merge_tasks(tasks)
        try:
            metrics = self._batch_nodes.run(task)
        except HflowError as error:
            reason = str(error).removeprefix(f"node {task.node!r}: ")
            raise type(error)(f"{self._where(task)}: {reason}") from error
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            body = self._setup.programs[task.node].body
            raise RunError(f"{self._where(task)}: {error_with_location(error, body)}") from error
        span = Span(task.node, "device", start, time.time(), {"step": task.step})
        return [
            NodeResult(held.node, held.step, held.samples, metrics, span, worker, self._numbers(held))
            for worker, held in tasks.items()
        ]

    def _numbers(self, task: NodeTask) -> tuple[float, ...]:
        """What the controller is told of a task's samples; nothing where no shard lies."""
        program = self._setup.programs[task.node]
        if program.reported is None or not task.samples:
            return ()
        return tuple(float(x) for x in self._store.values(program.stream, program.reported, task.samples))

    def publish(self, replica: str, version: int) -> tuple[Handles, Sent]:
        """Put what a generation replica pulls of the weights here where its workers can take it."""
        return self._shipments.publish(replica, version)

    def wake(self, replica: str, version: int, *published: Handles) -> EngineUpdate | None:
        """Bring an engine to a version of the weights, let it run, and return what it took, if anything.

        Args:
            replica: of the engine.
            version: of the weights.
            *published: what each sender published; none: a training replica here has the weights.
        """
        arriving = self._shipments.arriving(replica, published) if published else None
        return self._engines.wake(replica, version, arriving)

    def sleep(self, replica: str) -> None:
        """Interrupt an engine and free its memory."""
        self._engines.sleep(replica)

    def save(self, model: str, directory: str) -> None:
        """Write a model in HF layout, and beside it its tokenizer and what its optimizer needs to go on."""
        replica = next(r for r in self._plan.replicas if r.model == model and r.role != "gen")
        backend, settings = self._backends[replica.name], self._setup.models[model]
        backend.save(directory)
        if settings.trainable and settings.save_optimizer:
            backend.save_shards(f"{directory}/{SHARDS}")
        if replica.workers[0] in self._hosted and model in self._setup.tokenizers:
            TextTokenizer(self._setup.tokenizers[model]).save(directory)

    def close(self) -> None:
        """End threads and processes. Safe to call twice."""
        for mailbox in self._mailboxes.values():
            mailbox.close()
        self._computes.close()
        self._encoder.close()
        self._episodes.close()
        self._engines.close()
        self._shipments.close()

    # ----------------------------------------------------------------------------- within
    def _family(self, stream: str) -> list[str]:
        """A root stream, those opened with it, and those that derive from them."""
        streams = self._plan.graph.streams
        source = self._plan.graph.stream(stream).source
        family = {s.name for s in streams if s.source == source}
        while more := {s.name for s in streams if s.parent in family} - family:
            family |= more
        return sorted(family)

    def _verb(self, node: str) -> str:
        return self._setup.programs[node].verb

    def _where(self, task: NodeTask) -> str:
        workers = ", ".join(map(str, self._hosted))
        return f"node {task.node!r}, step {task.step}, worker {workers}"

    def _fail(self, error: BaseException) -> None:
        for mailbox in self._mailboxes.values():
            mailbox.fail(error)

    def _note(self, span: Span) -> None:
        self._mailboxes[self._hosted[0]].note(span)
