"""The Ray actors of one or several runs: one bundle of Ray resources per device, and an actor on each."""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import ray
from ray._private import ray_constants
from ray._private import services as ray_services
from ray._private import utils as ray_utils
from ray._private import worker as ray_worker
from ray._private.accelerators import get_accelerator_manager_for_resource
from ray._private.services import get_ray_address_from_environment
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from hflow.base.devices import is_gpu
from hflow.base.errors import RunError, WorkerFailureError
from hflow.base.waiting import WaitFor, wait_silently
from hflow.planner.plan.cluster import ClusterSpec
from hflow.processes.guard import children
from hflow.workers.messages import MESSAGES
from hflow.workers.process_setup import ray_address
from hflow.workers.ray.machines import NODE_ID, all_machines, choose_machines, free_machines
from hflow.workers.ray.ray_actor import RayWorker

CLOSE_SECONDS = 10.0
"""Longest wait for workers to end their threads and pools, before their processes are killed."""
FREE_SECONDS = 20.0
"""Longest wait for Ray to end, or to free what was reserved."""
CONNECT_SECONDS = 10.0
"""Longest wait for the head of a Ray cluster to answer."""
GCS_POLL_SECONDS = 1.0
"""Time between two looks at the process of Ray's GCS."""
RESERVE_SECONDS = 60.0
"""Longest wait for the resources of a run."""
RESERVE_POLL_SECONDS = 1.0
"""Time between two looks at what is free."""
PLACE_SECONDS = 15.0
"""Longest wait for a reservation of what was free a moment ago."""


class RayActors:
    """Started with the first run, for its cluster; a later run may use fewer devices.

    Starting them takes most of the time of a short run, because each imports torch.
    """

    def __init__(
        self, cluster: ClusterSpec, environments: Sequence[Mapping[str, str]] = (), is_shared: bool = False
    ) -> None:
        """Prepare processes with these environment variables. Shared ones are ended by no run."""
        self.is_shared = is_shared
        self._cluster = cluster
        self._environments = environments or [{}] * cluster.num_devices
        self._reservation: Reservation | None = None
        self._actors: list[Any] = []
        self._report: Callable[[str], None] = lambda line: None

    def start(
        self,
        report_progress: Callable[[str], None] = lambda line: None,
        wait_for: WaitFor = wait_silently,
    ) -> None:
        """Reserve the cluster's devices and start an actor on each, unless this is done.

        It does not wait until the actors have imported torch, which takes longer than to start them.
        Call it on a thread that lives as long as the actors: Ray's daemons end with the thread that started
        them.

        Raises:
            RunError: when there is no Ray cluster to connect to, or it is too small.
        """
        self._report = report_progress
        if self._reservation is None:
            self.refuse_impossible()
            report_progress(f"starting Ray and {self._cluster.num_devices} workers")
            with wait_for("Ray to start" if ray_address(self._cluster) is None else "the Ray cluster"):
                reservation = self._reservation = reserve(self._cluster)
            self._actors = [self._new_actor(w, reservation) for w in range(len(self._environments))]

    def refuse_impossible(self) -> None:
        """Refuse a cluster that this machine cannot hold or join, before a Ray is started.

        Raises:
            RunError: when Ray would be started here and the GPUs are too few, or no Ray runs that could be
                joined.
        """
        cluster, address = self._cluster, ray_address(self._cluster)
        if ray.is_initialized():
            return
        if address == "auto":
            try:
                get_ray_address_from_environment(address, None)
            except ConnectionError:
                raise _no_cluster(cluster) from None
        elif address is None and is_gpu(cluster.device) and (available := num_gpus()) < cluster.num_devices:
            num = cluster.num_devices
            raise RunError(
                f"cluster={cluster.name} needs {num} GPU{'s' * (num > 1)}, but this machine has {available}; "
                f"`hflow plan` works here, and cluster=cpu-1x{min(2, num)} runs models that are small enough "
                "for CPUs, such as that of `hflow run grpo`"
            )

    def actors(self, num_devices: int) -> list[Any]:
        """Return the actors of the first `num_devices` devices."""
        assert num_devices <= len(self._actors), f"{num_devices} workers of {len(self._actors)}"
        return self._actors[:num_devices]

    def replace(self, worker: int) -> Any:
        """Kill the process of a worker, start another on the same device, and return its actor."""
        assert self._reservation is not None, "nothing was started"
        ray.kill(self._actors[worker])
        self._actors[worker] = self._new_actor(worker, self._reservation)
        return self._actors[worker]

    def _new_actor(self, worker: int, reservation: Reservation) -> Any:
        return RayWorker.options(**reservation.options(worker, self._environments[worker])).remote(worker)

    async def close(self) -> None:
        """End the processes, and free what was reserved or started. `start` starts new ones."""
        actors, self._actors = self._actors, []
        for actor in actors:
            ray.kill(actor)
        if self._reservation is not None:
            await asyncio.to_thread(self._reservation.free, self._report)
            self._reservation = None


