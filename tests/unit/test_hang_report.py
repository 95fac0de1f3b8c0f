"""Hang reports: which rank is missing, where it is, and which ranks wait for it."""

from __future__ import annotations

import pickle
import threading
from traceback import FrameSummary

import lost_peer_ranks
import pytest
import ranks

from hflow.base.errors import WorkerFailureError
from hflow.planner.plan.rows import Replica
from hflow.processes.error_location import relative_path
from hflow.shapes.layout import Layout
from hflow.workers.hangs.hang_detector import WorkerCall, hang_message, waiting_workers
from hflow.workers.hangs.stack_probe import (
    CollectiveError,
    LostPeerError,
    StackProbe,
    StackSnapshot,
    waiting_collective,
)

ACTIVITY = "running node 'learn', step 2"
WORKERS = (4, 5, 6)
REPLICA = Replica("actor@train", "actor", "train", "torch", Layout(3), "train", WORKERS, WORKERS)
CALL = WorkerCall(ACTIVITY, WORKERS, REPLICA)
C10D = "/lib/torch/distributed/distributed_c10d.py"


def at(location: str, collective: str = "", activity: str = ACTIVITY, **counts: int) -> StackSnapshot:
    return StackSnapshot(activity, location, collective, counts)


def test_a_rank_at_another_node_is_missing() -> None:
    snapshots = {
        4: at("f (x.py:1)", "all_reduce"),
        5: at("g (x.py:2)", activity="running node 'look', step 2"),
        6: at("f (x.py:1)", "all_reduce"),
    }
    message = hang_message(CALL, 20, snapshots)
    assert message.startswith(f"{ACTIVITY}: worker 5 (rank 1 of actor@train) did not join within 20 s")
    assert "running node 'look', step 2, in g (x.py:2)" in message
    assert "workers 4,6 wait for it in all_reduce" in message


def test_several_ranks_are_missing() -> None:
    snapshots = {4: None, 5: at("f (x.py:1)", "barrier"), 6: StackSnapshot()}
    first, second, waiting = hang_message(CALL, 0.5, snapshots).split("; ")
    assert "worker 4 (rank 0 of actor@train) did not join within 0.5 s: it does not respond" in first
    assert "worker 6 (rank 2 of actor@train) did not join" in second
    assert "idle" in second
    assert "worker 5 waits" in waiting
    assert "barrier" in waiting


def test_the_rank_with_fewer_asynchronous_collectives_is_missing() -> None:
    """Over NCCL a thread continues until it needs a result."""
    snapshots = {
        4: at("reduce (y.py:7)", all=12, dp=3),
        5: at("score (x.py:9)", all=11, dp=3),
        6: at("reduce (y.py:7)", all=12),
    }
    assert waiting_workers(snapshots) == [4, 6]
    message = hang_message(CALL, 20, snapshots)
    assert "worker 5 (rank 1 of actor@train) did not join" in message
    assert "in score (x.py:9)" in message
    assert "workers 4,6 wait for it in a collective" in message


def test_no_rank_waits_if_all_issued_the_same() -> None:
    assert waiting_workers({4: at("f (x.py:1)", all=3), 5: at("g (x.py:2)", all=3), 6: None}) == []


@pytest.mark.parametrize(
    ("frames", "name"),
    [
        (
            [("/r.py", "f"), ("/lib/torch/distributed/c10d_logger.py", "wrapper"), (C10D, "all_reduce")],
            "all_reduce",
        ),
        ([("/r.py", "f"), (C10D, "broadcast_object_list"), (C10D, "broadcast")], "broadcast_object_list"),
        ([(C10D, "all_reduce"), ("/r.py", "hook")], ""),
        ([("/r.py", "f"), ("/home/me/rendezvous.py", "wait")], ""),
        ([], ""),
    ],
)
def test_the_collective_of_a_stack(frames: list[tuple[str, str]], name: str) -> None:
    assert waiting_collective([FrameSummary(file, 1, function, line="") for file, function in frames]) == name


def test_a_handle_that_is_waited_for() -> None:
    file = "/lib/megatron/core/pipeline_parallel/p2p_communication.py"
    assert waiting_collective([FrameSummary(file, 1, "_communicate", line="req.wait()")]) == "communicate"
    assert waiting_collective([FrameSummary(file, 1, "_communicate", line="ops.append(op)")]) == ""
    assert waiting_collective([FrameSummary("/r.py", 1, "f", line="work.wait()")]) == "f"
    own = [
        FrameSummary("/h.py", 1, "gather", line="_wait(works)"),
        FrameSummary("/h.py", 2, "_wait", line="w.wait()"),
    ]
    assert waiting_collective(own) == "gather"
    python = [
        FrameSummary("/r.py", 1, "f", line="lock.wait()"),
        FrameSummary("/t.py", 2, "wait", line="acquire()"),
    ]
    assert waiting_collective(python) == ""


def test_a_thread_is_located_in_the_file_of_its_body() -> None:
    probe, entered, leave = StackProbe(dict), threading.Event(), threading.Event()

    def body() -> None:
        entered.set()
        leave.wait()

    def device() -> None:
        with probe.running(ACTIVITY, body):
            body()

    thread = threading.Thread(target=device)
    thread.start()
    entered.wait()
    snapshot = probe.snapshot()
    leave.set()
    thread.join()
    line = body.__code__.co_firstlineno + 2
    assert snapshot == StackSnapshot(ACTIVITY, f"body ({relative_path(__file__)}:{line})", "", {})
    assert probe.snapshot() == StackSnapshot()


def test_an_error_of_a_body_is_raised_unchanged() -> None:
    with pytest.raises(RuntimeError, match="by request") as error, StackProbe(dict).running(ACTIVITY):
        raise RuntimeError("by request")
    assert not isinstance(error.value, CollectiveError)


def test_a_collective_error_can_be_pickled() -> None:
    snapshot = at("f (x.py:1)", "all_reduce", dp=3)
    sent = pickle.loads(pickle.dumps(CollectiveError("it timed out", snapshot)))
    assert (str(sent), sent.snapshot) == ("it timed out", snapshot)


@pytest.fixture(scope="module")
def lost_peer(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RuntimeError]:
    """Wait -> the error with which it ends when the process of the other rank has ended."""
    directory = tmp_path_factory.mktemp("lost-peer")
    ranks.start(lost_peer_ranks.run, (str(directory),), 2)
    errors: dict[str, RuntimeError] = pickle.loads((directory / "errors").read_bytes())
    return errors


@pytest.mark.parametrize("wait", lost_peer_ranks.WAITS)
def test_every_wait_for_a_process_that_has_ended_says_so(
    wait: str, lost_peer: dict[str, RuntimeError]
) -> None:
    error = lost_peer[wait]
    assert isinstance(error, LostPeerError), repr(error)
    assert isinstance(error, WorkerFailureError)
    assert error.snapshot.activity == ACTIVITY
    assert error.snapshot.collective
