"""The benchmark with virtual workers runs the real executor, state machine, ledger and metrics."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SMALL = Namespace(
    trainers=14,
    batch=32,
    slots=4,
    concurrent=256,
    mean=20,
    cv=1.0,
    max_tokens=80,
    steps=6,
    stretch=1.0,
    real=False,
)


@pytest.mark.first(1)
@pytest.mark.parametrize(("staleness", "interrupt"), [(2, True), (0, True), (2, False)])
def test_small_runs_train_all_steps(staleness: int, interrupt: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks.speed import async_virtual

    found = async_virtual.measure(SMALL, staleness, interrupt)
    assert found["steps"] == SMALL.steps
    assert found["samples"] == pytest.approx(SMALL.steps * SMALL.batch * 8, rel=0.3)
    assert found["staleness_max"] <= staleness


def test_eight_models_train_all_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks.speed import controller_scale

    found = controller_scale.measure(128, Namespace(batch=32, steps=4, rate=20_000))
    assert found["steps"] == 4
    assert found["samples"] == 4 * 32 * 8
    assert found["sent_bytes"] > 0
