"""The spread of rewards and lengths in a batch, and the warning of answers that are cut."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from hflow import check
from hflow.base.shipped import find_recipe
from hflow.launch.running.step_warnings import TruncationWarning
from hflow.runtime.records.step_metrics import RewardMetrics
from hflow.workers.interface import ComputeReady, SampleReady


def metrics() -> RewardMetrics:
    return RewardMetrics(check(find_recipe("grpo")))


def add(rewards: RewardMetrics, *values: float, lengths: tuple[int, ...] = ()) -> None:
    for sample, reward in enumerate(values):
        length = lengths[sample] if lengths else 3
        rewards.add_sample(SampleReady("actor_gen", sample, length + 5, length, 0, 0))
        rewards.add_result(ComputeReady("score", sample, value=reward))


def test_spread_of_a_batch() -> None:
    rewards = metrics()
    add(rewards, 1.0, 0.0, 1.0, 1.0, 0.0, 0.0, lengths=(3, 9, 4, 4, 4, 1))
    assert rewards.take_batch("actor_gen", range(6), 2) == {
        "actor_gen/min_tokens": 1.0,
        "actor_gen/max_tokens": 9.0,
        "actor_gen/reward_std": 0.5,
        "actor_gen/zero_std_groups": pytest.approx(2 / 3),
    }
    assert rewards.take_batch("actor_gen", range(6), 2) == {}  # each sample counts once


def test_a_batch_whose_rewards_are_not_all_known_has_no_spread() -> None:
    rewards = metrics()
    add(rewards, 1.0, 0.0, 1.0)
    rewards.forget("actor_gen", [1])
    found = rewards.take_batch("actor_gen", [0, 1, 2], 1)
    assert found == {"actor_gen/min_tokens": 3.0, "actor_gen/max_tokens": 3.0}


def test_results_of_other_nodes_are_no_rewards(tmp_path: Path) -> None:
    """Samples of an evaluation have the same numbers as those that are trained."""
    recipe = tmp_path / "grpo.py"
    recipe.write_text(find_recipe("grpo").read_text().replace('returns="accuracy"', 'returns="reward"'))
    shutil.copy(find_recipe("grpo").with_suffix(".yaml"), tmp_path)
    rewards = RewardMetrics(check(recipe, ["report.show=null"]))
    rewards.add_result(ComputeReady("accuracy", 0, value=1.0))
    rewards.add_result(ComputeReady("score", 1, value=None))
    assert rewards.take_batch("actor_gen", [0, 1], 2) == {}


def test_most_answers_cut_is_warned_of_once() -> None:
    warning = TruncationWarning()

    def warned(**values: Any) -> list[str]:
        return list(warning.check(3, {name.replace("_", "/"): value for name, value in values.items()}))

    assert warned(gen_truncated=0.5) == []
    (text,) = warned(gen_truncated=0.75)
    assert "75% of the samples of gen in step 3 ended at a limit of tokens" in text
    assert "Raise nodes.gen.max_tokens" in text
    assert warned(gen_truncated=1.0) == []
