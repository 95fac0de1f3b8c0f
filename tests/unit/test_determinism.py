"""`deterministic=true`: what it sets in the processes of workers, and what it refuses."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import plan_graphs as graphs
import pytest
import torch
import worker_kit as kit
from model_configs import model_config
from runs import TINY, run

from hflow.algo import second_moment_mask
from hflow.base.errors import ConfigError, HflowError, PlanError
from hflow.base.shipped import find_recipe
from hflow.data_plane.group_placement import GroupPlacer
from hflow.launch.planning.compile import compile_plan_file, compile_recipe, plan_file_text
from hflow.launch.running.preflight import check_determinism
from hflow.models import attention_kernels
from hflow.planner.compile import compile_plan
from hflow.planner.diff import diff_plans
from hflow.planner.models.choices import CUDA_VARIABLES, determinism_line
from hflow.planner.plan.rows import Plan
from hflow.planner.plan.serialise import to_json
from hflow.types import Sequences
from hflow.types.kernels import AttentionKernel
from hflow.workers.inproc import InprocWorkers
from hflow.workers.process_setup import device_environment
from hflow.workers.torch_determinism import use_deterministic_algorithms

RECIPE = """
import torch
from hflow import Dataset, Model, Output, PerToken, Recipe, Text, nodes, train, use

data = Dataset("train", prompt=Text, answer=Text)
actor = Model("actor", trainable=True)


@train(actor, on="sft_view", reduce="token-mean")
def learn(out: Output) -> PerToken:
    PUT
    return -out.logprobs


