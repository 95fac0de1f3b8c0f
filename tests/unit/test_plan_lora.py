"""What the planner knows of adapters: their tensors, memory, FLOPs and traffic, and who shares a base."""

from dataclasses import replace

import cost_kit
import memory_kit as kit
import plan_graphs as graphs
import pytest
import torch_kit
from cost_kit import side
from memory_kit import SMALL, named, rank
from model_configs import model_config

from hflow.base.errors import PlanError
from hflow.config.schema import LoraConfig
from hflow.engines.vllm.memory import layer_being_loaded, process_state
from hflow.graph.model import Model
from hflow.models.adapter import base_buffers
from hflow.planner.compile import compile_plan
from hflow.planner.forecast.cost.flops import Work
from hflow.planner.forecast.cost.kernels import pass_seconds
from hflow.planner.forecast.cost.rank_collectives import Passes, tensor_collectives
from hflow.planner.forecast.cost.training import local_weights, train
from hflow.planner.forecast.memory import activations, transfer
from hflow.planner.forecast.memory.parts import engine_weights
from hflow.planner.plan.request import trained_shape
from hflow.shapes.model_shape import (
    EXPERT_TARGETS,
    Experts,
    adapter_targets,
    adapter_widths,
    num_parameters,
    tensors,
)
from hflow.training.fsdp import memory
from hflow.training.megatron import memory as megatron_memory

LORA = LoraConfig(r=4, alpha=8)
ADAPTERS = 4 * 4 * ((64 + 64) * 2 + (64 + 32) * 2 + (64 + 128) * 3)
"""Of `SMALL`: r times inputs and outputs of q and o, k and v, and three matrices of the MLP, in 4 layers."""


def test_each_targeted_matrix_has_two():
    shape = trained_shape(SMALL, LORA)
    assert num_parameters(shape) == ADAPTERS == 16_384
    specs = {spec.name: spec.shape for spec in tensors(shape)}
    assert len(specs) == 2 * 7 * 4
    assert specs["model.layers.3.self_attn.k_proj.lora_A.weight"] == (4, 64)
    assert specs["model.layers.3.self_attn.k_proj.lora_B.weight"] == (32, 4)
    few = trained_shape(SMALL, LoraConfig(r=1, targets=("q_proj",)))
    assert [spec.name for spec in tensors(few)][:2] == [
        "model.layers.0.self_attn.q_proj.lora_A.weight",
        "model.layers.0.self_attn.q_proj.lora_B.weight",
    ]
    assert num_parameters(few) == 4 * 128
    assert trained_shape(SMALL, None) is SMALL
    critic = tensors(trained_shape(replace(SMALL, head="value"), LORA))
    assert [spec.name for spec in critic[-2:]] == ["value_head.weight", "value_head.bias"]
    assert "gate_proj" in adapter_targets(SMALL)


def test_weights_are_in_the_compute_dtype_and_only_adapters_have_moments():
    # 160,832 weights of 2 bytes, and 4 + 8 bytes of each adapter weight, over the data ranks.
    state = named(memory.model_state(rank(lora=LORA, dtype="bf16")))
    assert state == {"weights": 2 * 160_832, "adapters": 4 * ADAPTERS, "optimizer": 8 * ADAPTERS}
    halves = named(memory.model_state(rank(layout="d2", lora=LORA)))
    assert halves == {"weights": 4 * 80_416, "adapters": 2 * ADAPTERS, "optimizer": 4 * ADAPTERS}
    base = rank(role="infer")
    assert not memory.model_state(replace(base, replica=replace(base.replica, base_of="m@train")))


def test_magnitudes_are_a_number_for_each_row():
    """Of q and o 64, of k and v 32, of the MLP 128, 128 and 64, in 4 layers."""
    shape = trained_shape(SMALL, replace(LORA, dora=True))
    rows = 4 * (64 + 64 + 32 + 32 + 128 + 128 + 64)
    assert num_parameters(shape) == ADAPTERS + rows
    assert {spec.name: spec.shape for spec in tensors(shape)}[
        "model.layers.1.mlp.up_proj.lora_magnitude_vector.weight"
    ] == (128,)
    batch, plain, dora = kit.microbatch(10), rank(lora=LORA), rank(lora=replace(LORA, dora=True))
    kept = activations.kept_by_adapters(dora, batch) - activations.kept_by_adapters(plain, batch)
    assert kept == 4 * 10 * rows // 4  # the outputs before they are scaled
    assert activations.measured_matrix(dora) == 4 * 64 * 128


