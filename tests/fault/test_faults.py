"""Processes of a run that end at random moments: it continues by itself, or is resumed, and loses nothing.

`make chaos N=200` does the same for more seeds.
"""

from __future__ import annotations

from pathlib import Path

import chaos
import pytest

pytestmark = pytest.mark.ray

CASES = [("ppo", "worker", 6), ("grpo_async", "controller", 7)]
"""A run, a fault, and a seed that chooses both."""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, no_ray: None) -> dict[str, Path]:
    out = tmp_path_factory.mktemp("undisturbed")
    return {name: chaos.run_undisturbed(name, out) for name in chaos.SYNCHRONOUS}


@pytest.mark.parametrize(("run", "fault", "seed"), CASES)
def test_a_run_survives(run: str, fault: str, seed: int, tmp_path: Path, undisturbed: dict[str, Path]):
    trial = chaos.run_trial(seed, tmp_path, undisturbed)
    assert (trial.run, trial.fault) == (run, fault)
    assert trial.problems == []
    if fault == "worker":
        assert trial.exit_codes == [0]
        assert trial.restarts > 0
    else:
        assert trial.exit_codes[-1] == 0
