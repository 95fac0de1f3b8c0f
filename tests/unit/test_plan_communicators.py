"""The communicators of each device: known numbers, and what every member agrees on."""

from __future__ import annotations

from collections import Counter

import plan_graphs as graphs
import pytest
from hypothesis import given, settings
from memory_kit import SMALL
from model_configs import model_config
from test_plan_weight_routes import cases, route_of

from hflow.planner.compile import compile_plan
from hflow.planner.forecast.communicators import communicators
from hflow.planner.plan.rows import Plan
from hflow.planner.weights.weight_slices import slices_to_send, streams


def plan_of(cluster: str, layout: str, engines: str, **changes: object) -> Plan:
    """GRPO with a small actor; groups follow from `changes`."""
    models = {"actor": model_config(layout, engines, **changes), "ref": model_config(layout)}
    shapes = {"actor": SMALL, "ref": SMALL}
    return compile_plan(graphs.grpo(), graphs.request(cluster, models=models, shapes=shapes))


APART = {"group": "train", "gen_group": "gen", "transport": "collective"}


def uses(plan: Plan, worker: int) -> dict[str, int]:
    return dict(Counter(one.use for one in communicators(plan, [worker])[worker]))


@given(cases())
@settings(max_examples=50)
def test_streams_are_those_that_workers_send(case):
    route = route_of(case.src, case.dst, case.shape, 2, case.machines)
    sent = {
        (worker, receivers)
        for worker in case.src.workers
        for receivers in slices_to_send(route, case.machines, worker)
    }
    assert streams(route, case.machines) == sent


def test_colocated_replicas_share_the_group_of_their_ranks():
    plan = plan_of("h100-1x8", "d8", "d8")
    assert {worker: uses(plan, worker) for worker in (0, 7)} == {
        0: {"collectives of actor@train": 1},
        7: {"collectives of actor@train": 1},
    }


def test_engines_receive_from_all_ranks_of_fsdp_in_two_communicators():
    plan = plan_of("h100-1x8", "d4", "d4", **APART)
    assert uses(plan, 0) == {"collectives of actor@train": 1, "weights for actor@gen": 1}
    assert uses(plan, 4) == {"weights for actor@gen": 2}


def test_tensor_ranks_have_a_communicator_of_their_own():
    plan = plan_of("h100-1x8", "d4", "d2t2", engine="vllm", **APART)
    assert uses(plan, 5)["tensor ranks of actor@gen"] == 1


def test_a_single_sender_broadcasts_itself():
    plan = plan_of("h100-1x4", "d1", "d3", **APART)
    assert uses(plan, 0) == uses(plan, 3) == {"weights for actor@gen": 1}


@pytest.mark.parametrize(
    ("cluster", "layout", "engines", "backend"),
    [
        ("h100-1x8", "d4", "d4", "torch"),
        ("h100-2x8", "d2t2p2", "d4t2", "megatron"),
        ("h100-2x8", "d8", "d4t2", "torch"),
    ],
)
def test_all_workers_of_a_communicator_have_it(cluster, layout, engines, backend):
    plan = plan_of(cluster, layout, engines, backend=backend, engine="vllm", **APART)
    found = communicators(plan, range(plan.cluster.num_devices))
    for worker, several in found.items():
        for one in several:
            assert worker in one.workers
            assert all(one in found[other] for other in one.workers)