def test_adapters_outside_of_layers():
    """Of a vocabulary of 100."""
    outer = replace(LORA, targets=("all-linear", "embed_tokens", "lm_head"))
    specs = {spec.name: spec.shape for spec in tensors(trained_shape(SMALL, outer))}
    assert specs["model.embed_tokens.lora_embedding_A"] == (4, 100)
    assert specs["model.embed_tokens.lora_embedding_B"] == (64, 4)
    assert (specs["lm_head.lora_A.weight"], specs["lm_head.lora_B.weight"]) == ((4, 64), (100, 4))
    assert num_parameters(trained_shape(SMALL, outer)) == ADAPTERS + 2 * 4 * (100 + 64)
    with pytest.raises(PlanError, match=r"no matrix 'embed_tokens' .* tied embedding have no adapters"):
        trained_shape(replace(SMALL, is_tied=True), outer)


EXPERTS = replace(LORA, targets=("q_proj", *EXPERT_TARGETS))
MIXED = replace(SMALL, experts=Experts(num=4, per_token=2, intermediate=16, first=1))
"""Three layers with experts after a dense one."""


def test_adapters_of_experts():
    """An expert has 4 x (64 + 32) for gate and up, and 4 x (16 + 64) for down; q has 4 x (64 + 64)."""
    shape = trained_shape(MIXED, EXPERTS)
    specs = {spec.name: spec.shape for spec in tensors(shape)}
    assert num_parameters(shape) == 3 * 4 * 4 * (64 + 32 + 16 + 64) + 4 * 4 * 128
    assert specs["model.layers.1.mlp.experts.gate_up_proj.lora_A.weight"] == (4, 4, 64)
    assert specs["model.layers.1.mlp.experts.gate_proj.lora_B.weight"] == (4, 16, 4)
    assert specs["model.layers.1.mlp.experts.up_proj.lora_B.weight"] == (4, 16, 4)
    assert specs["model.layers.3.mlp.experts.down_proj.lora_B.weight"] == (4, 64, 4)
    assert "model.layers.0.mlp.experts.down_proj.lora_B.weight" not in specs
    assert "experts.down_proj" not in adapter_targets(MIXED)  # `all-linear` does not mean them
    for other in (SMALL, replace(MIXED, experts=replace(MIXED.experts, has_bias=True))):
        with pytest.raises(PlanError, match=r"no matrix 'experts\.gate_up_proj'.* experts with biases"):
            trained_shape(other, EXPERTS)


def test_a_token_passes_the_adapters_of_its_experts():
    """In three of four layers 2 of 4 experts, with 4 numbers between the matrices of each of two."""
    sizes = adapter_widths(trained_shape(MIXED, EXPERTS))
    assert sizes.low == 4 + 3 / 4 * 2 * (4 + 4)
    assert sizes.inputs == 64 + 3 / 4 * 2 * (64 + 16)
    assert sizes.outputs == 64 + 3 / 4 * 2 * (32 + 64)
    assert activations.kept_by_adapters(rank(MIXED, lora=EXPERTS), kit.microbatch(10)) == 4 * 10 * 16
    work = Work(groups=1, sequences=1, tokens=1000, rows=1000, learned=1000, squares=0)
    few, all_of_them = (
        pass_seconds(side(replace(MIXED, experts=one), lora=EXPERTS), work, 1, 3, 2, 2)
        for one in (MIXED.experts, replace(MIXED.experts, num=8))
    )
    assert few == pytest.approx(all_of_them, rel=0.02)  # a larger router alone


def test_an_engine_merges_all_experts_of_a_layer_at_once():
    engine = rank(MIXED, backend="vllm", lora=EXPERTS)
    merging = replace(engine, replica=replace(engine.replica, merges_adapters=True))
    assert named(layer_being_loaded(merging, 1))["merged adapter"] == 12 * 64 * 128  # of the dense layer
    wide = replace(MIXED, intermediate=32, experts=replace(MIXED.experts, num=16))
    merging = replace(merging, shape=wide)
    assert named(layer_being_loaded(merging, 1))["merged adapter"] == 12 * 16 * 64 * 16


