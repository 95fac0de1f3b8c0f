"""Seconds of whole plans: what must be monotonic, which nodes have them, and published measurements."""

from dataclasses import replace
from pathlib import Path

import plan_graphs as graphs
import pytest
import yaml
from cost_kit import A100, H100, LLAMA_7B, LLAMA_405B, SMALL, TINY, TOY, in_turns, rollout, side, total
from hypothesis import given
from hypothesis import strategies as st
from model_configs import model_config

from hflow.config.schema import WorkloadConfig
from hflow.graph.ir import Level
from hflow.launch.planning.compile import compile_recipe
from hflow.launch.planning.request import device_calibration, known_devices, known_links
from hflow.planner.compile import compile_plan
from hflow.planner.forecast.cost import node_times
from hflow.planner.forecast.cost.flops import work_of
from hflow.planner.forecast.cost.generation import generate
from hflow.planner.forecast.cost.training import forward, train
from hflow.planner.forecast.traffic import estimate_traffic
from hflow.planner.plan.forecast import MemoryCategory
from hflow.planner.plan.hardware import Hardware, Link
from hflow.planner.plan.request import stream_workloads
from hflow.planner.plan.rows import Plan
from hflow.planner.plan.serialise import to_plain
from hflow.planner.plan.workload import Workload
from hflow.report.text.plan.assumptions import assumption_lines
from hflow.shapes.model_shape import ModelShape

# ------------------------------------------------------------------------------------- monotonic
devices = st.builds(
    lambda tflops, memory: replace(
        TOY.device, tflops={"fp32": tflops, "bf16": tflops}, memory_gb_per_s=memory
    ),
    st.floats(0.1, 1000),
    st.floats(10, 10_000),
)
layouts = st.sampled_from(["d1", "d2", "d4t2", "d2p2", "d2t2p2"])
backends = st.sampled_from(["torch", "megatron", "embedded", "vllm"])
some_workloads = st.builds(
    Workload, st.integers(1, 500), st.floats(2, 400), st.sampled_from([0.0, 0.3, 1.0]), st.integers(2, 900)
)


def all_seconds(one, workload, groups=32, ahead=0):
    """Generation, a forward pass and training of the same batch."""
    lengths = [workload.prompt + round(min(workload.response_mean, workload.max_response))] * groups * 4
    share = work_of(lengths, workload.prompt, 4).share(1 / one.layout.data)
    return [
        total(generate(one, workload, rollout(groups, 4, ahead=ahead))),
        total(forward(one, share)),
        total(train(one, share, 2)),
    ]


@given(
    devices,
    layouts,
    backends,
    some_workloads,
    st.floats(1, 10),
    st.sampled_from(["tflops", "memory", "links"]),
)
def test_faster_hardware_is_never_slower(device, layout, backend, workload, factor, what):
    slow = replace(TOY, device=device)
    if what == "links":
        fast = replace(slow, intra=replace(TOY.intra, gb_per_s=10 * factor))
    elif what == "memory":
        fast = replace(slow, device=replace(device, memory_gb_per_s=device.memory_gb_per_s * factor))
    else:
        flops = {name: figure * factor for name, figure in device.tflops.items()}
        fast = replace(slow, device=replace(device, tflops=flops))
    seconds = [all_seconds(side(LLAMA_7B, layout, hardware, backend), workload) for hardware in (slow, fast)]
    assert all(after <= before * (1 + 1e-9) for before, after in zip(*seconds, strict=True))


@given(st.sampled_from(["d1", "d2", "d4t2"]), backends, some_workloads, st.floats(1, 3), st.integers(0, 1))
def test_longer_responses_are_never_faster(layout, backend, workload, factor, ahead):
    # Without stages: these may gain from longer responses, as more micro-batches have a smaller bubble.
    one = side(LLAMA_7B, layout, backend=backend)
    longer = replace(workload, response_mean=workload.response_mean * factor)
    seconds = [all_seconds(one, lengths, ahead=ahead) for lengths in (workload, longer)]
    assert all(after >= before * (1 - 1e-9) for before, after in zip(*seconds, strict=True))


@given(backends, some_workloads, st.integers(0, 2), st.integers(0, 1))
def test_more_devices_are_never_slower_where_links_cost_nothing(backend, workload, power, ahead):
    free = Link("free", 1e12, 0.0)
    hardware = replace(TOY, intra=free, inter=free)
    seconds = [
        all_seconds(side(LLAMA_7B, f"d{2 ** (power + i)}", hardware, backend), workload, ahead=ahead)
        for i in (0, 1)
    ]
    assert all(after <= before * (1 + 1e-6) for before, after in zip(*seconds, strict=True))


