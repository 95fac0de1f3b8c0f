"""What workers report about a sample: the versions of its tokens, and one number."""

from __future__ import annotations

from pathlib import Path

import pytest

from hflow.graph.queries import reported_field, reported_number
from hflow.launch.planning.read_recipe import check
from hflow.types import Trajectory
from hflow.workers.storage.sample_writer import sample_ready_event

ROOT = Path(__file__).parents[2]


def trajectory(*versions: int) -> Trajectory:
    num = len(versions)
    mask = tuple(version >= 0 for version in versions)
    return Trajectory((1,) * num, mask, (0.0,) * num, versions, num_turns=2)


def test_a_sample_is_reported_with_its_runs_of_versions():
    """Tokens of tools and prompts belong to no run and do not end one."""
    report = sample_ready_event("gen", 3, [trajectory(-1, -1, 4, 4, -1, 4, 5, -1, 7, 7)], 0.5)
    assert report.segments == ((4, 3), (5, 1), (7, 2))
    assert (report.oldest, report.newest, report.num_learned, report.length) == (4, 7, 6, 10)
    assert (report.num_turns, report.value) == (2, 0.5)


def test_several_trajectories_have_sums_by_version():
    report = sample_ready_event("alice", 0, [trajectory(-1, 4, 4, 6), trajectory(4, -1, 5, 6)])
    assert report.segments == ((4, 3), (5, 1), (6, 2))
    assert (report.oldest, report.newest, report.num_learned, report.length) == (4, 6, 6, 8)


def test_a_sample_without_generated_tokens_has_no_runs():
    report = sample_ready_event("sft", 0, [Trajectory.learned((1, 2), (3,))])
    assert (report.segments, report.oldest, report.newest) == ((), -1, -1)


@pytest.mark.parametrize(
    ("returns", "told"),
    [
        ([("tries", "sequence"), ("score", "sequence"), ("reward", "sequence")], "reward"),
        ([("tries", "sequence"), ("score", "sequence")], "score"),
        ([("keep", "sequence"), ("tries", "sequence"), ("cost", "sequence")], "tries"),
        ([("reward", "token"), ("note", "text"), ("keep", "sequence")], None),
        ([], None),
    ],
)
def test_one_number_of_a_sample_is_reported(returns: list[tuple[str, str]], told: str | None):
    assert reported_number(returns) == told


@pytest.mark.parametrize(
    ("recipe", "told"),
    [
        ("recipes/grpo.py", {"score": "reward", "accuracy": "accuracy"}),
        ("recipes/ppo.py", {"score": "reward", "accuracy": "accuracy"}),
        ("recipes/reward_model.py", {"eval_inf": "score"}),
        ("recipes/tool_agent.py", {"agent": "reward", "eval_agent": "reward", "accuracy": "accuracy"}),
        (
            "tests/integration/recipes/judged.py",
            {"rew_inf": "rm_score", "total": "reward", "eval_inf": "reward"},
        ),
        ("tests/integration/recipes/ppo_of_a_reward_model.py", {"rew_inf": "reward"}),
    ],
)
def test_advantages_values_and_losses_are_not_reported(recipe: str, told: dict[str, str]):
    graph = check(ROOT / recipe, [])
    found = {node.name: reported_field(graph, node.name) for node in graph.nodes}
    assert {name: field for name, field in found.items() if field} == told
