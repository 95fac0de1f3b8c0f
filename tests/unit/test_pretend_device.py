"""The cases of `pretend_device_cases.py` and of two more files, each in a process of its own.

The pretend accelerator must be added to torch before the first backward pass, and stays until the process
ends.
"""

import dataclasses
import sys
from collections import Counter
from pathlib import Path

import forked_python
import megatron_twins as twins
import memory_kit
import pretend_ranks
import pytest
import ranks
import torch
import torch_kit as kit

from hflow.planner.forecast.memory import offload
from hflow.planner.plan.forecast import MemoryCategory
from hflow.planner.plan.traits import traits
from hflow.planner.weights.sharding import padded_units
from hflow.training.fsdp import memory as torch_memory
from hflow.training.megatron.memory import model_state

ALLOWANCE = 256 << 10
"""Bytes beyond the plan: positions, rotary tables, masks and norms."""
CASES = ("pretend_device_cases.py", "colocated_memory_cases.py", "sleep_allocator_cases.py")


@pytest.mark.parametrize("cases", CASES)
def test_backends_engine_and_runs_work_on_the_pretend_accelerator(cases):
    if cases == "sleep_allocator_cases.py":
        pytest.importorskip("vllm")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        str(Path(__file__).with_name(cases)),
    ]
    done = forked_python.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-20_000:]  # also if no case was found


@pytest.mark.long
def test_fsdp_on_two_accelerators_is_one_process_on_the_cpu(tmp_path):
    """It waits for the device once for each update, and at the begin and the end of a step."""
    ranks.start(pretend_ranks.run, (str(tmp_path),), 2)
    results = torch.load(tmp_path / "results.pt", weights_only=False)
    batch = kit.make_batch(kit.LENGTHS)
    for name, changes in pretend_ranks.CASES.items():
        metrics, weights, logprobs, syncs = results[name]
        call, model = kit.CALLS[name], kit.model(tokens_per_microbatch=20, **changes)
        precision = 1e-2 if "dtype" in changes else 1e-5
        assert metrics == pytest.approx(model.train(call, kit.whole(batch), 5), abs=10 * precision)
        wanted = kit.weights(model)
        assert weights.keys() == wanted.keys()
        for key, tensor in wanted.items():
            torch.testing.assert_close(weights[key], tensor, atol=precision, rtol=0)
        inferred = model.infer(kit.LOGPROBS, [batch])[0].columns["result"].values
        assert logprobs == pytest.approx(inferred, abs=10 * precision)
        places = Counter(place.partition(":")[0] for _, place in syncs)
        num_updates = 3 * call.options.get("epochs", 1)
        assert places.pop("hflow/training/gradient_norm.py") == num_updates
        assert places.keys() <= {"hflow/training/loop/microbatches.py", "hflow/training/loop/metrics.py"}
    saved = kit.weights(kit.model(path=str(tmp_path / "mask"), architecture=None))
    for key, tensor in results["mask"][1].items():
        torch.testing.assert_close(saved[key], tensor)


@pytest.mark.long
def test_megatron_on_two_accelerators_is_one_process_on_the_cpu(tmp_path):
    """Two tensor, pipeline, expert and context ranks. Its module is imported for the accelerator.

    The bytes of optimizers are those of the plan, on the device and in pinned memory.
    """
    twins.save_checkpoint(tmp_path / "checkpoint")
    ranks.start(pretend_ranks.run_megatron, (str(tmp_path),), 2, is_fresh=True)
    for twin in pretend_ranks.TWINS:
        wanted = twins.expected(twin.node, twin.dtype, tmp_path / "checkpoint")
        for rank in range(2):
            file = tmp_path / f"{twin.name}.{rank}.pt"
            metrics, weights, held = torch.load(file, weights_only=False)
            factor = 1 if twin.dtype == "fp32" else 1_000
            for got, expected in zip(metrics, wanted.metrics, strict=True):
                same = pytest.approx(expected, rel=2e-5 * factor, abs=1e-5) if rank in twin.heads else {}
                assert twins.comparable(got) == same
            assert weights.keys() == wanted.weights.keys()
            for key, tensor in wanted.weights.items():
                torch.testing.assert_close(weights[key], tensor, atol=5e-6 * factor, rtol=1e-5 * factor)
            assert held == pytest.approx(planned_bytes(twin), rel=0.02), twin.name


def planned_bytes(twin):
    """Return the bytes of states and buffers that only the host has, and of states on the device."""
    settings = twins.NODES[twin.node][1] | twin.settings | {"offload": "none"}
    shape = memory_kit.shape_of(twins.EXPERTS if twin.node == "experts" else kit.ARCHITECTURE)
    padded = padded_units(shape.vocab, traits("megatron"), twin.tensor)  # a plan leaves padding out
    shape = dataclasses.replace(shape, head=settings.pop("head", "lm"), vocab=padded)
    rank = memory_kit.rank(shape, str(twin.layout), "megatron", on_cpu=False, **settings)
    items = offload.on_device(rank, model_state(rank), "everything").items()
    on_device = sum(size for key, size in items if key.category is MemoryCategory.OPTIMIZER)
    host = memory_kit.named(offload.in_host_memory(rank))
    of_host = [host.get(f"{name} in host memory", 0) for name in ("optimizer", "buffers of updates")]
    return *of_host, on_device


@pytest.mark.long
def test_phases_of_fsdp_fit_on_two_accelerators(tmp_path):
    """Each rank trains and infers within the bytes that the plan counts, and takes nearly as many."""
    learned = pretend_ranks.SEQUENCES * pretend_ranks.LENGTH * 3 // 4 // pretend_ranks.MICROBATCHES
    tokens = pretend_ranks.SEQUENCES * pretend_ranks.LENGTH // pretend_ranks.MICROBATCHES
    batch = memory_kit.microbatch(tokens, learned, num=pretend_ranks.MICROBATCHES)
    planned = {}
    for name, changes in pretend_ranks.MEMORY_CASES.items():
        rank = memory_kit.rank(
            memory_kit.shape_of(memory_kit.WIDE), "d2", on_cpu=False, dtype="bf16", **changes
        )
        works = torch_memory.train_step(rank, batch), torch_memory.infer_step(rank, batch)
        planned[name] = tuple(torch_memory.model_state(rank).total() + work.total() for work in works)
    limits = {name: tuple(num_bytes + ALLOWANCE for num_bytes in phases) for name, phases in planned.items()}
    ranks.start(pretend_ranks.run_memory, (str(tmp_path), limits), 2)
    for of_rank in (torch.load(tmp_path / f"{rank}.pt") for rank in range(2)):
        for name, phases in of_rank.items():
            shares = [found / wanted for found, wanted in zip(phases, planned[name], strict=True)]
            assert min(shares) > 0.9, (name, shares)