# ------------------------------------------------------------------------------------ whole plans
def timed(graph, models=None, cluster="cpu-1x2", hardware=TOY, configs=None, **changes):
    shapes = {model.name: SMALL for model in graph.models} if models is None else models
    shapes = {name: shape for name, shape in shapes.items() if shape is not None}
    request = graphs.request(cluster, models=configs or {}, shapes=shapes, hardware=hardware, **changes)
    plan = compile_plan(graph, request)
    lengths = dict(stream_workloads(plan, request))
    traffic = estimate_traffic(plan, request, lengths[plan.schedule.streams[0].name])
    return {row.node: row for row in node_times(plan, request, lengths, traffic)}


def test_every_node_of_the_trained_stream_has_its_seconds():
    rows = timed(graphs.grpo(minibatches=2))
    assert list(rows) == [
        "actor_gen", "score", "ref_inf", "group_advantage", "actor_train", "save.actor", "actor@gen"
    ]  # fmt: skip
    for row in rows.values():
        assert row.seconds == pytest.approx(sum(seconds for _, seconds in row.parts))
    assert rows["score"].seconds == 0
    assert [name for name, _ in rows["group_advantage"].parts] == ["redistribution"]
    assert rows["actor_train"].seconds > rows["ref_inf"].seconds > 0


def test_engines_keep_weights_between_two_syncs():
    def sleep_seconds(sync_every, **asked):
        configs = {"actor": model_config(engine="vllm", dtype="bf16", **asked), "ref": model_config()}
        rows = timed(graphs.grpo(), None, "h100-1x2", configs=configs, sync_every=sync_every)
        return dict(rows["actor_gen"].parts).get("sleep")

    # To the host and back, after two of three steps: 2 x 2 x 160,256 bytes over 20 GB/s.
    assert sleep_seconds(1) is None
    assert sleep_seconds(3) == pytest.approx(2 / 3 * 2 * 2 * 160_256 / 20e9)
    assert sleep_seconds(3, group="a", gen_group="b") is None


def test_a_written_stream_is_ready_in_no_time():
    rows = timed(graphs.sft())
    assert rows["sft_view"].seconds == 0
    assert rows["sft_train"].seconds > 0


def test_an_update_and_the_engines_of_an_evaluation():
    rows = timed(graphs.ema())
    assert (
        list(rows) == ["sft_view", "sft_train", "ema", "save.actor", "save.ref", "ref@gen"] or "ema" in rows
    )
    assert [name for name, _ in rows["ema"].parts] == ["update"]


def test_a_reward_model_that_runs_by_group_takes_a_group_at_a_time():
    rows = timed(graphs.agent())
    assert 0 < rows["rew_inf"].seconds < rows["actor_train"].seconds / 8


def test_models_of_unknown_sizes_have_no_seconds():
    rows = timed(graphs.grpo(), models={"ref": SMALL})
    assert set(rows) == {"score", "ref_inf", "group_advantage"}


@pytest.mark.parametrize(
    ("level", "expected"),
    # 8 groups of 4 samples of 30 tokens; 0.5 + 0.1 a token + 2 a sequence + 3 a group.
    [
        (Level.SAMPLE, 0.5 + 3 + 2 + 3),
        (Level.GROUP, 0.5 + 12 + 8 + 3),
        (Level.BATCH, 0.5 + 96 + 64 + 24),
    ],
)
def test_a_node_type_can_state_its_cost(level, expected):
    cost = (("constant", 0.5), ("tokens", 0.1), ("sequences", 2.0), ("groups", 3.0))
    node = {Level.SAMPLE: "score", Level.GROUP: "has_spread", Level.BATCH: "group_advantage"}[level]
    graph = graphs.agent() if level is Level.GROUP else graphs.grpo()
    graph = graphs.changed(graph, "score" if node == "score" else node, cost=cost)
    source = graph.streams[0].source
    graph = graphs.changed(graph, source, group=4)
    graph = replace(graph, streams=tuple(replace(s, group=4 if s.group > 1 else 1) for s in graph.streams))
    rows = timed(graph, workload=WorkloadConfig(prompt=20, response_mean=10.0, response_cv=0.0))
    assert dict(rows[node].parts)["body"] == pytest.approx(expected)


