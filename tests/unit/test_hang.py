"""What is said of a hang, by where workers stand."""

from __future__ import annotations

import pickle
import threading
from traceback import FrameSummary

import pytest

from hflow.planner.ir import Replica
from hflow.planner.layout import Layout
from hflow.workers.error_location import shown
from hflow.workers.hangs.hang_report import WorkerCall, report, waiting
from hflow.workers.hangs.stack_probe import StackProbe, StackSnapshot, StrandedError, awaited

TITLE = "node 'learn', step 2"
WORKERS = (4, 5, 6)
REPLICA = Replica("actor@train", "actor", "train", "torch", Layout(3), "train", WORKERS, WORKERS)
CALL = WorkerCall(TITLE, "running node 'learn' of step 2", WORKERS, REPLICA)
C10D = "/lib/torch/distributed/distributed_c10d.py"


def at(place: str, waits: str = "", doing: str = TITLE, **counts: int) -> StackSnapshot:
    return StackSnapshot(doing, place, waits, counts)


def test_a_rank_at_another_node_is_missing() -> None:
    standings = {
        4: at("f (x.py:1)", "all_reduce"),
        5: at("g (x.py:2)", doing="node 'look', step 2"),
        6: at("f (x.py:1)", "all_reduce"),
    }
    assert report(CALL, 20, standings) == (
        "node 'learn', step 2: worker 5 (rank 1 of actor@train) did not join within 20 s: it is still at "
        "node 'look', step 2, in g (x.py:2); workers 4,6 wait for it in all_reduce"
    )


def test_several_ranks_are_missing() -> None:
    standings = {4: None, 5: at("f (x.py:1)", "barrier"), 6: StackSnapshot()}
    assert report(CALL, 0.5, standings) == (
        "node 'learn', step 2: worker 4 (rank 0 of actor@train) did not join within 0.5 s: it does not "
        "answer, as its process is stopped or its interpreter is held; nor did worker 6 (rank 2 of "
        "actor@train): it has nothing to do: it was not asked, or has finished; worker 5 waits for them in "
        "barrier"
    )


def test_of_asynchronous_collectives_who_issued_fewer_is_missing() -> None:
    """Over NCCL a thread goes on, and stands wherever it needs a result first."""
    standings = {
        4: at("reduce (y.py:7)", all=12, dp=3),
        5: at("score (x.py:9)", all=11, dp=3),
        6: at("reduce (y.py:7)", all=12),
    }
    assert waiting(standings) == [4, 6]
    assert report(CALL, 20, standings) == (
        "node 'learn', step 2: worker 5 (rank 1 of actor@train) did not join within 20 s: it is in "
        "score (x.py:9); workers 4,6 wait for it in a collective that it has not issued"
    )


def test_nobody_waits_where_all_issued_the_same() -> None:
    assert waiting({4: at("f (x.py:1)", all=3), 5: at("g (x.py:2)", all=3), 6: None}) == []


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
    assert awaited([FrameSummary(file, 1, function, line="") for file, function in frames]) == name


def test_a_handle_that_is_waited_for() -> None:
    file = "/lib/megatron/core/pipeline_parallel/p2p_communication.py"
    assert awaited([FrameSummary(file, 1, "_communicate", line="req.wait()")]) == "communicate"
    assert awaited([FrameSummary(file, 1, "_communicate", line="ops.append(op)")]) == ""
    assert awaited([FrameSummary("/r.py", 1, "f", line="lock.wait()")]) == ""


def test_a_thread_is_placed_in_the_file_of_its_body() -> None:
    watch, entered, leave = StackProbe(dict), threading.Event(), threading.Event()

    def body() -> None:
        entered.set()
        leave.wait()

    def device() -> None:
        with watch.at(TITLE, body):
            body()

    thread = threading.Thread(target=device)
    thread.start()
    entered.wait()
    standing = watch.standing()
    leave.set()
    thread.join()
    line = body.__code__.co_firstlineno + 2
    assert standing == StackSnapshot(TITLE, f"body ({shown(__file__)}:{line})", "", {})
    assert watch.standing() == StackSnapshot()


def test_an_error_of_a_body_stays_what_it_is() -> None:
    with pytest.raises(RuntimeError, match="by request") as error, StackProbe(dict).at(TITLE):
        raise RuntimeError("by request")
    assert not isinstance(error.value, StrandedError)


def test_what_a_stranded_worker_raises_travels() -> None:
    standing = at("f (x.py:1)", "all_reduce", dp=3)
    sent = pickle.loads(pickle.dumps(StrandedError("it timed out", standing)))
    assert (str(sent), sent.standing) == ("it timed out", standing)
