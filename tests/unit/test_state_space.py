"""Small runs, explored exhaustively: no order of events ends badly or trains what is too old."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from state_script import ENGINE, arriving, batch, changed, generated, group, sample, schedule
from state_space import Space, explore

from hflow.graph.ir import Level
from hflow.planner.plan.rows import Schedule, ScheduledStream
from hflow.planner.plan.staleness import staleness_bound
from hflow.runtime import events as ev

SALTS = (0, 2)
"""Each lets other samples take long, and others fail."""


def tiny(size: int = 1, scored: bool = False, num_groups: int = 1, **rules: Any) -> Schedule:
    """Small batches; the reference is on devices of its own."""
    scores = [sample("score", "gen"), group("rank", "score")] if scored else []
    nodes = [*scores, batch("ref", "r"), batch("train", "g", "ref", writes=("actor",))]
    return schedule([generated(size=size, num_groups=num_groups)], nodes, **{"num_steps": 3, **rules})


def explored(what: Schedule, refusal: float = 0.0) -> Space:
    whole = Space()
    for salt in SALTS:
        space = explore(what, {"eval": 1}, refusal, salt)
        whole.num_states += space.num_states
        whole.interrupted += space.interrupted
        whole.lags |= space.lags
        whole.refused |= space.refused
    return whole


@pytest.mark.first(4)
@pytest.mark.parametrize(
    ("rules", "least"),
    [
        ({"max_staleness": 0}, 20),
        ({"max_staleness": 1}, 500),
        ({"max_staleness": 0.5, "num_groups": 2, "num_steps": 2}, 200),
        pytest.param({"max_staleness": 1, "sync_every": 2, "num_steps": 4}, 1000, marks=pytest.mark.long),
        ({"max_staleness": 2}, 500),
        ({"max_staleness": 1, "shared": "g"}, 100),
        ({"max_staleness": 1, "shared": "g+r"}, 100),
        ({"max_staleness": 2, "drop_older_than": 1}, 200),
        ({"max_staleness": 1, "interrupt": False, "age_rule": False}, 50),
    ],
    ids=str,
)
def test_the_certificate_holds_in_every_order_and_is_reached(rules: dict[str, Any], least: int):
    what = tiny(**rules)
    space = explored(what)
    assert space.num_states >= least
    assert max(space.lags) == staleness_bound(what)
    assert bool(space.interrupted) == (what.settings.max_staleness > 0 and what.settings.interrupt)


def test_without_the_age_rule_a_sample_trains_with_a_larger_lag():
    what = tiny(max_staleness=1, age_rule=False)
    space = explored(what)
    assert staleness_bound(what) is None
    assert max(space.lags) > 1
    assert not space.refused


def test_groups_with_rewards_that_fail():
    space = explored(tiny(size=2, scored=True, max_staleness=1, num_steps=2, max_refused_per_step=0), 0.3)
    assert space.num_states >= 500
    assert space.refused[ev.Refusal.TIMEOUT] > 0


@pytest.mark.long
def test_streaming_inference_before_a_keep():
    """Two nodes share its devices; what it works on may be refused meanwhile."""
    nodes = [
        arriving("rm", "m", "gen"),
        arriving("cost", "m", "gen", level=Level.SAMPLE),
        group("keeps", "rm", "cost", keep=True),
        batch("train", "g", writes=("actor",)),
    ]
    what = schedule([generated(size=1, num_groups=1)], nodes, num_steps=3, max_staleness=1)
    space = explored(changed(what, max_refused_per_step=0), 0.2)
    assert space.num_states >= 200
    assert space.refused[ev.Refusal.STALE] > 0


def test_a_full_queue_drops_its_oldest():
    space = explored(tiny(max_staleness=2, queue=1))
    assert space.refused[ev.Refusal.QUEUE_FULL] > 0
    assert max(space.lags) <= 2


def test_evaluations_during_stale_generation():
    side = ScheduledStream("eval", "eval", 1, None, (ENGINE,), ("actor",), every=2)
    what = tiny(max_staleness=1, num_steps=2, max_concurrent=2)
    assert explored(replace(what, streams=(*what.streams, side))).num_states >= 200