def test_matrices_in_4_bits_are_whole_on_every_rank():
    """Half a byte for each of 36,864 numbers of a layer, one for 64, and 1,096 for each of 7 matrices."""
    rounded = replace(LORA, base="nf4")
    of_layer = 36_864 // 2 + 36_864 // 64 + 7 * (4 + 4 + 4 * (16 + 256))
    others = 160_832 - 4 * 36_864
    for layout, share in (("d1", 1), ("d2", 2)):
        state = named(memory.model_state(rank(layout=layout, lora=rounded, dtype="bf16")))
        assert state["weights in 4 bits"] == 4 * of_layer
        assert state["weights"] == 2 * others // share
    engine = rank(backend="embedded", lora=rounded)
    assert engine_weights(engine) == 4 * of_layer + 4 * (others + ADAPTERS)
    merging = rank(backend="vllm", lora=rounded)
    merging = replace(merging, replica=replace(merging.replica, merges_adapters=True))
    assert engine_weights(merging) == engine_weights(rank(backend="vllm"))


def test_tensor_ranks_of_megatron_divide_one_matrix_of_each_adapter():
    """Ranks divide B of q, k, v, gate and up, and A of o and down, with their optimizer state."""
    whole = 4 * 4 * (5 * 64 + 2 * 64)  # A of the five that read 64 inputs, B of the two that write 64
    held = whole + (ADAPTERS - whole) // 2
    bf16 = rank(layout="t2", backend="megatron", lora=LORA, dtype="bf16")
    assert bf16.trained.total == held
    assert named(megatron_memory.model_state(bf16)) == {
        "weights": 2 * bf16.sizes.total,
        "adapters": 2 * held,
        "gradients": 4 * held,
        "fp32 weights": 4 * held,
        "optimizer": 8 * held,
    }
    base = rank(role="infer", backend="megatron")
    assert not megatron_memory.model_state(replace(base, replica=replace(base.replica, base_of="m@train")))


def test_only_adapters_are_saved_and_sent():
    weights, state = "copy of the weights", "copy of the optimizer's state"
    saved = {weights: 2 * ADAPTERS, state: 12 * ADAPTERS, "buckets": 2 * 4 * 128}  # a cast of one tensor
    assert named(transfer.save_checkpoint(rank(lora=LORA, dtype="bf16"))) == saved
    merged = rank(lora=LoraConfig(r=4, save_merged=True))
    assert named(transfer.save_checkpoint(merged))[weights] == 4 * (ADAPTERS + 160_832)
    engine = rank(backend="vllm", lora=LORA)
    merging = replace(engine, replica=replace(engine.replica, merges_adapters=True))
    assert named(process_state(merging, 0))["base weights"] == 4 * engine.sizes.total
    assert "base weights" not in named(process_state(engine, 0))
    assert engine_weights(engine) - engine_weights(merging) == 4 * 2 * ADAPTERS  # in buffers of rank 8
    largest = 4 * 128  # r times the columns of the MLP
    assert named(layer_being_loaded(engine, 1)) == {"adapter being loaded": (4 + 2 * 4) * largest}
    assert named(layer_being_loaded(merging, 1)).keys() == {"layer being loaded", "merged adapter"}


def test_frozen_matrices_have_no_gradient():
    """Without attention, an update of adapters of rank 0 takes two thirds of the FLOPs."""
    work = Work(groups=1, sequences=1, tokens=1000, rows=1000, learned=1000, squares=0)
    full, frozen = side(), side(lora=LORA)
    of_adapters = 3 * 2 * ADAPTERS * 1000
    rate = 6 * 153_856 * 1000 / pass_seconds(full, work, 1, 3, 3, 3)
    elementwise = cost_kit.named(train(full, work, 1)), cost_kit.named(train(frozen, work, 1))
    assert elementwise[1]["forward and backward"] < elementwise[0]["forward and backward"]
    difference = pass_seconds(full, work, 1, 3, 3, 3) - pass_seconds(frozen, work, 1, 3, 2, 2)
    products = side().peak_flops
    assert rate < products
    assert difference == pytest.approx((2 * 153_856 * 1000 - of_adapters) / products, rel=1e-6)
    assert local_weights(side(lora=LORA, layout="d2")) == ADAPTERS / 2


