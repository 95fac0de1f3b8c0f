"""What `hflow doctor --gpus N` checks before it starts anything, and the runs that it tries."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hflow.base.machine_gpus import parse_gpus
from hflow.base.shipped import find_recipe
from hflow.doctor.attention_check import CASES
from hflow.doctor.gpus import (
    check_attention,
    check_gpus,
    check_listed_gpus,
    check_logprobs,
    check_shared_memory,
)
from hflow.doctor.trial_runs import REAL_SIZES, command, trial_device, trial_runs, try_runs
from hflow.launch.planning.compile import compile_recipe
from hflow.launch.planning.request import known_devices
from hflow.models.attention_kernels import padded_attention
from hflow.models.packed_attention import attend
from hflow.planner.plan.hardware import GIB
from hflow.training.loop import logprobs

DEVICES = known_devices(find_recipe("grpo"))
H100 = "NVIDIA H100 80GB HBM3, 570.86.15, 81559, 4, Default"


def failures(table: str, wanted: int, first: int = 0) -> list[str]:
    listed = "\n".join(f"{i}, GPU-{i}f31, {gpu}" for i, gpu in enumerate(table.splitlines(), first))
    return [f"{f.detail}; {f.fix}" for f in check_listed_gpus(parse_gpus(listed), wanted) if not f.ok]


@pytest.mark.parametrize(
    ("table", "wanted", "line"),
    [
        ("", 8, "0 of 8 GPUs; install NVIDIA's driver"),
        (f"{H100}\n" * 4, 8, "4 of 8 GPUs; hflow doctor --gpus 4"),
        (
            f"{H100}\n{H100}\nNVIDIA L4, 570.86.15, 23034, 1, [N/A]",
            3,
            "22.5 GiB: 2; set CUDA_VISIBLE_DEVICES",
        ),
        (H100.replace(", 4,", ", 40000,"), 1, "39.1 of 79.6 GiB in use; end the processes"),
        (
            f"{H100}\n" + H100.replace("Default", "Exclusive_Process"),
            2,
            "together; nvidia-smi -i 1 -c DEFAULT",
        ),
    ],
)
def test_gpus_that_a_run_cannot_use_are_named(table, wanted, line):
    (found,) = failures(table, wanted)
    assert line in found


def test_equal_free_gpus_are_accepted():
    assert not failures(f"{H100}\n" * 8, 8)
    assert not failures(f"{H100}\nNVIDIA L4, 570.86.15, 23034, 1, [N/A]", 1)  # the second is not used


def test_gpus_are_those_that_the_driver_counts(monkeypatch):
    """CUDA_VISIBLE_DEVICES hides the first four."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    (found,) = failures(f"{H100}\n" + H100.replace("Default", "Prohibited"), 2, first=4)
    assert "nvidia-smi -i 5 -c DEFAULT" in found
    (found,) = failures(f"{H100}\n" * 2, 8, first=4)
    assert found.startswith("2 of 8 GPUs with CUDA_VISIBLE_DEVICES=4,5; hflow doctor --gpus 2, or unset")


def test_small_shared_memory_names_the_option():
    assert "--shm-size" in check_shared_memory(64 << 20).fix
    assert check_shared_memory(16 * GIB).ok


def test_a_machine_without_gpus_gets_a_line_for_each_check():
    found = {finding.name: finding for finding in check_gpus([], 8)}
    assert found.keys() >= {"torch", "count", "/dev/shm", "memory"}
    assert not found["count"].ok
    assert all(finding.fix for finding in found.values() if not finding.ok)


def test_a_run_that_cannot_be_tried_says_why(monkeypatch):
    monkeypatch.setattr("hflow.doctor.trial_runs._try", lambda *_: pytest.fail("it was started"))
    monkeypatch.setattr(
        "hflow.doctor.trial_runs.trial_runs", lambda: [run for run in trial_runs() if not run.on_cpu]
    )
    found = try_runs(0, None, None)
    assert {(finding.ok, finding.required) for finding in found} == {(False, False)}
    assert [finding.detail for finding in found if "not checked, it needs a GPU" not in finding.detail] == []


