"""Which error is raised when several workers act together and some fail, die, or say nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest

from hflow.errors import RunError
from hflow.workers.hangs.hang_detector import HangDetector, WorkerDiedError
from hflow.workers.hangs.hang_report import WorkerCall
from hflow.workers.hangs.stack_probe import CollectiveError, StackSnapshot

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
    """What collecting these answers returns, where workers say these things when asked, the last for good."""
    left = {worker: list(said) for worker, said in probed.items()}

    async def probe(worker: int) -> StackSnapshot | None:
        said = left[worker].pop(0) if len(left[worker]) > 1 else left[worker][0]
        if isinstance(said, Exception):
            raise said
        return said

    async def collect() -> list[object]:
        sent = {worker: _answer(answer) for worker, answer in answers.items()}
        return await HangDetector(CALL, probe, TIMEOUT).collect(sent)

    return asyncio.run(collect())


def error(answers: Mapping[int, Answer], probed: Mapping[int, list[StackSnapshot | Exception | None]]) -> str:
    with pytest.raises(RunError) as failure:
        outcome(answers, probed)
    return str(failure.value)


LATE = "running node 'learn', step 2: worker 1 did not join within 0.5 s: it "
MISSING = LATE + "is in g (x.py:2); worker 0 waits for it in "


def test_answers_come_in_order_however_long_they_take() -> None:
    assert outcome({0: (1.2, "a"), 1: (0.0, "b")}, {0: [waits()], 1: [computes()]}) == ["a", "b"]


def test_who_waited_too_long_asks_for_who_is_missing() -> None:
    failed = CollectiveError("timed out", waits())
    assert error({0: (0.7, failed), 1: (9, "")}, {0: [waits()], 1: [computes()]}) == MISSING + "all_reduce"


def test_an_error_of_a_body_goes_before_what_it_causes() -> None:
    failed, own = CollectiveError("connection closed", waits()), RunError("by request")
    for seconds in (0.0, 0.7):
        answers = {0: (seconds, failed), 1: (seconds, own)}
        assert error(answers, {0: [waits()], 1: [computes()]}) == "by request"


def test_a_collective_that_fails_at_once_is_no_hang() -> None:
    failed = CollectiveError("sizes differ", waits())
    assert error({0: (0.0, failed), 1: (9, "")}, {0: [waits()], 1: [computes()]}) == "sizes differ"


def test_a_waiter_that_is_ended_was_seen_waiting() -> None:
    probed = {0: [waits(), DIED], 1: [computes()]}
    assert error({0: (0.7, DIED), 1: (9, "")}, probed) == MISSING + "all_reduce"


def test_a_death_is_no_hang_where_others_went_on() -> None:
    probed = {0: [waits(), DIED], 1: [computes(4), computes(9)]}
    assert error({0: (0.7, DIED), 1: (9, "")}, probed) == f"{DIED}; worker 1 is in g (x.py:2)"


def test_a_death_goes_before_the_failure_of_those_that_it_left() -> None:
    failed = CollectiveError("connection closed", waits())
    early, late = {0: [DIED], 1: [waits()]}, {0: [computes(), DIED], 1: [waits()]}
    assert error({0: (9, ""), 1: (0.0, failed)}, early) == str(DIED)
    assert error({0: (9, ""), 1: (0.7, failed)}, late).startswith(str(DIED))


def test_a_process_that_does_not_answer_twice_is_named() -> None:
    silent = "does not respond, because its process is stopped or its interpreter is blocked"
    assert error({0: (9, ""), 1: (9, "")}, {0: [computes()], 1: [None]}) == LATE + silent
    waited = error({0: (9, ""), 1: (9, "")}, {0: [waits()], 1: [None]})
    assert waited == LATE + silent + "; worker 0 waits for it in all_reduce"
    assert outcome({0: (1.2, "a"), 1: (1.2, "b")}, {0: [waits()], 1: [None, computes()]}) == ["a", "b"]