def test_tensor_ranks_exchange_r_numbers_for_each_token():
    """In fp32, 4 layers, forward and backward: q, k and v together, o, gate and up together, down."""
    work = Work(groups=1, sequences=1, tokens=1000, rows=1000, learned=1000, squares=0)
    passes = Passes.of(1, 2)
    for shared, kinds in ((True, ("all-gather", "reduce-scatter")), (False, ("all-reduce",))):
        rows = {}
        for one in tensor_collectives(
            side(lora=LORA, layout="t2", backend="megatron", sequence_parallel=shared), work, passes
        ):
            rows[one.kind, one.num_bytes] = rows.get((one.kind, one.num_bytes), 0) + one.times
        for kind in kinds:
            together = (kind, 4 * 1000 * 3 * 4), (kind, 4 * 1000 * 2 * 4), (kind, 4 * 1000 * 4)
            assert [rows[key] for key in together] == [4, 4, 8]


def lora_plan(ref=None, **actor):
    graph = graphs.grpo()
    model = next(model for model in graph.models if model.name == "actor")
    models = (model, Model("ref", init_from=model))
    configs = {
        "actor": model_config(**({"lora": LORA, "engine": "embedded"} | actor)),
        "ref": ref or model_config(),
    }
    shapes = dict.fromkeys(configs, SMALL)
    return compile_plan(replace(graph, models=models), graphs.request(models=configs, shapes=shapes))


def test_a_reference_shares_the_base_only_where_it_computes_the_same():
    bases = {r.name: (r.base_of, r.adapter_parameters) for r in lora_plan().replicas}
    assert bases == {"actor@train": ("", ADAPTERS), "actor@gen": ("", 0), "ref@infer": ("actor@train", 0)}
    for ref in (
        model_config(layout="d1"),
        model_config(dtype="bf16"),
        model_config(path="elsewhere"),
        model_config(backend="megatron"),
    ):
        assert lora_plan(ref).replica("ref@infer").base_of == ""
    assert lora_plan(lora=None).replica("ref@infer").base_of == ""


def test_routes_have_the_adapters_alone():
    plan = lora_plan(group="a", gen_group="b", layout="d1", gen_layout="d1")
    (route,) = plan.weights
    assert (route.how, route.moved_bytes) == ("pull", 4 * ADAPTERS)
    assert {".lora_" in row.tensor for row in route.rows} == {True}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"lora": LoraConfig(targets=("q_prj",))},
            r"lora\.targets: .* no matrix 'q_prj'; did you mean 'q_proj'",
        ),
        ({"lora": LoraConfig(targets=())}, r"actor\.lora\.targets is empty, so nothing is trained"),
        (
            {"lora": LoraConfig(r=64)},
            r"actor\.lora\.r is 64, but v_proj has only 32 rows or columns; set models\.actor\.lora\.r=32 or",
        ),
        (
            {"lora": LoraConfig(r=128, targets=("embed_tokens",))},
            r"models\.actor\.lora\.r is 128, but embed_tokens has only 64 rows or columns",
        ),
        (
            {"lora": LoraConfig(r=4, base="nf4"), "backend": "megatron"},
            r"actor\.lora\.base is nf4, but the megatron backend cannot train that; set .*backend=torch",
        ),
        (
            {"lora": LoraConfig(r=4, dora=True, targets=("lm_head",))},
            r"actor\.lora\.dora is set, but lm_head has no magnitudes; remove it from",
        ),
        (
            {"lora": LoraConfig(r=4, dora=True, targets=("experts.gate_up_proj",))},
            r"actor\.lora\.dora is set, but experts\.gate_up_proj has no magnitudes; remove it from",
        ),
        (
            {"lora": LoraConfig(r=4, targets=("experts.down_proj",)), "compile": True},
            r"targets has experts\.down_proj, whose products are not compiled; set models\.actor",
        ),
        (
            {"lora": LoraConfig(r=4, base="nf4"), "compile": True},
            r"base is nf4, whose products are not compiled; set models\.actor\.compile=false",
        ),
        (
            {"lora": LoraConfig(r=4, base="nf4"), "ref": model_config(layout="d1")},
            r"ref@infer would have a copy of the weights that is not rounded; give it .* of actor@train",
        ),
        (
            {"backend": "megatron", "kernels": "transformer_engine"},
            r"kernels is transformer_engine, but adapters are added .* set models\.actor\.kernels=torch",
        ),
        (
            {"backend": "megatron", "fp8": "blockwise"},
            r"fp8 is blockwise, but adapters are added .* set models\.actor\.fp8=null",
        ),
    ],
)
def test_what_adapters_are_refused_for(changes, message):
    with pytest.raises(PlanError, match=message):
        lora_plan(**changes)


