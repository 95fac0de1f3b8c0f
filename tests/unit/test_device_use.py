"""Seconds of nodes, MFU and memory in the row of a step, by hand."""

from dataclasses import replace
from pathlib import Path

import pytest

from hflow.base.intervals import covered_length
from hflow.launch.planning.compile import plan
from hflow.planner.forecast.cost.flops import Work, training_flops
from hflow.planner.plan.hardware import GIB
from hflow.planner.plan.rows import Plan
from hflow.runtime.records.device_use import DeviceUse, peak_flops, train_node_flops
from hflow.shapes.model_shape import ModelShape
from hflow.types.engine import EngineStats
from hflow.workers.interface import NodeResult, Span, WorkerReport

ROOT = Path(__file__).parents[2]
SHAPE = ModelShape(
    family="qwen2",
    num_layers=2,
    hidden=4,
    num_heads=2,
    num_kv_heads=1,
    head_dim=2,
    intermediate=8,
    vocab=10,
    is_tied=True,
)
ATTENTION = 4 * 4 + 2 * (2 * 4) + 4 * 4  # queries, keys and values, output
MLP = 3 * 4 * 8


@pytest.fixture(scope="module")
def grpo() -> Plan:
    return plan(ROOT / "recipes/grpo.py", [])


def report(
    worker: int, *spans: tuple[str, float, float], seconds: float = 0.0, peak: int = 0
) -> WorkerReport:
    found = tuple(Span(name, "lane", start, end) for name, start, end in spans)
    return WorkerReport(worker, (), found, engine_stats=EngineStats(seconds=seconds), peak_bytes=peak)


def result(worker: int, seconds: float, **metrics: float) -> NodeResult:
    return NodeResult(
        "actor_train", 0, (), metrics, Span("actor_train", "device", 5.0, 5.0 + seconds), worker
    )


def test_overlapping_intervals_count_once() -> None:
    assert covered_length([]) == 0
    assert covered_length([(2, 3), (1, 4), (6, 8), (7, 9)]) == 3 + 3


def test_seconds_are_those_of_the_slowest_worker_since_the_step_before(grpo: Plan) -> None:
    use = DeviceUse(grpo)
    use.add_report(report(0, ("score", 1.0, 2.0), ("score", 1.5, 3.0), seconds=0.5))
    use.add_report(report(0, ("weights actor@gen", 3.0, 3.25), ("sleep actor@gen", 4, 5), seconds=0.25))
    use.add_report(report(1, ("score", 1.0, 1.5), ("score", 2.0, 2.5), seconds=0.125))
    assert use.finish_step() == {
        "seconds/score": 2.0,
        "seconds/actor@gen": 0.25,
        "seconds/actor_gen": 0.75,
    }
    assert use.finish_step() == {}


def test_memory_is_the_most_of_a_group_beside_the_plan(grpo: Plan) -> None:
    use = DeviceUse(grpo)
    for worker, peak in ((0, 3 * GIB), (1, 2 * GIB), (0, GIB)):
        use.add_report(report(worker, peak=peak))
    planned = max(phase.total for phase in grpo.forecast.memory) / GIB
    assert use.finish_step() == {"memory/all": 3.0, "memory_planned/all": pytest.approx(planned)}
    engine = replace(grpo.replica("actor@gen"), backend="vllm")  # has memory that no worker of a CPU sees
    use = DeviceUse(replace(grpo, replicas=(grpo.replica("actor@train"), engine)))
    use.add_report(report(0, peak=GIB))
    assert use.finish_step() == {}


def test_flops_of_training() -> None:
    work = Work(groups=1, sequences=2, tokens=10, rows=7, learned=4, squares=52)
    forward = 2 * (2 * (ATTENTION + MLP) * 7 + 2 * (52 / 2) * 2 * (2 * 2)) + 2 * (4 * 10) * 4
    assert training_flops(SHAPE, work) == 3 * forward
    frozen = 2 * 2 * (ATTENTION + MLP) * 7 + 2 * (4 * 10) * 4  # products that need no gradient of the weights
    assert training_flops(SHAPE, work, has_adapters=True) == 3 * forward - frozen


def test_mfu_is_the_share_of_the_peak_of_all_devices(grpo: Plan) -> None:
    small = replace(grpo, shapes=(("actor", SHAPE),))
    ((name, cut),) = small.cuts
    small = replace(small, cuts=((name, replace(cut, epochs=2)),))
    work = Work(0, 4, 20, 14, 8, 2 * (36 + 16))
    flops = train_node_flops(small, "actor_train", [6, 4], num_computed=14, num_learned=4)
    assert flops == training_flops(SHAPE, work)
    results = [result(0, 0.5, computed_tokens=14, num_tokens=4), result(1, 0.25)]
    values = DeviceUse(small).batch_node("actor_train", results, [6, 4])
    peak = 2 * peak_flops(small.hardware, "fp32")
    assert values == {
        "seconds/actor_train": 0.5,
        "actor_train/mfu": pytest.approx(flops / (0.5 * peak)),
    }
    unknown = DeviceUse(replace(small, shapes=())).batch_node("actor_train", results, [6, 4])
    assert unknown == {"seconds/actor_train": 0.5}
    skipped = DeviceUse(small).batch_node("actor_train", [result(0, 0.5)], [6, 4])
    assert skipped == {"seconds/actor_train": 0.5}


def test_the_peak_of_a_gpu_is_its_data_sheet_and_of_a_cpu_what_products_reach(grpo: Plan) -> None:
    hardware = grpo.hardware
    share = hardware.calibration.matmul_rate("fp32").share
    assert peak_flops(hardware, "fp32") == hardware.device.tflops["fp32"] * 1e12 * share
    gpu = plan(ROOT / "recipes/grpo.py", ["cluster=h100-1x2"]).hardware
    assert peak_flops(gpu, "bf16") == gpu.device.tflops["bf16"] * 1e12