recipe = Recipe("learned", data, [use(nodes.sft_view, actor), learn])
"""
PUT = "torch.zeros(1).put_(torch.tensor([0]), torch.ones(1))"


def plan_of(cluster: str = "h100-1x2", engine: str = "embedded", **changes: Any) -> Plan:
    models = {"actor": model_config(engine=engine)}
    request = graphs.request(cluster, models=models, **{"deterministic": True, **changes})
    return compile_plan(graphs.grpo(), request)


def about(plan: Plan) -> list[str]:
    return [warning for warning in plan.warnings if "deterministic" in warning]


def test_workers_on_gpus_get_the_variables_of_libraries_and_backends() -> None:
    assert device_environment(plan_of(), 0) == CUDA_VARIABLES
    vllm = device_environment(plan_of(engine="vllm"), 1)
    assert vllm == {**CUDA_VARIABLES, "VLLM_BATCH_INVARIANT": "1"}
    models = {"actor": model_config(layout="t2", backend="megatron"), "ref": model_config(layout="d1")}
    plan = compile_plan(graphs.grpo(), graphs.request("h100-1x4", models=models, deterministic=True))
    assert device_environment(plan, 0)["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] == "0"
    assert device_environment(plan_of("cpu-1x2"), 0) == {}
    assert device_environment(plan_of(deterministic=False), 0) == {}


def test_torch_finds_the_variables_in_a_process_of_their_own() -> None:
    script = "import os; print(os.environ['CUBLAS_WORKSPACE_CONFIG'], os.environ['NCCL_ALGO'])"
    environment = {**os.environ, **device_environment(plan_of(), 0)}
    found = subprocess.run(
        [sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE, check=True
    )
    assert found.stdout.split() == [b":4096:8", b"Ring"]


def test_variables_that_undo_it_are_refused() -> None:
    overrides = ["deterministic=true", "cluster=h100-1x2"]
    check_determinism(compile_recipe(find_recipe("sft"), [*overrides, "env.NCCL_ALGO=Ring"]))
    with pytest.raises(
        ConfigError, match=r"env.NCCL_ALGO is Tree, but deterministic=true needs Ring; remove"
    ):
        check_determinism(compile_recipe(find_recipe("sft"), [*overrides, "env.NCCL_ALGO=Tree"]))


@pytest.mark.parametrize(("key", "value"), [("max_staleness", 0.5), ("sync_every", 2)])
def test_batches_that_depend_on_timing_are_refused(key: str, value: float) -> None:
    with pytest.raises(PlanError, match=rf"schedule.{key}={value:g} timing decides .* set schedule.{key}="):
        plan_of(**{key: value})


def test_one_process_on_a_gpu_is_refused() -> None:
    (reason,) = plan_of("h100-1x1", settings={"workers": "inproc"}).unrunnable
    assert "before a process uses CUDA" in reason
    assert not plan_of("cpu-1x1", settings={"workers": "inproc"}).unrunnable


@pytest.mark.parametrize(
    ("cluster", "engine", "instead"),
    [
        ("h100-1x2", "embedded", "vllm"),
        ("cpu-1x2", "vllm", "embedded"),
        ("h100-1x2", "vllm", None),
        ("cpu-1x2", "embedded", None),
    ],
)
def test_an_engine_whose_results_depend_on_its_batches_is_named(
    cluster: str, engine: str, instead: str | None
) -> None:
    plan = plan_of(cluster, engine)
    if instead is None:
        assert not about(plan)
        assert "except" not in determinism_line(plan)
    else:
        (warning,) = about(plan)
        assert warning.startswith("deterministic=true does not cover actor@gen: ")
        assert warning.endswith(f"Set models.actor.gen.engine={instead}.")
        assert "equal bit for bit, except by actor@gen" in determinism_line(plan)


def test_the_plan_says_how_and_the_digest_contains_it() -> None:
    assert "NCCL_ALGO=Ring" in determinism_line(plan_of())
    assert "for any number of threads" in determinism_line(plan_of("cpu-1x2"))
    other = plan_of(deterministic=False)
    assert determinism_line(other) == ""
    assert plan_of().digest != other.digest
    (change,) = [c for c in diff_plans(to_json(other), to_json(plan_of())).changes if c.topic == "setting"]
    assert (change.subject, change.before, change.after) == ("deterministic", "false", "true")


def test_a_plan_file_keeps_it(tmp_path: Path) -> None:
    for overrides in ([], ["deterministic=true"]):
        compiled = compile_recipe(find_recipe("sft"), overrides)
        file = tmp_path / "plan.json"
        file.write_text(plan_file_text(compiled))
        assert compile_plan_file(file).plan.deterministic == bool(overrides)


def test_a_groups_number_decides_on_its_engine() -> None:
    placer = GroupPlacer(plan_of("cpu-1x2"))
    for group in range(4):
        assert placer.place("actor_gen", group, 2) == group % 2
        if group % 2 == 0:  # the first engine has nothing to do, but still gets only its own groups
            placer.finished("actor_gen", group)
            placer.finished("actor_gen", group)
    assert placer.rebalance_moves("actor_gen", [3, 1]) == {}


def test_a_worker_lets_torch_refuse_what_it_cannot_repeat_until_it_is_closed() -> None:
    setup = kit.setup_of("workers=inproc", "cluster=cpu-1x2", "deterministic=true")

    async def state(workers: InprocWorkers) -> tuple[bool, bool]:
        with pytest.raises(RuntimeError, match="put_ does not have a deterministic implementation"):
            eval(PUT)
        return torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.deterministic

    assert not torch.are_deterministic_algorithms_enabled()
    assert kit.with_workers(setup, state) == (True, True)
    assert not torch.are_deterministic_algorithms_enabled()
    assert not torch.backends.cudnn.deterministic


MODES = """
import os, torch
from hflow.base.errors import RunError
from hflow.workers.torch_determinism import use_deterministic_algorithms

def said(variables):
    if variables is None:  # too late
        torch.ones(8, 8) @ torch.ones(8, 8)
    os.environ |= variables or {}
    try:
        use_deterministic_algorithms()
        print(os.environ["MKL_CBWR"], flush=True)
    except RunError as error:
        print(error, flush=True)

for variables in ({}, {"MKL_CBWR": "COMPATIBLE"}, None, {"MKL_CBWR": "OFF"}):
    if os.fork() == 0:
        said(variables)
        os._exit(0)
    os.wait()
