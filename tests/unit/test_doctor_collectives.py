"""Collectives that `hflow doctor --gpus N` tries in the groups that plans use."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Sequence
from dataclasses import replace
from unittest import mock

import pytest
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from hflow.base.errors import RunError
from hflow.doctor import rank_groups
from hflow.doctor.collectives import check_collectives, group_finding, memory_finding
from hflow.doctor.rank_groups import (
    OPERATIONS,
    GroupTimes,
    OperationTime,
    RuntimeMemory,
    axis_layouts,
    replicate_layouts,
)
from hflow.planner.forecast.cost.collectives import axis_lines
from hflow.planner.plan.hardware import GIB
from hflow.shapes.layout import Layout
from hflow.workers.process_groups import collective_counts, leave_process_groups

KINDS = ("replica", "data", "tensor", "pipe", "context", "expert")


def times(**changes: object) -> GroupTimes:
    """Groups whose links are as fast as planned, and one operation that differs."""
    expected = OperationTime("send", True, 1e9, 0.1, 0.1)
    operations = [replace(expected, name=name) for name in OPERATIONS]
    operations[1] = replace(operations[1], **changes)  # type: ignore[arg-type]
    return GroupTimes(("tensor", "context"), ((0, 1), (2, 3)), tuple(operations))


@pytest.mark.long
def test_each_operation_gives_the_known_answers_in_each_kind_of_group() -> None:
    pytest.importorskip("megatron")
    measured = rank_groups.measure_groups("cpu", 2)
    assert measured.memory is None
    (found,) = measured.times
    assert (found.kinds, found.ranks) == (KINDS, ((0, 1),))
    assert [operation.name for operation in found.operations] == list(OPERATIONS)
    assert all(operation.is_right and operation.seconds > 0 for operation in found.operations)
    assert all(operation.expected_gb_per_s for operation in found.operations)


def measure_and_count(rank: int, num: int, kind: str, address: str, names: Sequence[str], file: str) -> None:
    """Measure as one rank does, and fail if collectives went through the group of the world."""

    def leave() -> None:
        world = dist.distributed_c10d._world
        counts = collective_counts()
        assert counts.pop(world.pg_names[world.default_pg]) == 0
        assert any(counts.values())
        leave_process_groups()

    with mock.patch.object(rank_groups, "leave_process_groups", leave):
        rank_groups._measure_rank(rank, num, kind, address, names, file)


@pytest.mark.long
def test_ranks_join_no_communicator_that_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_groups, "_measure_rank", measure_and_count)
    assert len(rank_groups.measure_groups("cpu", 2).times) == 1


@pytest.mark.long
def test_groups_of_an_axis_are_those_that_the_planner_counts_with() -> None:
    found = {groups.ranks: groups for groups in rank_groups.measure_groups("cpu", 4).times}
    assert all(operation.is_right for groups in found.values() for operation in groups.operations)
    for size in (2, 4):
        for axis, layout in axis_layouts(4, size).items():
            lines = axis_lines(layout, "train", range(4), axis)  # type: ignore[arg-type]
            assert axis in found[tuple(sorted(tuple(line) for line in lines))].kinds
    assert "shard" in found[(0, 1), (2, 3)].kinds
    assert "replicate" in found[(0, 2), (1, 3)].kinds


def test_layouts_with_a_replicate_axis_shard_over_two_ranks_or_more() -> None:
    assert replicate_layouts(8) == [Layout.parse("d8r2"), Layout.parse("d8r4")]
    assert not replicate_layouts(2)


def test_wrong_results_are_an_error_and_slow_links_a_warning() -> None:
    right = group_finding(times())
    assert right.ok
    assert "tensor, context (0-1 2-3): right; GB/s of a link and planned: all-reduce 10 of 10" in right.detail
    wrong = group_finding(times(is_right=False))
    assert (wrong.ok, wrong.required) == (False, True)
    assert "all-gather gives wrong results" in wrong.detail
    assert group_finding(times(seconds=0.19)).ok
    slow = group_finding(times(seconds=0.21))
    assert (slow.ok, slow.required) == (False, False)
    assert slow.detail.endswith("less than 50% of the planned: all-gather")
    unknown = group_finding(times(seconds=10.0, expected_seconds=None))
    assert unknown.ok
    assert "all-gather 0.1 of unknown" in unknown.detail


def test_more_memory_than_planned_is_a_warning() -> None:
    planned = memory_finding(RuntimeMemory(6, GIB, 3 * GIB // 2))
    assert planned.ok
    assert planned.detail == "CUDA and 6 communicators take 1.00 GiB of a GPU, planned 1.50"
    more = memory_finding(RuntimeMemory(6, 2 * GIB, 3 * GIB // 2))
    assert (more.ok, more.required) == (False, False)
    assert memory_finding(RuntimeMemory(6, GIB, None)).ok


def test_the_network_that_nccl_chose_is_in_its_words() -> None:
    log = """gpu-1:71:71 [0] NCCL INFO Bootstrap: Using eth0:10.0.0.1<0>
gpu-1:71:71 [0] NCCL INFO cudaDriverVersion 13000
gpu-1:71:90 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB eth0:10.0.0.1<0>
gpu-1:71:90 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB eth0:10.0.0.1<0>
"""
    found = rank_groups.network_in(log)
    assert found == (
        "Bootstrap: Using eth0:10.0.0.1<0>; "
        "NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB eth0:10.0.0.1<0>"
    )
    assert rank_groups.network_in("gpu-1:71:71 [0] NCCL INFO Bootstrap : Using lo:127.0.0.1<0>") == (
        "Bootstrap : Using lo:127.0.0.1<0>"
    )
    assert rank_groups.network_in("") == ""


def test_one_gpu_has_no_collectives() -> None:
    (found,) = check_collectives(1)
    assert (found.ok, found.required) == (False, False)


def end_at_once(rank: int) -> None:
    os._exit(3)


def test_a_process_that_ends_is_one_line() -> None:
    context = spawn(end_at_once, nprocs=1, join=False)
    with pytest.raises(RunError, match="a process failed: process 0 terminated with exit code 3"):
        rank_groups._wait(context.join, 60.0, context.processes)


def test_processes_that_hang_are_killed() -> None:
    event = multiprocessing.get_context("fork").Event()
    process = multiprocessing.get_context("fork").Process(target=event.wait)
    process.start()
    with pytest.raises(RunError, match="collectives of 1 processes did not end in 0 s"):
        rank_groups._wait(lambda seconds: False, 0.0, [process])
    process.join()
    assert process.exitcode == -9