def test_staleness_and_rare_syncs_let_batches_overlap():
    lengths = WorkloadConfig(prompt=20, response_mean=100.0, response_cv=1.0)
    together = {"batch": 64, "max_concurrent": 512, "workload": lengths}
    synchronous = timed(graphs.grpo(), **together)["actor_gen"]
    for change in ({"max_staleness": 1}, {"sync_every": 2}):
        overlapping = timed(graphs.grpo(), **together, **change)["actor_gen"]
        assert overlapping.seconds < synchronous.seconds
        assert "tail" not in dict(overlapping.parts)


# ------------------------------------------------------------------------------ published numbers
@pytest.mark.parametrize(
    ("batch", "prompt", "response", "tokens_per_s"),
    [(64, 128, 128, 3486), (32, 128, 2048, 1459), (32, 2048, 128, 529), (16, 2048, 2048, 592)],
)
def test_llama_7b_on_an_a100_as_nvidia_measured_it(batch, prompt, response, tokens_per_s):
    # TensorRT-LLM 0.5.0, docs/source/performance.md, A100 in FP16: output tokens a second of a whole batch.
    one = side(LLAMA_7B, hardware=A100, backend="vllm", dtype="bf16")
    seconds = total(generate(one, Workload(prompt, float(response), 0.0, response), rollout(batch)))
    assert 0.5 < batch * response / seconds / tokens_per_s < 2


@pytest.mark.parametrize(
    ("axes", "engine", "tokens_per_s"),
    [
        ((24, 896, 4864, 14, 2, 64, 151936, True), "vllm", 311.55),
        ((28, 1536, 8960, 12, 2, 128, 151936, True), "vllm", 183.33),
        ((28, 3584, 18944, 28, 4, 128, 152064, False), "vllm", 84.28),
        ((48, 5120, 13824, 40, 8, 128, 152064, False), "vllm", 46.30),
        ((24, 896, 4864, 14, 2, 64, 151936, True), "embedded", 47.40),
        ((28, 1536, 8960, 12, 2, 128, 151936, True), "embedded", 39.68),
        ((48, 5120, 13824, 40, 8, 128, 152064, False), "embedded", 24.74),
    ],
)
def test_qwen_2_5_on_an_a100_as_its_authors_measured_it(axes, engine, tokens_per_s):
    # Qwen2.5 speed benchmark (0.5B, 1.5B, 7B, 14B in BF16, one sequence of 2048 tokens from one), vLLM 0.6.3
    # and transformers 4.46, which launches kernels as the embedded engine did. Both scheduled in turns.
    one = in_turns(side(ModelShape("qwen2", *axes), hardware=A100, backend=engine, dtype="bf16"))
    seconds = total(generate(one, Workload(1, 2048.0, 0.0, 2048), rollout(1)))
    assert 0.5 < 2048 / seconds / tokens_per_s < 2


def test_llama_2_7b_is_trained_as_fast_as_its_authors_did():
    # Touvron et al. 2023, "Llama 2", table 2: 184,320 A100 hours for 2e12 tokens are 3,014 tokens a second on
    # each. Batches of 4M tokens, sequences of 4096 (section 2.2); the number of devices is not published.
    one = side(LLAMA_7B, "d1024", A100, dtype="bf16")
    seconds = total(train(one, work_of([4096] * 1024, 0, 1).share(1 / 1024), 1))
    assert 0.5 < 4096 / seconds / 3014 < 2


def test_llama_3_405b_is_trained_as_fast_as_its_authors_did():
    # Grattafiori et al. 2024, "The Llama 3 herd of models", table 4: 8,192 H100, TP 8, PP 16, DP 64, 32
    # sequences of 8192 tokens for each DP rank: 430 TFLOP/s on each. Interleaved stages make their bubble
    # smaller than the one assumed here.
    one = side(LLAMA_405B, "d64t8p16", H100, "megatron", dtype="bf16", tokens_per_microbatch=8192)
    seconds = total(train(one, work_of([8192] * 32, 0, 1), 1))
    flops = 6 * 405e9 * 8192 * 32 / (8 * 16)
    assert 0.5 < flops / seconds / 430e12 < 2