"""


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="torch has no MKL here")
def test_products_of_matrices_have_a_fixed_order_or_the_run_is_refused() -> None:
    rest = {name: value for name, value in os.environ.items() if name not in ("MKL_CBWR", "OMP_NUM_THREADS")}
    command = [sys.executable, "-c", MODES]
    done = subprocess.run(command, env=rest, capture_output=True, text=True, check=True)
    unset, compatible, late, off = done.stdout.splitlines()
    assert unset in ("AVX2,STRICT", "COMPATIBLE")
    assert compatible == "COMPATIBLE"
    assert "Start the run in a process of its own" in late
    assert "before a process multiplies matrices" in off


TRAINS = """
import hashlib, os, random
import torch, torch_kit as kit
from hflow.workers.torch_determinism import use_deterministic_algorithms

WIDE = kit.ARCHITECTURE | {"hidden_size": 256, "intermediate_size": 500}

def train():
    torch.set_num_threads(4)
    use_deterministic_algorithms()
    moved = [bytearray(random.randrange(1, 4096)) for _ in range(random.randrange(2000))]  # other addresses
    backend = kit.model(architecture=WIDE)
    for step in range(3):
        backend.train(kit.CALLS["token-mean"], kit.whole(kit.make_batch(kit.LENGTHS)), step)
    digest = hashlib.sha256()
    for weight in kit.weights(backend).values():
        digest.update(weight.numpy().tobytes())
    print(digest.hexdigest(), flush=True)

for _ in range(4):
    if (child := os.fork()) == 0:
        train()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.long
def test_runs_of_several_threads_are_equal() -> None:
    """Elsewhere, tests have one thread, whose results are equal by themselves."""
    rest = {name: value for name, value in os.environ.items() if name not in ("MKL_CBWR", "OMP_NUM_THREADS")}
    paths = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1] / "kits"), *sys.path])}
    command = [sys.executable, "-c", TRAINS]
    done = subprocess.run(command, env=rest | paths, capture_output=True, text=True, check=True)
    digests = done.stdout.split()
    assert len(digests) == 4
    processor = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    assert len(set(digests)) == 1, f"in order: {[one[:6] for one in digests]} on\n{processor}"


def test_a_body_that_cannot_be_repeated_ends_the_run_with_its_name(tmp_path: Path) -> None:
    recipe = tmp_path / "learned.py"
    recipe.write_text(RECIPE.replace("PUT", PUT))
    small = [one for one in TINY if "actor_gen" not in one]
    overrides = [*small, "workers=inproc", "cluster=cpu-1x1", "steps=1", "batch=2"]
    assert run(recipe, tmp_path / "allowed", *overrides).steps == 1
    with pytest.raises(HflowError, match=r"learn.*put_ does not have a deterministic implementation"):
        run(recipe, tmp_path / "refused", *overrides, "deterministic=true")


def test_flash_attn_adds_in_a_fixed_order_when_torch_must(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def kernel(q: torch.Tensor, *_: Any, deterministic: bool, **__: Any) -> torch.Tensor:
        asked.append(deterministic)
        return q

    monkeypatch.setattr(attention_kernels, "_flash_kernel", lambda _: kernel)
    x, cumulative = torch.zeros(2, 1, 8), torch.tensor([0, 2])

    def attend() -> None:
        attention_kernels.varlen_attention(
            AttentionKernel.FLASH_ATTN, x, x, x, (cumulative, cumulative), (2, 2), None
        )

    attend()
    restore = use_deterministic_algorithms()
    attend()
    restore()
    assert asked == [False, True]


def test_the_second_moment_mask_is_the_same_where_the_host_adds() -> None:
    torch.manual_seed(0)
    prox, behav = torch.randn(40), torch.randn(40)
    seqs = Sequences.of([20, 20])
    expected = second_moment_mask(prox, behav, seqs, 0.4)
    restore = use_deterministic_algorithms()
    found = second_moment_mask(prox, behav, seqs, 0.4)
    restore()
    assert torch.equal(found, expected)
    assert 0 < int(found.sum()) < 40
