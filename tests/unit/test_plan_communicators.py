"""The communicators of each device: known numbers, and what every member agrees on."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import plan_graphs as graphs
import pytest
from hypothesis import given, settings
from memory_kit import SMALL
from model_configs import model_config
from test_plan_weight_routes import cases, route_of

from hflow.config.schema import OptimConfig
from hflow.planner.compile import compile_plan
from hflow.planner.forecast.communicators import communicators
from hflow.planner.forecast.memory.nccl import MIB, NcclLinks, communicator_bytes
from hflow.planner.plan.rows import Plan
from hflow.planner.weights.weight_slices import slices_to_send, streams
from hflow.report.text.plan.memory import communicator_lines, device_classes

KIT = graphs.hardware_of(graphs.cluster_of("h100-1x8"))
"""H100 whose links have no channels."""


def plan_of(cluster: str, layout: str, engines: str, **changes: object) -> Plan:
    """GRPO with a small actor; groups follow from `changes`."""
    asked = {"hardware": changes.pop("hardware")} if "hardware" in changes else {}
    models = {"actor": model_config(layout, engines, **changes), "ref": model_config(layout)}
    shapes = {"actor": SMALL, "ref": SMALL}
    return compile_plan(graphs.grpo(), graphs.request(cluster, models=models, shapes=shapes, **asked))


APART = {"group": "train", "gen_group": "gen", "transport": "collective"}


def uses(plan: Plan, worker: int) -> dict[str, int]:
    return dict(Counter(one.use for one in communicators(plan, [worker])[worker]))


def test_no_collective_connects_ranks_that_no_other_does():
    """To send to one rank, or from one, NCCL makes messages, with buffers for each pair.

    Updates of whole matrices need that: each has an owner. Plans count those buffers.
    """
    pattern = re.compile(r"\bdist\.(gather|gather_object|scatter|scatter_object_list|all_to_all\w*)\(")
    package = Path(__file__).parents[2] / "hflow"
    found = [path.name for path in package.rglob("*.py") if pattern.search(path.read_text())]
    assert found == ["whole_matrices.py"]


A100 = NcclLinks(domain=8, channels=24, network_channels=2, switch_channels=0)
H100 = A100._replace(switch_channels=16)


def test_the_buffers_of_a_communicator():
    # 688 MiB on four A100 (nccl#964): 112, and 24 channels of 12 MiB for a ring, and as many for a tree.
    assert communicator_bytes(range(4), A100) == (112 + 2 * 24 * 12) * MIB
    # A broadcast needs a ring alone. Reductions on H100 have 16 channels of 2 MiB a rank through switches.
    assert communicator_bytes(range(4), H100, broadcasts=True) == (112 + 24 * 12) * MIB
    assert communicator_bytes(range(8), H100) == (112 + 2 * 24 * 12 + 16 * 2 * 8) * MIB
    # An all-to-all connects seven peers by 32 channels.
    experts = communicator_bytes(range(8), H100, num_peers=7) - communicator_bytes(range(8), H100)
    assert experts == 7 * 32 * 12 * MIB
    # Between machines: two channels for each port, of which a rank sends by its own.
    assert communicator_bytes(range(16), H100, broadcasts=True) == (112 + 16 * 12 + 2 * 8) * MIB
    assert communicator_bytes(range(0, 64, 8), H100, broadcasts=True) == (112 + 2 * 20) * MIB


def test_communicators_are_in_the_memory_of_a_device_and_leave_less_for_the_cache():
    found = {}
    for links in (KIT, replace(KIT, intra=replace(KIT.intra, channels=24))):
        plan = plan_of("h100-1x8", "d4", "d4", hardware=links, engine="vllm", cache_gib=1.0, **APART)
        for row in plan.forecast.memory:
            if row.phase in ("generate", "actor_train"):
                sizes = {entry.name: entry.num_bytes for entry in row.resident}
                found[links.intra.channels, row.phase] = sizes.get("communicators", 0), row.total
    ring, both = 24 * 12 * MIB, 2 * 24 * 12 * MIB
    base = 112 * MIB
    for phase, wanted in (("generate", 2 * (base + ring)), ("actor_train", base + both + base + ring)):
        assert found[0, phase][0] == 0
        assert found[24, phase] == (wanted, found[0, phase][1] + wanted)


def bytes_of_communicators(layout: str, optimizer: str, **changes: object) -> int:
    """Return what communicators take while a small actor trains on H100 whose links have 24 channels."""
    hardware = replace(KIT, intra=replace(KIT.intra, channels=24))
    optim = OptimConfig(name=optimizer, lr=1e-3)
    plan = plan_of("h100-1x8", layout, "d8", hardware=hardware, optim=optim, **changes)
    row, *_ = [row for row in plan.forecast.memory if row.phase == "actor_train"]
    (found,) = [entry.num_bytes for entry in row.resident if entry.name == "communicators"]
    return found


PEER = 32 * 12 * MIB
"""The buffers for messages with one rank."""


@pytest.mark.parametrize(
    ("layout", "backend", "peers"),
    [("d8", "torch", 7), ("d8r2", "torch", 3), ("d4t2", "megatron", 7), ("d2t2p2", "megatron", 3)],
)
def test_ranks_that_exchange_parts_of_matrices_have_buffers_for_each_other(layout, backend, peers):
    """Those that hold parts of the same matrices: FSDP's ranks of a shard, and megatron's of a stage."""
    muon, adamw = (bytes_of_communicators(layout, name, backend=backend) for name in ("muon", "adamw"))
    assert muon - adamw == peers * PEER


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


def test_the_plan_lists_the_communicators_of_each_kind_of_device():
    plan = plan_of("h100-1x8", "d4", "d4", **APART)
    assert list(communicator_lines(plan, device_classes(plan.forecast.memory))) == [
        "devices 0-3 (4): 2 NCCL communicators: collectives of actor@train 1, weights for actor@gen 1",
        "devices 4-7 (4): 2 NCCL communicators: weights for actor@gen 2",
    ]


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