def test_the_step_of_the_addition_recipe():
    # benchmarks/results/2026-11-25-predicted-vs-measured.json: 0.33 s on two cores, of which generation and
    # two updates take 0.15 s each. The model gets to 512 answers of 4 tokens, to prompts of 7.
    devices_known, links = known_devices(__file__), known_links(__file__)
    cpu = devices_known["cpu"]
    calibration = device_calibration(cpu, __file__)
    hardware = Hardware(cpu, links[cpu.link], links[cpu.network], links[cpu.host_link], calibration)
    lengths = WorkloadConfig(prompt=7, response_mean=4.0, response_cv=0.0)
    graph = graphs.without(graphs.grpo(8, minibatches=2), "ref_inf")
    reads = tuple(read for read in graph.node("actor_train").reads if read.field != "ref_logprobs")
    nodes = tuple(replace(n, reads=reads) if n.name == "actor_train" else n for n in graph.nodes)
    rows = timed(
        replace(graph, nodes=nodes),
        models={"actor": TINY},
        hardware=hardware,
        batch=64,
        max_concurrent=512,
        workload=lengths,
    )
    measured = {"actor_gen": 0.15, "actor_train": 0.15}
    for node, seconds in measured.items():
        assert 2 / 3 < rows[node].seconds / seconds < 1.5
    step = sum(row.seconds for row in rows.values() if row.node != "save.actor")
    assert 2 / 3 < step / 0.33 < 1.5


def test_an_infer_node_with_a_mask_computes_the_share_of_samples_that_is_set():
    """All of them count where none is set; the plan says which."""
    recipe, share = "recipes/teachers.py", "workload.shares.is_low=0.25"
    plans = [compile_recipe(recipe, given).plan for given in ((), (share,))]
    usual, given = ({time.node: dict(time.parts) for time in plan.forecast.times} for plan in plans)
    assert given["low_inf"]["forward"] == pytest.approx(usual["low_inf"]["forward"] / 4, rel=0.02)
    assert given["high_inf"] == usual["high_inf"]
    for plan, text in zip(plans, ("all, though it computes", "25 %, which is_low marks"), strict=True):
        assert dict(assumption_lines(plan))["samples of low_inf"].startswith(text)
    assert plans[0].forecast.memory == plans[1].forecast.memory


def test_decoding_runs_as_many_sequences_as_the_memory_model_grants_room():
    # A token of Qwen2.5-7B has 28 layers x 2 x 4 heads x 128 numbers in bf16: 28,672 bytes on each of t2.
    token, length = 28_672, 1_536
    settings = (
        *("model@models.actor=qwen2.5-7b", "models.actor.path=null", "models.actor.backend=megatron"),
        *("cluster=h100-1x8", "placement=actor=all:d2t4 actor.gen=all:d4t2", "models.actor.gen.engine=vllm"),
        *("workload.prompt=512", "workload.response_mean=1024", "workload.response_cv=0", "batch=256"),
        *("nodes.actor_gen.max_tokens=1024", "models.actor.gen.max_model_len=1536"),
        "schedule.max_concurrent=2048",
    )
    generating = []
    for gib in (2, 4, 20):
        plan = compile_recipe("recipes/grpo.py", (*settings, f"models.actor.gen.cache_gib={gib}")).plan
        (engine,), forecast = plan.engines, plan.forecast
        assert forecast
        caches = {
            item.num_bytes
            for row in forecast.memory
            if row.phase == "generate"
            for item in (*row.resident, *row.transient)
            if item.category is MemoryCategory.KV_CACHE
        }
        assert caches == {gib << 30}
        largest = (gib << 30) // (token * length)
        assert engine.largest_batch in (largest, largest - 1)  # blocks of 16 tokens, one of them empty
        assert forecast.pace
        # Four engines, each of which may run 256 sequences.
        assert forecast.pace.slots == 4 * min(256, engine.largest_batch)
        generating.append(forecast.times[0].seconds)
    assert generating == sorted(generating, reverse=True)
    assert generating[0] > 1.5 * generating[1]


def plan_with(figures: dict[str, float], directory: Path, *settings: str) -> Plan:
    """Return a plan of GRPO with 32 samples of 9 tokens, with some figures of its calibration changed."""
    settings = ("models.actor.path=null", "batch=4", "workload.response_cv=0", *settings)
    hardware = compile_recipe("recipes/grpo.py", settings).plan.hardware
    values = {**to_plain(hardware.calibration), "devices": [hardware.device.name], **figures}
    del values["name"]
    file = directory / "figures.yaml"
    file.write_text(yaml.safe_dump(values))
    return compile_recipe("recipes/grpo.py", (*settings, f"calibration={file}")).plan


@pytest.mark.parametrize(("cluster", "adds_up"), [("cpu-1x1", True), ("h100-1x1", False)])
def test_samples_take_the_time_of_the_controller(cluster: str, adds_up: bool, tmp_path: Path):
    none, some, most = (
        plan_with({"sample_us": us}, tmp_path, f"cluster={cluster}").forecast for us in (0.0, 1.0, 1e6)
    )
    assert none
    assert some
    assert most
    seconds = [{row.node: row.seconds for row in f.times}["actor_gen"] for f in (none, some, most)]
    assert seconds[1] - seconds[0] == pytest.approx(32e-6 if adds_up else 0.0)
    assert seconds[2] == pytest.approx(32.0 + (seconds[0] if adds_up else 0.0))
    # Each of 32 responses of 4 tokens waits for a second of all others.
    assert none.pace
    assert most.pace
    before = none.pace.seconds_per_token if adds_up else 0.0
    assert most.pace.seconds_per_token == pytest.approx(32 / 4 + before)


