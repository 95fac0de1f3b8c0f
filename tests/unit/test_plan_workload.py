"""Lengths that a plan assumes: where they come from, and what follows from their distribution."""

import math
from pathlib import Path
from statistics import NormalDist

import plan_graphs as graphs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from model_configs import model_config

from hflow.base.errors import PlanError
from hflow.config.schema import WorkloadConfig
from hflow.launch.planning.compile import plan
from hflow.planner.compile import compile_plan
from hflow.planner.plan.request import stream_workloads
from hflow.planner.plan.workload import (
    Workload,
    cdf,
    expected_max,
    quantile,
    sample_lengths,
)

GRPO = Path(__file__).parents[2] / "recipes/grpo.py"

some = st.builds(
    Workload,
    prompt=st.integers(1, 50),
    response_mean=st.floats(1.0, 200.0),
    response_cv=st.one_of(st.just(0.0), st.floats(0.05, 2.0)),
    max_response=st.integers(1, 300),
)


# ------------------------------------------------------------------------- where they come from
def lengths_of(graph, **changes):
    request = graphs.request(**changes)
    return dict(stream_workloads(compile_plan(graph, request), request))


def limited(graph, node, max_tokens):
    return graphs.changed(graph, node, options=(("max_tokens", max_tokens),))


def test_lengths_default_to_max_tokens_and_the_engines_limit():
    graph = limited(limited(graphs.grpo(), "actor_gen", 1500), "eval_gen", 300)
    models = {"actor": model_config(max_model_len=2000)}
    # The prompt is what 1500 tokens leave of 2000, and for evaluation no more than 512.
    assert lengths_of(graph, models=models) == {
        "actor_gen": Workload(500, 750.0, 0.6, 1500),
        "eval_gen": Workload(512, 150.0, 0.6, 300),
    }


def test_the_users_numbers_count_and_the_engine_cuts_responses():
    graph = limited(graphs.grpo(), "actor_gen", 1500)
    said = WorkloadConfig(prompt=900, response_mean=700.0, response_cv=0.0)
    found = lengths_of(graph, workload=said, models={"actor": model_config(max_model_len=2000)})
    assert found["actor_gen"] == Workload(900, 700.0, 0.0, 1100, is_assumed=False)


def test_one_number_that_is_missing_is_an_assumption():
    assert lengths_of(graphs.grpo(), workload=WorkloadConfig(prompt=9, response_mean=9.0))[
        "actor_gen"
    ].is_assumed


@pytest.mark.parametrize(
    ("overrides", "rows"),
    [
        (["data.train.generator=null", "data.train.path=mine.jsonl"], "path=mine.jsonl"),
        (["data@data.train=addition-chat"], "generator=addition-chat"),
        (["data.train.generator=null", "data.train.sources={a:{path:b.jsonl}}"], "sources={a}"),
        (["data.train.split=heldout", "data.heldout.path=x.jsonl", "data.heldout.generator=null"], None),
        (["data.train.generator=null", "data.train.path=mine.jsonl", "workload.prompt=7"], None),
        (["workload.prompt=9"], None),
    ],
)
def test_other_rows_than_those_that_lengths_were_set_for_are_warned_of(overrides, rows):
    found = [line for line in plan(GRPO, overrides).warnings if "workload.prompt" in line]
    assert len(found) == (rows is not None)
    if rows is not None:
        assumed = "prompts of 7 tokens, as workload.prompt says for data.train.generator=addition"
        assert found[0].startswith(f"the plan assumes {assumed}, but the rows are now those of {rows}. If")


@pytest.mark.parametrize(
    ("recipe", "overrides", "kept"),
    [
        (
            "grpo",
            ["model@models.actor=qwen2.5-0.5b", "models.actor.path=null", "device_memory_gib=99"],
            "cluster=here workload.prompt=null workload.response_cv=null workload.response_mean=null",
        ),
        ("grpo_async", ["cluster=cpu-1x3"], "placement=null"),
        ("grpo", ["nodes.actor_gen.max_tokens=9"], "workload.response_cv=null workload.response_mean=null"),
        ("grpo", ["nodes.actor_gen.max_tokens=9", "workload.response_mean=4"], "workload.response_cv=null"),
        ("grpo_async", ["cluster=cpu-1x3", "placement='actor=0 actor.gen=1'"], None),
        ("grpo", ["cluster=cpu-1x3", "models.actor.path=hflow:addition", "steps=3"], None),
    ],
)
def test_sizes_of_what_overrides_replace_are_warned_of(
    recipe: str, overrides: list[str], kept: str | None
) -> None:
    found = [line for line in plan(f"recipes/{recipe}.py", overrides).warnings if "you replaced" in line]
    assert [line.rpartition("plan: ")[2] for line in found] == ([] if kept is None else [kept])


