"""Clusters with several kinds of devices: each replica is on one of them, and has its figures."""

import dataclasses
from pathlib import Path

import plan_graphs as graphs
import pytest

from hflow.base.errors import ConfigError, PlanError, RunError
from hflow.launch.planning.compile import compile_recipe
from hflow.planner.plan.rows import Plan
from hflow.planner.search.layouts import Share, devices_of_shares, divisions_of
from hflow.workers.ray.machines import Machine, choose_machines

RECIPES = Path(__file__).parents[2] / "recipes"
UNEQUAL = "h100-1x4+a100-80g-1x4"
MODEL = (
    "model@models.actor=qwen2.5-1.5b",
    "models.actor.path=null",
    "models.actor.gen.engine=vllm",
    "nodes.actor_gen.max_tokens=1024",
    "workload.prompt=200",
    "workload.response_mean=400",
)
APART = "schedule.max_staleness=1"


def plan(cluster: str, *overrides: str) -> Plan:
    """The plan of GRPO with a model of 1.5B."""
    return compile_recipe(RECIPES / "grpo.py", [f"cluster={cluster}", *MODEL, *overrides]).plan


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("h100-1x8+a100-80g-1x4", "has machines with different numbers of devices"),
        ("h100-1x8+cpu-1x8", "has CPUs and GPUs"),
        ("h100-1x8+h100-2x8", "names h100 twice"),
        ("h100-1x8+a10-80g-1x8", "unknown device 'a10-80g'"),
        ("h100-1x8+", "is not understood"),
        ("h100-4000x8+l4-5000x8", "has more than 65,536 devices"),
    ],
)
def test_names_that_cannot_be(name: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        graphs.cluster_of(name)


def test_devices_are_numbered_kind_by_kind() -> None:
    cluster = graphs.cluster_of("h200-2x8+l4-1x8")
    assert (cluster.num_nodes, cluster.num_devices, cluster.first_devices) == (3, 24, (0, 16))
    assert [cluster.part_of(device).name for device in (0, 15, 16)] == ["h200-2x8", "h200-2x8", "l4-1x8"]
    assert cluster.memory_bytes == cluster.memory_of(23) < cluster.memory_of(0)
    equal = graphs.cluster_of("h200-2x8")
    assert (equal.part_of(9), equal.part_index(9), equal.first_of_kind(9)) == (equal, 0, 0)


@pytest.mark.parametrize("key", ["device_memory_gib=40", "calibrate=demo", "calibration=mine.yaml"])
def test_settings_that_hold_for_one_kind(key: str) -> None:
    with pytest.raises(ConfigError, match="holds for one kind of devices"):
        plan(UNEQUAL, key)


def test_racks_come_first() -> None:
    with pytest.raises(ConfigError, match="gb200-18x4 is in racks; name it in front"):
        plan("h100-1x4+gb200-18x4")


def test_a_replica_has_devices_of_one_kind() -> None:
    with pytest.raises(
        PlanError, match=r"actor@train has devices of several kinds.*0-3 \(h100-1x4\) and 4-7"
    ):
        plan(UNEQUAL, "placement='actor,actor.gen=all'")


def test_a_plan_on_one_kind_is_that_of_the_kind_alone() -> None:
    for kind, first in (("h100", 0), ("a100-80g", 4)):
        devices = f"{first}-{first + 3}"
        alone = plan(f"{kind}-1x4", "placement='actor,actor.gen=0-3'")
        beside = plan(UNEQUAL, f"placement='actor,actor.gen={devices}'")
        ours, theirs = (
            {(row.node, name): seconds for row in one.forecast.times for name, seconds, *_ in row.parts}
            for one in (beside, alone)
        )
        moved = {key for key in ours.keys() | theirs.keys() if key[1] == "redistribution"}
        assert {k: v for k, v in ours.items() if k not in moved} == pytest.approx(
            {k: v for k, v in theirs.items() if k not in moved}
        )
        peaks = [{row.phase: row.total for row in one.forecast.memory} for one in (beside, alone)]
        assert peaks[0] == peaks[1]
        assert beside.engines[0].largest_batch == alone.engines[0].largest_batch


def test_each_kind_counts_its_own_memory() -> None:
    small = plan("h200-1x4+l4-1x4", "placement='actor=0-3 actor.gen=4-7'")
    assert small.replica("actor@gen").workers == (4, 5, 6, 7)
    cache = small.engines[0].cache_bytes
    assert cache is not None
    assert cache < small.cluster.memory_of(4) < small.cluster.memory_of(0)
    with pytest.raises(PlanError, match="is available on device 4"):
        plan("h200-1x4+l4-1x4", "placement='actor=4 actor.gen=0-3'")


def test_the_search_divides_each_kind() -> None:
    cluster = graphs.cluster_of("h100-1x2+l4-1x2")
    found = list(divisions_of((0, 1, 2, 3), cluster, 2))
    assert found == [
        (Share(0, 1), Share(0, 1)),
        (Share(0, 2), Share(1, 2)),
        (Share(1, 2), Share(0, 2)),
        (Share(1, 1), Share(1, 1)),
    ]
    assert devices_of_shares(found[2], (0, 1, 2, 3), cluster) == ((2, 3), (0, 1))
    assert list(divisions_of((), cluster, 0)) == [()]
    equal = graphs.cluster_of("h100-1x4")
    assert {tuple(share.num for share in row) for row in divisions_of((0, 1, 2, 3), equal, 2)} == {
        (1, 3),
        (2, 2),
        (3, 1),
    }


def test_the_chosen_split_is_the_shortest() -> None:
    chosen = plan(UNEQUAL, APART)
    seconds = chosen.forecast.candidates[0].seconds
    for replica in chosen.replicas:
        assert len({chosen.cluster.part_index(worker) for worker in replica.workers}) == 1
    for placement in (
        "actor=0-3 actor.gen=4-7",
        "actor=4-7 actor.gen=0-3",
        "actor,actor.gen=0-3",
        "actor=0-1 actor.gen=2-3",
    ):
        other = plan(UNEQUAL, APART, f"placement='{placement}'")
        assert other.forecast.period is not None
        assert seconds <= max(other.forecast.period.seconds, other.forecast.period.simulated or 0.0) * 1.001
    assert chosen.replica("actor@train").workers[0] == 0  # training is bound by FLOPs, which H100s have


def test_prices_are_those_of_each_kind() -> None:
    kinds = plan(UNEQUAL).hardware.kinds
    assert [kind.device.name for kind in kinds] == ["h100", "a100-80g"]
    assert [kind.others for kind in kinds] == [(), ()]


def test_real_machines_are_chosen_by_kind() -> None:
    old, new = (Machine(name, name, 64.0, 8.0, kind) for name, kind in (("a", "a100"), ("b", "h100")))
    cluster = graphs.cluster_of("h100-1x8+a100-80g-1x8")
    assert choose_machines(cluster, [old, new]).nodes == ("b", "a")
    unnamed = [dataclasses.replace(machine, kind="") for machine in (old, new)]
    assert set(choose_machines(cluster, unnamed).nodes) == {"a", "b"}
    with pytest.raises(RunError, match="cluster=a100-80g-1x8 needs a machine with 8 GPUs"):
        choose_machines(cluster, [new, dataclasses.replace(new, node="c")])


@pytest.mark.parametrize(
    ("kind", "devices"),
    [
        ("a100", {"a100-40g", "a100-80g"}),
        ("h200", {"h200"}),
        ("h20", {"h20"}),
        ("geforce-rtx-4090", {"rtx-4090"}),
    ],
)
def test_names_that_begin_alike_are_different_machines(kind: str, devices: set[str]) -> None:
    known = {"a10", "a100-40g", "a100-80g", "h20", "h200", "h100", "rtx-4090"}
    assert {name for name in known if Machine("a", "a", 64.0, 8.0, kind).has(name)} == devices