def test_without_ray_runs_use_one_process(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setattr("hflow.doctor.trial_runs._try", lambda run, *_: run.name)
    tried = {
        found if isinstance(found, str) else found.detail for found in try_runs(1, 79.6, DEVICES["h100"])
    }
    assert tried >= {"one device", "equal runs", *REAL_SIZES}
    reasons = [
        finding.detail for finding in try_runs(2, 20.0, DEVICES["h100"]) if not isinstance(finding, str)
    ]
    assert any("several processes, and ray is not installed" in reason for reason in reasons)
    assert [reason for reason in reasons if "it needs a GPU with 72 GiB" in reason]
    arguments = command(EQUAL, 0, None, None, "out")
    assert {"workers=inproc", "cluster=cpu-1x1", "models.actor.layout=d1"} <= set(arguments)


def test_runs_are_planned_for_the_gpus_that_there_are(monkeypatch):
    monkeypatch.setattr("hflow.doctor.trial_runs._try", lambda run, *_: run.name)
    monkeypatch.setattr("hflow.doctor.trial_runs.find_spec", lambda name: True)
    of_fp8 = {run.name for run in trial_runs() if run.precision == "fp8"}
    assert len(of_fp8) == 2
    assert of_fp8 < set(try_runs(8, 79.6, DEVICES["h100"]))
    others = [found for found in try_runs(8, 80.0, DEVICES["a100-80g"]) if not isinstance(found, str)]
    assert {(found.name, found.ok, found.required) for found in others} == {
        (name, False, False) for name in of_fp8
    }
    assert all("it needs a GPU that computes in fp8" in found.detail for found in others)
    assert all("no figures of a GPU" in found.detail for found in try_runs(8, 31.7, None))
    arguments = command(EQUAL, 8, 80.0, DEVICES["a100-80g"], "out")
    assert {"cluster=a100-80g-1x8", "device_memory_gib=80.0"} <= set(arguments)


@pytest.mark.parametrize(
    ("product", "capability", "device"),
    [
        ("NVIDIA H200", (9, 0), "h200"),
        ("NVIDIA GH200 480GB", (9, 0), "h100"),
        ("NVIDIA A10G", (8, 6), "a10"),
        ("Tesla V100-SXM2-32GB", (7, 0), None),
    ],
)
def test_figures_for_a_gpu_that_has_none(monkeypatch, product, capability, device):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda index: product)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda index: capability)
    assert trial_device() == DEVICES.get(device)


def test_attention_of_this_machine_is_right():
    found = list(check_attention("cpu"))
    assert [finding.name for finding in found] == [
        f"attention {dtype}{case}" for dtype in ("fp32", "bf16") for case in CASES
    ]
    assert all(finding.ok for finding in found), found


def test_log_probs_of_this_machine_are_right(monkeypatch):
    found = list(check_logprobs("cpu"))
    assert [finding.name for finding in found] == ["log-probs fp32", "log-probs bf16"]
    assert all(finding.ok for finding in found), found
    right = logprobs.turn_into_gradients
    monkeypatch.setattr(logprobs, "turn_into_gradients", lambda x, *args: right(x, *args) or x.mul_(1.05))
    assert not any(finding.ok for finding in check_logprobs("cpu"))


def test_a_kernel_with_a_wrong_gradient_is_found(monkeypatch):
    class WrongGradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return 1.05 * gradient

    monkeypatch.setattr(
        "hflow.doctor.attention_check.attend", lambda *inputs: WrongGradient.apply(attend(*inputs))
    )
    for finding in check_attention("cpu"):
        assert not finding.ok
        assert re.search(
            r"torch sdpa: output and gradient differ from float64 by .* and 0\.0[4-6]", finding.detail
        )


def test_a_mask_from_the_wrong_end_of_the_keys_is_found(monkeypatch):
    def from_the_first(q, k, v, scaling, reach, mask=None):
        later = torch.ones(q.shape[2], k.shape[2]).triu(1).bool()
        return padded_attention(q, k, v, scaling, torch.zeros(later.shape).masked_fill(later, -torch.inf))

    monkeypatch.setattr("hflow.models.packed_attention.reaching_attention", from_the_first)
    assert [finding.ok for finding in check_attention("cpu")][:3] == [True, False, False]


def test_a_kernel_that_does_not_run_is_one_line(monkeypatch):
    def fail(*_):
        raise RuntimeError("CUDA error: no kernel image\nmore lines")

    monkeypatch.setattr("hflow.doctor.attention_check.attend", fail)
    assert [finding.detail for finding in check_attention("cpu")] == ["CUDA error: no kernel image"] * 10


