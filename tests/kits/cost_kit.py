"""Models, devices and replicas in round figures for the tests of the cost model."""

from dataclasses import replace

import plan_graphs as graphs
from model_configs import model_config
from plan_graphs import SHIPPED

from hflow.planner.forecast.cost.flops import Work
from hflow.planner.forecast.cost.generation import RolloutRequest
from hflow.planner.forecast.cost.replica_costs import ReplicaCosts
from hflow.planner.plan.calibration import (
    Calibration,
    HostTimes,
    LinkRate,
    MatmulRate,
    MemoryRate,
    TransferRates,
)
from hflow.planner.plan.hardware import Device, Hardware, Link
from hflow.planner.plan.rows import Replica
from hflow.planner.plan.traits import BACKENDS, ENGINES, traits
from hflow.shapes.layout import Layout
from hflow.shapes.model_shape import ModelShape

LLAMA_7B = ModelShape("llama", 32, 4096, 11008, 32, 32, 128, 32000, is_tied=False)
LLAMA_70B = ModelShape("llama", 80, 8192, 28672, 64, 8, 128, 32000, is_tied=False)
LLAMA_405B = ModelShape("llama", 126, 16384, 53248, 128, 8, 128, 128256, is_tied=False)
SMALL = ModelShape("llama", 4, 64, 128, 4, 2, 16, 100, is_tied=False)
"""A layer has 2 x 64 x (4 + 2) x 16 + 3 x 64 x 128 = 36,864 weights, the output matrix 6,400."""
TINY = ModelShape("qwen2", 2, 128, 512, 4, 4, 32, 32, is_tied=True, has_qkv_bias=True)
"""`configs/model/tiny-qwen2.yaml`."""

NO_LOSS = Calibration(
    name="no-loss",
    devices=("toy",),
    source="made up",
    matmul={"fp32": MatmulRate(1.0), "bf16": MatmulRate(1.0)},
    attention=1.0,
    memory=MemoryRate(1.0, 1.0),
    intra=LinkRate(1.0),
    inter=LinkRate(1.0),
    host_copy=LinkRate(1.0),
    host={name: HostTimes() for name in (*BACKENDS, *ENGINES)},
    transfers=TransferRates(5.0, 1.0, 0.0),
)
"""Programs reach the data sheet, and hosts take no time."""
TOY = Hardware(
    Device("toy", "cuda", 16.0, {"fp32": 1.0, "bf16": 2.0}, 100.0, "near", "far"),
    Link("near", 10.0, 1.0),
    Link("far", 1.0, 10.0),
    Link("host", 20.0, 0.0),
    NO_LOSS,
)
"""1e12 FLOP/s in fp32, memory of 1e11 bytes/s, links of 1e10 and 1e9 bytes/s, 1 and 10 us, and of 2e10
to the host."""
A100 = Hardware(
    Device("a100", "cuda", 80.0, {"fp32": 19.5, "bf16": 312.0}, 2039.0, "nvlink", "ib"),
    Link("nvlink", 300.0, 4.0),
    Link("ib", 25.0, 6.0),
    Link("pcie", 32.0, 5.0),
    SHIPPED,
)
H100 = Hardware(
    Device("h100", "cuda", 80.0, {"fp32": 67.0, "bf16": 989.0}, 3350.0, "nvlink", "ib"),
    Link("nvlink", 450.0, 4.0),
    Link("ib", 50.0, 6.0),
    Link("pcie", 64.0, 5.0),
    SHIPPED,
)
"""Figures of NVIDIA's data sheets, dense."""


def side(shape=SMALL, layout="d1", hardware=TOY, backend="torch", per_machine=8, host=None, **asked):
    """A replica on neighbouring devices, in the rank order of its role; on TOY its host takes no time."""
    role = "gen" if traits(backend).sharded_over_data == "nothing" else "train"
    axes = Layout.parse(layout)
    replica = Replica("m", "m", role, backend, axes, "all", tuple(range(axes.world)), (0,))
    cluster = replace(graphs.cluster_of("cpu-1x1"), num_nodes=9999, devices_per_node=per_machine)
    costs = ReplicaCosts.of(replica, shape, model_config(**asked), hardware, cluster)
    return costs if host is None else replace(costs, host=host)


def in_turns(one):
    """The costs of an engine without asynchronous scheduling; only vLLM's steps are CUDA graphs."""
    captured = None if one.traits.captured_families is None else ()
    return replace(one, traits=replace(one.traits, schedules_ahead_on=(), captured_families=captured))


def named(parts):
    """Return name -> seconds, without entries of zero."""
    return {part.name: part.seconds for part in parts if part.seconds}


def total(parts):
    return sum(part.seconds for part in parts)


def work(tokens, sequences=1.0, **changes):
    """Samples without prompts or attention."""
    return replace(Work(1.0, sequences, tokens, tokens, tokens, 0.0), **changes)


def rollout(groups, group_size=1, **changes):
    numbers = {"max_concurrent": groups * group_size, "ahead": 0, "seed": 0}
    return RolloutRequest(groups, group_size, **(numbers | changes))