def send(actor: Any, method: str, *arguments: Any) -> Any:
    """Send one message; returns a reference to its answer, or its bytes (`Message.has_references`)."""
    if not MESSAGES[method].has_references:
        arguments = (pickle.dumps(arguments, pickle.HIGHEST_PROTOCOL),)
    return getattr(actor, method).remote(*arguments)


async def close_workers(actors: list[Any]) -> None:
    """Let workers end their threads and pools; their processes stay. One that does not answer is ignored."""
    if actors:
        closing = [send(actor, "close") for actor in actors]
        await asyncio.to_thread(ray.wait, closing, num_returns=len(closing), timeout=CLOSE_SECONDS)


@dataclass(frozen=True)
class Reservation:
    """Ray resources for every device of the plan's cluster."""

    bundles: PlacementGroup
    """One for each worker, on the machines that the plan assumes."""
    num_cpus: int
    """CPUs of one worker; Ray sets OMP_NUM_THREADS to it."""
    num_gpus: int
    owns_ray: bool
    """Whether this run started Ray."""

    def options(self, worker: int, environment: Mapping[str, str]) -> dict[str, object]:
        """Return actor options that place a worker on its bundle, with its environment variables."""
        strategy = PlacementGroupSchedulingStrategy(self.bundles, placement_group_bundle_index=worker)
        return {
            "num_cpus": self.num_cpus,
            "num_gpus": self.num_gpus,
            "scheduling_strategy": strategy,
            **({"runtime_env": {"env_vars": dict(environment)}} if environment else {}),
        }

    def free(self, report: Callable[[str], None] = lambda line: None) -> None:
        """Return the resources, and stop Ray if this run started it.

        One of Ray's processes may be stopped, and Ray would wait for it for ever. So those that this run
        started are killed then.
        """
        global is_ray_lost
        if self.owns_ray:
            node = ray_worker._global_node
            with _if_late(FREE_SECONDS, lambda: _kill_daemons(node, report)):
                ray.shutdown()
            return
        freeing = threading.Thread(target=remove_placement_group, args=(self.bundles,), daemon=True)
        freeing.start()
        freeing.join(FREE_SECONDS)
        if freeing.is_alive():
            is_ray_lost = True
            report(
                f"the Ray cluster has not answered for {FREE_SECONDS:g} s; it frees what this run reserved "
                "when it notices that the run has ended. See `ray status`"
            )


is_ray_lost = False
"""Whether a Ray that this process joined does not answer. Python's exit would wait for it for ever."""


@contextmanager
def _if_late(seconds: float, act: Callable[[], None]) -> Iterator[None]:
    """Call a function on a thread if what is done meanwhile takes longer."""
    timer = threading.Timer(seconds, act)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _kill_daemons(node: Any, report: Callable[[str], None]) -> None:
    """Kill the processes of Ray that this process has started."""
    report(
        f"Ray has not ended for {FREE_SECONDS:g} s, as one of its processes does not answer; all are killed"
    )
    for infos in list(node.all_processes.values()):
        for info in infos:
            info.process.kill()


def num_gpus() -> int:
    """Return the number of GPUs that a Ray on this machine finds: those of CUDA_VISIBLE_DEVICES, or all."""
    manager = get_accelerator_manager_for_resource("GPU")
    assert manager is not None, "Ray counts GPUs of every vendor"
    visible = manager.get_current_process_visible_accelerator_ids()
    found: int = manager.get_current_node_num_accelerators()
    return found if visible is None else min(found, len(visible))


def reserve(cluster: ClusterSpec) -> Reservation:
    """Connect to Ray, or start it on this machine, and reserve a bundle for every device.

    Raises:
        RunError: when there is no Ray cluster to connect to, or it is too small.
        WorkerFailureError: when Ray cannot be started, or ends at once.
    """
    owns_ray = not ray.is_initialized()
    try:
        if owns_ray:
            _start_ray(cluster)
        return _reserve(cluster, owns_ray)
    except RunError:
        if owns_ray:
            ray.shutdown()
        raise
    except Exception as error:  # noqa: BLE001 - Ray raises a plain one when its start takes too long
        ray.shutdown()
        raise WorkerFailureError(f"Ray cannot be started: {str(error).strip().splitlines()[0]}") from None