def write_run(out, *spans, **metrics):
    run = out / "grpo" / "latest"
    run.mkdir(parents=True)
    row = {"actor_train/engine_gap": 0.01} | {f"actor_train/{name}": value for name, value in metrics.items()}
    (run / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    events = [
        {"ph": "X", "name": f"{what} actor@gen", "ts": place, "dur": seconds * 1e6, "args": args}
        for place, (what, seconds, args) in enumerate(spans)
    ]
    (run / "trace.json").write_text(json.dumps({"traceEvents": [{"ph": "M"}, *events]}))


@pytest.mark.parametrize(
    ("freed_gib", "is_right", "end"),
    [
        (70.0, True, "the engine frees 70.0 GiB in 0.5 s and takes it again in 1.2 s"),
        (
            3.0,
            False,
            "the engine frees 3.0 GiB in 0.5 s and takes it again in 1.2 s, but its cache has 68.0 GiB",
        ),
    ],
)
def test_an_engine_that_fills_a_gpu_must_free_it(monkeypatch, freed_gib, is_right, end):
    full = next(run for run in trial_runs() if run.fills_memory)

    def run(arguments, cwd, **_):
        assert "models.actor.gen.cache_gib=68.0" in arguments
        freed = {"freed_bytes": freed_gib * GIB}
        write_run(
            Path(cwd),
            ("sleep", 2.0, {"freed_bytes": 5 * GIB}),
            ("allocate weights", 0.2, {"freed_bytes": -GIB}),
            ("weights", 3.0, {}),
            ("allocate cache", 1.0, {"freed_bytes": -freed_gib * GIB}),
            ("sleep", 0.5, freed),
        )
        return subprocess.CompletedProcess(arguments, 0, "", "")

    monkeypatch.setattr("hflow.doctor.trial_runs.subprocess.run", run)
    monkeypatch.setattr("hflow.doctor.trial_runs.trial_runs", lambda: [full])
    monkeypatch.setattr("hflow.doctor.trial_runs._obstacle", lambda *_: None)
    (found,) = try_runs(1, 80.0, DEVICES["h100"])
    assert (found.ok, found.detail.endswith(end)) == (is_right, True), found.detail


@pytest.mark.parametrize(
    ("metrics", "is_right", "share"),
    [({"rerouted": 0.01}, True, "1.0%"), ({"rerouted": 0.8}, False, "80.0%"), ({}, False, "inf%")],
    ids=["equal", "others", "unmeasured"],
)
def test_an_engine_must_record_the_trainers_experts(monkeypatch, metrics, is_right, share):
    replay = next(run for run in trial_runs() if run.replays_experts)

    def run(arguments, cwd, **_):
        assert "nodes.actor_gen.routing_replay=true" in arguments
        write_run(Path(cwd), **metrics)
        return subprocess.CompletedProcess(arguments, 0, "", "")

    monkeypatch.setattr("hflow.doctor.trial_runs.subprocess.run", run)
    monkeypatch.setattr("hflow.doctor.trial_runs.trial_runs", lambda: [replay])
    monkeypatch.setattr("hflow.doctor.trial_runs._obstacle", lambda *_: None)
    (found,) = try_runs(1, 80.0, DEVICES["h100"])
    end = f"the trainer would choose others for {share} of tokens and layers"
    assert (found.ok, found.detail.endswith(end)) == (is_right, True), found.detail


EQUAL = next(run for run in trial_runs() if run.is_repeated)


def try_alone(monkeypatch, run):
    monkeypatch.setattr("hflow.doctor.trial_runs.trial_runs", lambda: [run])
    (found,) = try_runs(0, None, None)
    return found


@pytest.mark.long
def test_two_runs_that_must_be_equal_are(monkeypatch):
    quick = replace(EQUAL, overrides=("deterministic=true", "workers=inproc"), num_devices=1)
    found = try_alone(monkeypatch, quick)
    assert found.ok, found.detail
    assert found.detail.endswith("two runs end with the same weights and optimizer")


@pytest.mark.parametrize(
    ("second", "detail"),
    [
        ({"model": b"1", "shard": b"3"}, "differ in shard.safetensors, and in 1 of 2 files with tensors"),
        ({}, "a run saved no weights"),
    ],
)
def test_two_runs_that_differ_are_found(monkeypatch, second, detail):
    contents = [{"model": b"1", "shard": b"2"}, second]

    def run(arguments, cwd, env, **_):
        assert "deterministic=true" in arguments
        assert env["PYTHONPATH"].split(os.pathsep)[0] == str(Path(__file__).parents[2])  # not installed
        directory = Path(cwd) / "sft" / "latest" / "checkpoints" / "latest" / "actor"
        directory.mkdir(parents=True)
        for name, content in contents.pop(0).items():
            (directory / f"{name}.safetensors").write_bytes(content)
        return subprocess.CompletedProcess(arguments, 0, "", "")

    monkeypatch.setattr("hflow.doctor.trial_runs.subprocess.run", run)
    found = try_alone(monkeypatch, EQUAL)
    assert not found.ok
    assert found.detail.endswith(detail), found.detail


@pytest.mark.long
@pytest.mark.parametrize("model", REAL_SIZES)
def test_a_model_of_real_size_starts_as_a_tiny_one_does(monkeypatch, model):
    """Random weights and an alphabet: what is not tried here is the size."""
    run = next(run for run in trial_runs() if run.name == model)
    overrides = [text.replace(f"={model}", "=tiny-qwen2") for text in run.overrides]
    assert overrides != list(run.overrides)
    found = try_alone(monkeypatch, replace(run, overrides=(*overrides, "workers=inproc"), on_cpu=True))
    assert found.ok, found.detail


@pytest.mark.long
@pytest.mark.parametrize("num_gpus", [0, 1, 2, 8])
@pytest.mark.parametrize("run", trial_runs(), ids=lambda run: run.name)
def test_the_settings_of_every_run_make_a_plan(run, num_gpus, tmp_path, monkeypatch):
    if num_gpus == 0 and not run.on_cpu:
        pytest.skip("it is not tried on CPUs")
    if 0 < num_gpus < run.min_devices:
        pytest.skip("it is not tried on so few GPUs")
    monkeypatch.setattr("hflow.launch.planning.request.engine_problems", lambda device: {})
    arguments = command(run, num_gpus, 79.6, DEVICES["h100"], str(tmp_path))
    overrides = arguments[arguments.index("--plain") + 1 :]
    plan = compile_recipe(find_recipe(run.recipe), overrides).plan
    assert not plan.unrunnable
    assert plan.cluster.num_devices == (run.num_devices or num_gpus or 2)