def test_messages_of_batch_nodes_and_weight_updates(tmp_path: Path):
    plans = [plan_with({"node_us": us}, tmp_path, "cluster=cpu-1x2") for us in (0.0, 5000.0)]
    before, after = (
        {row.node: row.seconds for row in plan.forecast.times} for plan in plans if plan.forecast
    )
    slower = {node: after[node] - before[node] for node in before}
    assert {node for node, more in slower.items() if more} >= {"group_advantage", "actor_train", "actor@gen"}
    assert slower["actor_gen"] == 0
    assert slower["actor@gen"] == pytest.approx(5e-3)


def test_processes_are_reached_by_messages_that_take_longer(tmp_path: Path):
    def messages(workers: str) -> float:
        figures = {"node_us": 1000.0, "process_us": 4000.0}
        plan = plan_with(figures, tmp_path, "cluster=cpu-1x1", f"workers={workers}")
        return {row.node: dict(row.parts) for row in plan.forecast.times}["actor_train"]["messages"]

    assert messages("inproc") == pytest.approx(1e-3)
    assert messages("ray") == pytest.approx(5e-3)


# ------------------------------------------------------------------------------------- cores of a worker
def test_cores_divide_a_part_of_the_products():
    cpu, figures = replace(TOY.device, type="cpu"), replace(TOY.calibration, parallel=0.8)
    hardware = replace(TOY, device=cpu, calibration=figures)
    assert hardware.with_cores(0) == hardware.with_cores(1) == hardware
    # Of 1 second, 0.2 stay and 0.8 are divided by 4.
    four = hardware.with_cores(4).device
    assert four.tflops == {name: pytest.approx(rate / 0.4) for name, rate in TOY.device.tflops.items()}
    assert four.memory_gb_per_s == TOY.device.memory_gb_per_s
    on_gpu = replace(A100, calibration=figures)
    assert on_gpu.with_cores(4) == on_gpu


def test_more_cores_make_a_plan_faster_up_to_amdahls_limit(tmp_path: Path):
    def seconds(part: float, *settings: str) -> dict[str, float]:
        plan = plan_with({"parallel": part}, tmp_path, "cluster=cpu-1x1", "workers=inproc", *settings)
        return {row.node: row.seconds for row in plan.forecast.times}

    unbound, *bound = (seconds(0.9, *cores) for cores in ((), *([f"cores=[{n}]"] for n in (1, 2, 4, 64))))
    assert unbound == bound[0]
    for node in ("actor_gen", "actor_train"):
        falling = [row[node] for row in bound]
        assert falling == sorted(falling, reverse=True)
        assert 0.1 * falling[0] < falling[-1] < falling[0]
    assert seconds(0.0, "cores=[4]") == unbound


LARGER = [
    *(f"models.actor.architecture.{key}" for key in ("hidden_size=512", "intermediate_size=1536")),
    *(f"models.actor.architecture.{key}" for key in ("num_hidden_layers=6", "num_attention_heads=8")),
    "models.actor.architecture.num_key_value_heads=4",
]


@pytest.mark.parametrize(("size", "measured"), [((), 0.89), (LARGER, 1.47)], ids=["0.5M", "19M"])
def test_the_gain_of_a_second_worker(size: list[str], measured: float):
    # benchmarks/results/2026-11-25-second-core.json: 64 answers of up to 64 tokens, one process beside two.
    lengths = ["nodes.actor_gen.max_tokens=64", "workload.response_mean=27", "batch=8"]
    settings = ["models.actor.path=null", "nodes.actor_train.minibatches=1", *lengths, *size]
    one, two, threads = (
        compile_recipe("recipes/grpo.py", [*settings, *workers]).plan.forecast.period.seconds
        for workers in (
            ["workers=inproc", "cluster=cpu-1x1"],
            ["cluster=cpu-1x2"],
            ["workers=inproc", "cluster=cpu-1x1", "cores=[2]"],
        )
    )
    assert one / two == pytest.approx(measured, rel=0.15)
    assert (one / two > 1) == (measured > 1)
    assert 1 < one / threads < 1.9