def test_a_stage_without_adapters_is_refused():
    shape = replace(SMALL, experts=Experts(num=4, per_token=2, intermediate=16, first=2))
    graph, few = graphs.sft(), LoraConfig(r=4, targets=("gate_proj",))
    models = {"actor": model_config(lora=few, backend="megatron", layout="p2")}
    with pytest.raises(PlanError, match=r"stage 1 of layout d1t1p2 has no matrix of .*lora\.targets"):
        compile_plan(graph, graphs.request(models=models, shapes={"actor": shape}))


def test_a_node_that_works_on_all_weights_is_refused():
    shapes, models = {"actor": SMALL, "ref": SMALL}, {"actor": model_config(lora=LORA)}
    with pytest.raises(
        PlanError, match="ema works on all weights of actor, of which only adapters are trained"
    ):
        compile_plan(graphs.ema(), graphs.request(models=models, shapes=shapes))


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        ("fp32", {}),
        *(
            pytest.param(dtype, options, marks=pytest.mark.long)
            for dtype, options in (
                ("bf16", {}),
                ("bf16", {"dora": True}),
                ("fp32", {"dora": True}),
                ("bf16", {"base": "nf4"}),
                ("fp32", {"targets": ("all-linear", "embed_tokens", "lm_head")}),
                ("fp32", {"targets": ("all-linear", *EXPERT_TARGETS)}),
                ("bf16", {"targets": ("all-linear", *EXPERT_TARGETS)}),
            )
        ),
    ],
)
def test_the_memory_of_a_real_training_step(dtype, options):
    if "base" in options:
        pytest.importorskip("bitsandbytes")
    lora, architecture = LoraConfig(r=8, **options), architecture_with(options)
    trained, _ = kit.real_peaks(architecture, 8, 64, dtype=dtype, lora=lora)
    step = memory.train_step(
        rank(kit.shape_of(architecture), dtype=dtype, lora=lora), kit.microbatch(512, 384)
    )
    # Inputs of frozen routers and of experts' activations count as kept, as far as they are in full training.
    margin = 0.2 if architecture["model_type"] == "qwen3_moe" else 0.15
    assert step.total() == pytest.approx(trained, rel=margin)


def architecture_with(options):
    """Return a model that can have some adapters."""
    has_experts = set(EXPERT_TARGETS).intersection(options.get("targets", ()))
    return (kit.MIXED if has_experts else kit.ARCHITECTURE) | {"tie_word_embeddings": False}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dora": True},
        {"base": "nf4"},
        {"targets": ("q_proj", "lm_head")},
        {"targets": ("q_proj", *EXPERT_TARGETS)},
    ],
)
def test_the_memory_of_a_real_model_between_steps(options):
    if "base" in options:
        pytest.importorskip("bitsandbytes")
    lora, architecture = LoraConfig(r=8, **options), architecture_with(options)
    backend = torch_kit.model(architecture=architecture, dtype="bf16", lora=lora)
    held = [*backend._runner.module.parameters(), *base_buffers(backend._model)]
    state = named(memory.model_state(rank(kit.shape_of(architecture), dtype="bf16", lora=lora)))
    del state["optimizer"]
    assert sum(state.values()) == sum(x.nbytes for x in held)