def _reserve(cluster: ClusterSpec, owns_ray: bool) -> Reservation:
    num_gpus = int(is_gpu(cluster.device))
    deadline = time.monotonic() + RESERVE_SECONDS
    while True:
        try:
            choose_machines(cluster, all_machines())
        except RunError as error:
            raise RunError(f"{error}. Set a smaller cluster, or add machines") from None
        try:
            chosen = choose_machines(cluster, free_machines())
        except RunError as error:
            busy = f"{error} free"
        else:
            bundle = {"CPU": float(chosen.cpus_per_worker), **({"GPU": 1.0} if num_gpus else {})}
            nodes = [{NODE_ID: node} for node in chosen.nodes for _ in range(cluster.devices_per_node)]
            bundles = placement_group([bundle] * cluster.num_devices, bundle_label_selector=nodes)
            if bundles.wait(PLACE_SECONDS):
                return Reservation(bundles, chosen.cpus_per_worker, num_gpus, owns_ray)
            remove_placement_group(bundles)  # another run was faster, or a machine is lost
            busy = f"Ray did not reserve the free devices of cluster={cluster.name}"
        if time.monotonic() > deadline:
            raise RunError(f"{busy}. Stop what else runs there, or set a smaller cluster")
        time.sleep(RESERVE_POLL_SECONDS)


def _start_ray(cluster: ClusterSpec) -> None:
    """Connect to the cluster's Ray, or start it here with at least a CPU per worker."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # Otherwise ray.init waits for a process per core, and for ever if one of them ends before it is ready.
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
    address = ray_address(cluster)
    if address is not None:
        _join_ray(cluster, address)
        return
    known = set(children())
    try:
        with _loopback_only(), _as_a_guest():
            ray.init(
                num_cpus=max(cluster.num_devices, os.cpu_count() or 1),
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
    except Exception:
        for daemon in set(children()) - known:  # Ray leaves those that started before the one that did not
            with suppress(ProcessLookupError, ChildProcessError):
                os.kill(daemon, signal.SIGKILL)
                os.waitpid(daemon, 0)
        raise
    threading.Thread(target=_end_workers_with_gcs, args=(ray_worker._global_node,), daemon=True).start()


def _end_workers_with_gcs(node: Any) -> None:
    """End Ray's raylet, and with it the workers, when Ray's GCS has ended, so that the run restarts.

    Otherwise Ray would end this process a minute later.
    """
    while servers := node.all_processes.get(ray_constants.PROCESS_TYPE_GCS_SERVER):
        if servers[0].process.poll() is not None:
            node.kill_raylet(check_alive=False)
            return
        time.sleep(GCS_POLL_SECONDS)


def _join_ray(cluster: ClusterSpec, address: str) -> None:
    """Connect to a Ray cluster that runs already.

    Raises:
        RunError: when there is none.
    """
    host, _, port = address.rpartition(":")
    try:
        if port.isdigit():  # Ray itself would try for minutes
            socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
        with _as_a_guest():
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, RuntimeError):
        if address != "auto":
            raise RunError(
                f"no Ray cluster answers at RAY_ADDRESS={address}; correct the address, or unset RAY_ADDRESS "
                "to start Ray on this machine"
            ) from None
        raise _no_cluster(cluster) from None


def _no_cluster(cluster: ClusterSpec) -> RunError:
    machines = "1 machine" if cluster.num_nodes == 1 else f"{cluster.num_nodes} machines"
    return RunError(
        f"the plan needs {machines}, but no Ray cluster is running here; start one with `ray start --head` "
        "on one machine and `ray start --address=IP:6379` on the others, or set RAY_ADDRESS=IP:6379"
    )


@contextmanager
def _as_a_guest() -> Iterator[None]:
    """Let a Ray that this process joins now print no logs of its own, and leave SIGTERM to this process.

    hflow reports in a line what ended. Ray's handlers of SIGTERM, one in Python and one in C++, end the
    process without saving the run. The one in C++ is there for a moment, so the signal waits on all threads
    that start here; but not in Ray's daemons, which would inherit that. They do inherit that SIGHUP waits: a
    terminal that is closed sends it to all its processes, and the run is to be saved then.
    """
    listen, set_handler = ray_worker.listen_error_messages, ray_utils.set_sigterm_handler
    start_daemon = ray_services.start_ray_process

    def start_daemon_unblocked(*arguments: Any, **settings: Any) -> Any:
        _unblock(signal.SIGTERM)
        try:
            return start_daemon(*arguments, **settings)
        finally:
            _block(signal.SIGTERM)

    ray_worker.listen_error_messages = lambda worker, threads_stopped: None
    ray_utils.set_sigterm_handler = lambda handler: None
    ray_services.start_ray_process = start_daemon_unblocked
    _block(signal.SIGTERM, signal.SIGHUP)
    try:
        yield
    finally:
        ray_worker.listen_error_messages, ray_utils.set_sigterm_handler = listen, set_handler
        ray_services.start_ray_process = start_daemon
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))  # replaces the one in C++
        _unblock(signal.SIGTERM, signal.SIGHUP)


def _block(*numbers: signal.Signals) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, numbers)


def _unblock(*numbers: signal.Signals) -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)


@contextmanager
def _loopback_only() -> Iterator[None]:
    """Let a Ray that starts now listen on 127.0.0.1, as it does by default on macOS and Windows.

    On Linux it listens on all interfaces: it replaces a `_node_ip_address` of 127.0.0.1 by the machine's
    address, and the variable that turns this off is read when ray is imported.
    """
    may_span_machines = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = may_span_machines