def test_written_samples_fill_half_of_the_space_after_the_prompt():
    assert lengths_of(graphs.sft()) == {"sft_view": Workload(512, 768.0, 0.6, 1536)}
    small = {"actor": model_config(max_model_len=64)}
    assert lengths_of(graphs.sft(), models=small) == {"sft_view": Workload(32, 16.0, 0.6, 32)}


def test_a_prompt_without_room_for_a_response_is_refused():
    with pytest.raises(PlanError, match=r"2048 tokens leave no room .* set workload.prompt to 2047 or less"):
        lengths_of(graphs.grpo(), workload=WorkloadConfig(prompt=2048))


# ------------------------------------------------------------------------------ the distribution
def test_half_of_all_responses_are_below_the_median():
    # With cv 1 the variance of the logarithm is ln 2, and the median exp(mu) = mean / sqrt(2).
    workload = Workload(1, 1000.5 * math.sqrt(2), 1.0, 100_000)
    assert cdf(workload, 1000) == pytest.approx(0.5)
    assert quantile(workload, 0.5) == 1000


def test_equal_responses():
    workload = Workload(10, 20.0, 0.0, 50)
    assert [cdf(workload, t) for t in (0, 19, 20, 50)] == [0.0, 0.0, 1.0, 1.0]
    assert expected_max(workload, 1) == expected_max(workload, 1000) == 20.0
    assert sample_lengths(workload, 3, seed=0) == (30, 30, 30)


def test_longer_means_than_max_response_are_cut():
    assert expected_max(Workload(10, 80.0, 0.0, 50), 7) == 50.0


def test_the_longer_of_two_lognormal_responses():
    # Of two lognormal variables: 2 mean Phi(sigma / sqrt(2)). With cv 1, sigma = sqrt(ln 2) = 0.83255 and
    # Phi(0.58871) = 0.72197, so 1.44394 of the mean. The cut at 40 means changes no digit.
    expected = 2 * NormalDist().cdf(math.sqrt(math.log(2) / 2))
    assert expected == pytest.approx(1.44394, abs=2e-5)
    workload = Workload(1, 1000.0, 1.0, 40_000)
    assert expected_max(workload, 2) == pytest.approx(1000 * expected, rel=1e-3)
    assert expected_max(workload, 1) == pytest.approx(1000, rel=1e-3)


@given(some, st.integers(1, 64))
def test_the_expected_longest_is_the_sum_over_all_lengths(workload, num):
    lengths = range(1, workload.max_response + 1)
    by_definition = sum(t * (cdf(workload, t) ** num - cdf(workload, t - 1) ** num) for t in lengths)
    assert expected_max(workload, num) == pytest.approx(by_definition)


@given(some, st.integers(1, 64))
def test_more_responses_never_have_a_shorter_longest(workload, num):
    assert 1 <= expected_max(workload, num) <= expected_max(workload, num + 1) + 1e-9
    assert expected_max(workload, num) <= workload.max_response


@given(some, st.floats(0.001, 0.999))
def test_a_quantile_is_where_the_cdf_reaches_its_share(workload, share):
    tokens = quantile(workload, share)
    assert cdf(workload, tokens) >= share - 1e-9
    assert cdf(workload, tokens - 1) < share + 1e-9


# ---------------------------------------------------------------------------------------- samples
@given(some, st.integers(1, 200), st.integers(0, 5))
def test_samples_are_distributed_as_the_workload_says(workload, num, seed):
    responses = [total - workload.prompt for total in sample_lengths(workload, num, seed)]
    assert len(responses) == num
    for tokens in range(0, workload.max_response + 1, 7):
        share = sum(response <= tokens for response in responses) / num
        assert abs(share - cdf(workload, tokens)) <= 0.5 / num + 1e-9


def test_the_seed_decides_the_order_and_nothing_else():
    workload = Workload(7, 100.0, 0.6, 400)
    one, other = (sample_lengths(workload, 64, seed) for seed in (0, 1))
    assert one == sample_lengths(workload, 64, 0)
    assert one != other
    assert sorted(one) == sorted(other)
