"""Whatever the schedule and the order of events, the ledger of a run is whole when it is closed."""

from __future__ import annotations

import tempfile
from pathlib import Path
from random import Random

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ledger_kit import LedgerWorld, ends_of, kept
from state_schedules import schedules

from hflow.planner.plan.rows import Schedule
from hflow.runtime.ledger import audit, rewind

SEEDS = st.integers(0, 2**16)
FEW = settings(max_examples=50, suppress_health_check=list(HealthCheck))
ROWS = {"eval0": 3, "eval1": 5}


@FEW
@given(
    schedules(),
    SEEDS,
    st.sampled_from((0.0, 0.05, 0.2)),
    st.sampled_from((0.0, 0.5)),
    st.none() | st.integers(0, 200),
)
def test_every_issued_sample_has_exactly_one_end(
    schedule: Schedule, seed: int, refusal: float, stall: float, stop_after: int | None
):
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "ledger.sqlite"
        with kept(path, schedule) as ledger:
            world = LedgerWorld(
                schedule,
                Random(seed),
                ROWS,
                ledger,
                refusal=refusal,
                stop_after=stop_after,
                stall=stall,
                salt=seed,
            )
            reason = world.run().reason
            counts = ledger.close(reason)
        assert audit(path) == []
        ends = ends_of(path)
    issued = world.issued
    assert ends.keys() == issued
    assert sum(counts.values()) == len(issued)
    bound = {("roll", s): step for step, batch in world.batches["roll"].items() for s in batch.samples}
    done = {key: step + 1 for key, step in bound.items() if step in world.steps_done}
    assert {key: step for key, (kind, step) in ends.items() if kind == "trained"} == done
    assert {key for key, (kind, _) in ends.items() if kind in ("refused", "dropped")} == world.refused
    if reason == "done":
        assert "unused" not in counts


@FEW
@given(schedules(), st.tuples(SEEDS, SEEDS), st.integers(0, 100))
def test_a_run_that_continues_has_one_history(schedule: Schedule, seeds: tuple[int, int], stop_after: int):
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "ledger.sqlite"
        with kept(path, schedule) as ledger:
            first = LedgerWorld(
                schedule,
                Random(seeds[0]),
                ROWS,
                ledger,
                refusal=0.05,
                stop_after=stop_after,
                salt=seeds[0],
                checkpoints=0.05,
            )
            first.run()
        saved = first.saved
        rewind(path, saved.snapshot.steps if saved else 0, first.position)
        with kept(path, schedule) as ledger:
            second = LedgerWorld(schedule, Random(seeds[1]), ROWS, ledger, salt=seeds[0], saved=saved)
            second.issued |= first.saved_issued
            counts = ledger.close(second.run().reason)
        assert audit(path) == []
        assert ends_of(path).keys() == second.issued
        assert sum(counts.values()) == len(second.issued)
