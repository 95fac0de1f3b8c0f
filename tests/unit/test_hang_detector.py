"""Which error is raised when several workers act together and some fail, die, or do not respond."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest

from hflow.base.errors import RunError, WorkerFailureError
from hflow.workers.hangs.hang_detector import HangDetector, WorkerCall, WorkerDiedError
from hflow.workers.hangs.stack_probe import CollectiveError, LostPeerError, StackSnapshot

ACTIVITY = "running node 'learn', step 2"
CALL = WorkerCall(ACTIVITY, (0, 1))
TIMEOUT = 0.5
DIED = WorkerDiedError("worker 0 died while running node 'learn', step 2: killed")


def waits(count: int = 5) -> StackSnapshot:
    return StackSnapshot(ACTIVITY, "f (x.py:1)", "all_reduce", {"all": count})


def computes(count: int = 4) -> StackSnapshot:
    return StackSnapshot(ACTIVITY, "g (x.py:2)", "", {"all": count})


Answer = tuple[float, object]
"""After so many seconds, an error to raise or a result."""


async def _answer(answer: Answer) -> object:
    seconds, what = answer
    await asyncio.sleep(seconds)
    if isinstance(what, BaseException):
        raise what
    return what


def outcome(
    answers: Mapping[int, Answer], probed: Mapping[int, list[StackSnapshot | Exception | None]]
) -> object:
    """Collect these answers; each probe of a worker returns its next snapshot, the last one from then on."""
    remaining = {worker: list(snapshots) for worker, snapshots in probed.items()}

    async def probe(worker: int) -> StackSnapshot | None:
        snapshots = remaining[worker]
        snapshot = snapshots.pop(0) if len(snapshots) > 1 else snapshots[0]
        if isinstance(snapshot, Exception):
            raise snapshot
        return snapshot

    async def collect() -> list[object]:
        calls = {worker: _answer(answer) for worker, answer in answers.items()}
        return await HangDetector(CALL, probe, TIMEOUT).collect(calls)

    return asyncio.run(collect())


def error(answers: Mapping[int, Answer], probed: Mapping[int, list[StackSnapshot | Exception | None]]) -> str:
    with pytest.raises(RunError) as failure:
        outcome(answers, probed)
    return str(failure.value)


LATE = ("running node 'learn', step 2", "worker 1 did not join within 0.5 s")
MISSING = (*LATE, "in g (x.py:2)", "worker 0 waits for it in all_reduce")
SILENT = (*LATE, "it does not respond")


def has(message: str, phrases: tuple[str, ...]) -> bool:
    return [phrase for phrase in phrases if phrase not in message] == []


def test_answers_come_in_order_however_long_they_take() -> None:
    assert outcome({0: (1.2, "a"), 1: (0.0, "b")}, {0: [waits()], 1: [computes()]}) == ["a", "b"]


def test_a_waiting_rank_that_times_out_reveals_the_missing_one() -> None:
    failed = CollectiveError("timed out", waits())
    assert has(error({0: (0.7, failed), 1: (9, "")}, {0: [waits()], 1: [computes()]}), MISSING)


def test_an_error_of_a_body_is_raised_before_its_consequences() -> None:
    failed, own = CollectiveError("connection closed", waits()), RunError("by request")
    for seconds in (0.0, 0.7):
        answers = {0: (seconds, failed), 1: (seconds, own)}
        assert error(answers, {0: [waits()], 1: [computes()]}) == "by request"


def test_a_collective_that_fails_at_once_is_no_hang() -> None:
    failed = CollectiveError("sizes differ", waits())
    assert error({0: (0.0, failed), 1: (9, "")}, {0: [waits()], 1: [computes()]}) == "sizes differ"


def test_a_waiting_process_that_is_ended_reveals_the_missing_rank() -> None:
    probed = {0: [waits(), DIED], 1: [computes()]}
    assert has(error({0: (0.7, DIED), 1: (9, "")}, probed), MISSING)


def test_a_death_is_no_hang_if_others_progressed() -> None:
    probed = {0: [waits(), DIED], 1: [computes(4), computes(9)]}
    message = error({0: (0.7, DIED), 1: (9, "")}, probed)
    assert message.startswith(str(DIED))
    assert "worker 1 is in g (x.py:2)" in message


def test_a_death_is_raised_before_the_failures_that_it_causes() -> None:
    failed = CollectiveError("connection closed", waits())
    early, late = {0: [DIED], 1: [waits()]}, {0: [computes(), DIED], 1: [waits()]}
    assert error({0: (9, ""), 1: (0.0, failed)}, early) == str(DIED)
    assert error({0: (9, ""), 1: (0.7, failed)}, late).startswith(str(DIED))


def test_a_process_that_does_not_respond_twice_is_named() -> None:
    message = error({0: (9, ""), 1: (9, "")}, {0: [computes()], 1: [None]})
    assert has(message, SILENT)
    assert "waits" not in message
    waited = error({0: (9, ""), 1: (9, "")}, {0: [waits()], 1: [None]})
    assert has(waited, (*SILENT, "worker 0 waits for it in all_reduce"))
    assert outcome({0: (1.2, "a"), 1: (1.2, "b")}, {0: [waits()], 1: [None, computes()]}) == ["a", "b"]


LOST = LostPeerError("the connection was closed", waits())


@pytest.mark.parametrize("seconds", [0.0, 0.7])
def test_a_lost_connection_is_a_failure_of_a_worker_before_its_death_is_known(seconds: float) -> None:
    """On a loaded machine Ray takes longer to say so, or the dead worker's probe does not return."""
    for probed in (waits(), None):
        with pytest.raises(WorkerFailureError):
            outcome({0: (seconds, LOST), 1: (9, "")}, {0: [waits()], 1: [probed]})


def test_a_death_in_a_late_collective_is_no_hang_if_no_other_rank_is_missing() -> None:
    """Messages from rank to rank are not counted, so all look as if they had not progressed."""
    probed = {0: [waits()], 1: [waits(), DIED]}
    for failed in (LOST, CollectiveError("timed out", waits())):
        message = error({0: (0.7, failed), 1: (9, "")}, probed)
        assert message.startswith(str(DIED))


def test_a_rank_that_is_missing_without_an_answer_is_a_failure_of_its_worker() -> None:
    failed = CollectiveError("timed out", waits())
    with pytest.raises(WorkerFailureError) as failure:
        outcome({0: (0.7, failed), 1: (9, "")}, {0: [waits()], 1: [computes(), None]})
    assert has(str(failure.value), SILENT)


def test_a_lost_connection_reveals_a_missing_rank() -> None:
    """A rank that waited too long closes its connections, on which others still wait."""
    message = error({0: (0.7, LOST), 1: (9, "")}, {0: [waits()], 1: [computes()]})
    assert has(message, MISSING)
