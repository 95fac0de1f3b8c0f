"""The planner's list of tensors against transformers, and how ranks cut them, against hand-worked cases."""

import dataclasses
from math import prod

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from hflow.base.errors import PlanError
from hflow.models.expert_tensors import stacked_views
from hflow.models.settings import ModelSettings, RankPosition
from hflow.planner.plan.serialise import to_plain
from hflow.planner.plan.traits import traits
from hflow.planner.weights.sharding import is_on_stage, rank_boxes, rank_tensors, tensor_shards
from hflow.shapes.architectures import FAMILIES, KNOWN_FAMILIES, read_shape
from hflow.shapes.layout import Layout, stage_layers
from hflow.shapes.model_shape import (
    TensorSpec,
    active_parameters,
    cached_tokens,
    equal_layers,
    kinds_of_layers,
    layer_template,
    layer_tensors,
    num_parameters,
    tensors,
)
from hflow.training.fsdp.backend import TorchModel
from hflow.training.fsdp.weight_export import _num_held
from hflow.types.tensor_slices import numel

SMALL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
VARIANTS = [
    ("llama", {}),
    ("llama", {"tie_word_embeddings": True}),
    ("llama", {"attention_bias": True}),
    ("llama", {"mlp_bias": True}),
    ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 16}),
    ("llama", {"num_key_value_heads": None}),
    ("mistral", {}),
    ("mistral", {"head_dim": 12, "tie_word_embeddings": True}),
    ("mistral", {"attention_bias": True, "mlp_bias": True}),
    ("qwen2", {}),
    ("qwen2", {"tie_word_embeddings": True, "head_dim": 16}),
    ("qwen2", {"attention_bias": False, "mlp_bias": True}),
    ("qwen3", {}),
    ("qwen3", {"tie_word_embeddings": True, "head_dim": 16}),
    ("qwen3", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4}),
]


def named(shape):
    return [(spec.name, spec.shape) for spec in tensors(shape)]


# ------------------------------------------------------------------------------------- shapes
@pytest.mark.parametrize(("family", "changes"), VARIANTS)
def test_tensors_are_those_that_transformers_builds(family, changes):
    sizes = {**SMALL, **changes}
    config = AutoConfig.for_model(family, **sizes)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    built = [(name, tuple(x.shape)) for name, x in model.named_parameters()]
    assert named(read_shape({"model_type": family, **sizes})) == built
    assert named(read_shape(config.to_dict())) == built
    assert num_parameters(read_shape(config.to_dict())) == sum(prod(size) for _, size in built)


MIXED = {**SMALL, "moe_intermediate_size": 24, "num_experts_per_tok": 2, "head_dim": 8}
DEEPSEEK = {
    **MIXED,
    "num_key_value_heads": 4,
    "n_routed_experts": 6,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "q_lora_rank": 20,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
}
LLAMA4 = {**MIXED, "num_local_experts": 4, "intermediate_size_mlp": 56, "attention_chunk_size": 16}
PLANNED_VARIANTS = [
    ("mixtral", {**SMALL, "num_local_experts": 4, "num_experts_per_tok": 2}),
    ("qwen3_moe", {**MIXED, "num_experts": 6}),
    ("qwen3_moe", {**MIXED, "num_experts": 6, "mlp_only_layers": [0], "attention_bias": True}),
    ("qwen3_moe", {**MIXED, "num_experts": 6, "decoder_sparse_step": 2}),
    ("glm4", {**SMALL, "head_dim": 8, "attention_bias": True}),
    ("deepseek_v2", {**DEEPSEEK, "head_dim": 4}),
    ("glm4_moe", {**DEEPSEEK, "attention_bias": True, "use_qk_norm": True}),
    ("glm4_moe", {**DEEPSEEK, "use_qk_norm": False}),
    ("deepseek_v3", {**DEEPSEEK, "head_dim": 4}),
    ("deepseek_v3", {**DEEPSEEK, "head_dim": 4, "q_lora_rank": None}),
    ("llama4_text", {**LLAMA4, "interleave_moe_layer_step": 1, "moe_layers": [0, 1, 2]}),
    ("llama4_text", {**LLAMA4, "interleave_moe_layer_step": 2, "moe_layers": [1]}),
    ("gpt_oss", {**MIXED, "num_local_experts": 4, "attention_bias": True, "sliding_window": 16}),
    ("gemma2", {**SMALL, "head_dim": 8, "sliding_window": 16}),
    ("gemma3_text", {**SMALL, "head_dim": 8, "sliding_window": 16}),
]


FAMILIES_BY_NAME = [
    ("gemma3_text", {**SMALL, "head_dim": 8, "sliding_window": 16, "tie_word_embeddings": False}),
    ("mixtral", {**SMALL, "num_local_experts": 4, "num_experts_per_tok": 2}),
    ("qwen3_moe", {**MIXED, "num_experts": 6, "mlp_only_layers": [0]}),
    ("glm4", {**SMALL, "head_dim": 8, "attention_bias": True}),
    ("glm4_moe", {**DEEPSEEK, "attention_bias": True, "use_qk_norm": True}),
    ("deepseek_v2", {**DEEPSEEK, "head_dim": 4, "q_lora_rank": None}),
    ("deepseek_v3", {**DEEPSEEK, "head_dim": 4, "attention_bias": True}),
]


@pytest.mark.parametrize(("family", "sizes"), PLANNED_VARIANTS)
def test_parameters_of_families_that_are_only_planned_are_those_that_transformers_builds(family, sizes):
    config = AutoConfig.for_model(family, **sizes, pad_token_id=0)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    corrections = (x for name, x in model.named_buffers() if name.endswith("e_score_correction_bias"))
    num_built = sum(x.numel() for x in (*model.parameters(), *corrections))
    shape = read_shape({"model_type": family, **sizes})
    assert num_parameters(shape) == num_built
    assert num_parameters(read_shape(config.to_dict())) == num_built
    assert sum(spec.numel for spec in tensors(shape)) == num_built


@pytest.mark.parametrize(("family", "sizes"), FAMILIES_BY_NAME)
def test_known_tensors_have_the_names_that_trainers_send(family, sizes):
    config = AutoConfig.for_model(family, **sizes, pad_token_id=0)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    sent = stacked_views(family, model.state_dict().items())
    assert family in KNOWN_FAMILIES
    assert dict(named(read_shape(config.to_dict()))) == {name: tuple(x.shape) for name, x in sent}


def test_a_model_with_a_vision_tower_has_the_sizes_of_its_language_model():
    text = dict(PLANNED_VARIANTS[-1][1])
    assert read_shape({"model_type": "gemma3", "text_config": text}) == read_shape(
        {"model_type": "gemma3_text", **text}
    )
    assert read_shape({"model_type": "gemma3"}) is None


def test_layers_with_and_without_experts_alternate():
    shape = read_shape({"model_type": "llama4_text", **LLAMA4, "interleave_moe_layer_step": 2})
    assert [shape.has_experts(layer) for layer in range(3)] == [False, True, False]
    assert equal_layers(shape, 0, 3) == ((0, 1), (1, 2), (2, 3))
    deepseek = read_shape({"model_type": "deepseek_v3", **DEEPSEEK})
    assert equal_layers(deepseek, 0, 3) == ((0, 1), (1, 3))
    assert [len(kind) for kind in kinds_of_layers(deepseek)] == [12, 17]
    for layer in range(3):
        filled = [
            dataclasses.replace(spec, name=spec.name.format(layer), layer=layer)
            for spec in layer_template(deepseek, layer)
        ]
        assert tuple(filled) == layer_tensors(deepseek, layer)


def test_what_one_token_computes_with():
    # Two of six experts of 3 x 24 x 32 weights are active in each of three layers.
    shape = read_shape({"model_type": "qwen3_moe", **MIXED, "num_experts": 6})
    inactive = 3 * 4 * 3 * 24 * 32
    assert active_parameters(shape) == num_parameters(shape) - inactive - 96 * 32


def test_a_window_limits_the_cache():
    # One of two layers keeps all tokens, the other the last 16.
    shape = read_shape({"model_type": "gemma2", **SMALL, "num_hidden_layers": 2, "sliding_window": 16})
    assert [cached_tokens(shape, length) for length in (10, 16, 100)] == [10, 16, 58]


def test_fields_of_other_families_do_not_change_the_rows_of_a_plan():
    rows = to_plain(read_shape({"model_type": "llama", **SMALL}))
    assert list(rows)[-1] == "head"
    assert len(rows) == 14
    mixed = to_plain(read_shape({"model_type": "qwen3_moe", **MIXED, "num_experts": 6}))
    assert mixed["experts"]["num"] == 6


@pytest.mark.parametrize("key", ["num_local_experts", "intermediate_size", "hidden_size"])
def test_families_that_are_only_planned_have_no_defaults(key):
    sizes = {name: size for name, size in {**MIXED, "num_local_experts": 6}.items() if name != key}
    with pytest.raises(PlanError, match=f"architecture 'mixtral': {key} is (None|0); it must be a whole"):
        read_shape({"model_type": "mixtral", **sizes})


@pytest.mark.parametrize("family", FAMILIES)
def test_missing_keys_have_the_defaults_of_transformers(family):
    config = AutoConfig.for_model(family).to_dict()
    assert read_shape({"model_type": family}) == read_shape(config)
    for key in FAMILIES[family]:
        short = {name: value for name, value in config.items() if name != key}
        assert read_shape(short) == read_shape(config)


@pytest.mark.parametrize("head", ["value", "score"])
@pytest.mark.parametrize("is_tied", [False, True])
def test_a_scalar_head_takes_the_place_of_the_output_matrix_as_in_the_torch_backend(head, is_tied):
    architecture = {"model_type": "llama", **SMALL, "tie_word_embeddings": is_tied}
    model = TorchModel(ModelSettings(name="critic", head=head, architecture=architecture), RankPosition())
    built = [(name, tuple(x.shape)) for name, x in model.weights()]
    shape = read_shape(architecture, head)
    assert named(shape) == built
    names = {
        "value": [("value_head.weight", (1, 32)), ("value_head.bias", (1,))],
        "score": [("score.weight", (1, 32))],
    }
    assert built[-len(names[head]) :] == names[head]
    assert not shape.is_tied


def test_parameters_of_known_models():
    llama = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "vocab_size": 128256}
    llama_8b = read_shape({"model_type": "llama", **llama, "num_key_value_heads": 8, "num_hidden_layers": 32})
    assert num_parameters(llama_8b) == 8_030_261_248
    qwen = {"hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28, "vocab_size": 152064}
    qwen_7b = read_shape({"model_type": "qwen2", **qwen, "num_key_value_heads": 4, "num_hidden_layers": 28})
    assert num_parameters(qwen_7b) == 7_615_616_512
    # The critic of Llama-3-8B: 128256 rows of 4096 less, a vector of 4096 and a bias more.
    critic = dataclasses.replace(llama_8b, head="value")
    assert num_parameters(critic) == 8_030_261_248 - 128256 * 4096 + 4097


def test_a_template_is_every_layer():
    shape = read_shape({"model_type": "qwen3", **SMALL})
    for layer in range(3):
        filled = [
            dataclasses.replace(spec, name=spec.name.format(layer), layer=layer)
            for spec in layer_template(shape)
        ]
        assert tuple(filled) == layer_tensors(shape, layer)


def test_unlisted_families_have_no_shape():
    assert read_shape({"model_type": "gpt2", "n_embd": 64}) is None
    assert read_shape({"hidden_size": 64}) is None


@pytest.mark.parametrize(
    ("key", "value", "shown"),
    [("vocab_size", 0, "0"), ("hidden_size", "64", "'64'"), ("num_hidden_layers", None, "None")],
)
def test_sizes_that_are_none_are_refused(key, value, shown):
    with pytest.raises(PlanError) as caught:
        read_shape({"model_type": "llama", key: value})
    assert (
        str(caught.value)
        == f"architecture 'llama': {key} is {shown}; it must be a whole number of at least 1"
    )


# ----------------------------------------------------------------------------------- sharding
def boxes(spec, backend, layout):
    """The box of every place of a stage, data outermost; None where it is empty."""
    parsed = Layout.parse(layout)
    found = [rank_boxes(spec, traits(backend), parsed, place) for place in parsed.stage_coords(0)]
    return [of_rank[0] if of_rank else None for of_rank in found]


def test_tensor_ranks_have_rows_of_each_part_of_a_matrix():
    # A gate and an up projection of 6 rows each; with FSDP beside it, half of a rank's 6 rows each.
    spec = TensorSpec("gate_up", (12, 4), 0, "layer", 0, 6, split_parts=2)

    def rows(backend, layout):
        places = Layout.parse(layout).stage_coords(0)
        boxes = [rank_boxes(spec, traits(backend), Layout.parse(layout), place) for place in places]
        return [[box[0] for box in of_rank] for of_rank in boxes]

    assert rows("megatron", "t2") == [[(0, 3), (6, 9)], [(3, 6), (9, 12)]]
    assert rows("megatron", "t1") == [[(0, 12)]]
    assert rows("torch", "d5") == [[(0, 3)], [(3, 6)], [(6, 9)], [(9, 12)], []]
    assert rows("torch", "d2t2") == [[(0, 3)], [(3, 6)], [(6, 9)], [(9, 12)]]
    assert rows("torch", "d4t2")[::2] == [[(0, 2)], [(2, 3), (6, 7)], [(7, 9)], []]
    with pytest.raises(PlanError, match="gate_up has 6 units, which cannot be split over 4 tensor ranks"):
        rows("megatron", "t4")


@given(st.integers(1, 40), st.integers(1, 3), st.integers(1, 12))
def test_fsdp_cuts_rows_as_the_torch_backend_counts_them(num_rows, width, num_ranks):
    spec = TensorSpec("x", (num_rows, width), None, "norm")
    whole = torch.empty(num_rows, width, device="meta")
    counted = [_num_held(whole, rank, num_ranks) for rank in range(num_ranks)]
    cut = boxes(spec, "torch", f"d{num_ranks}")
    assert [numel(box) if box else 0 for box in cut] == counted
    rows = np.concatenate([np.arange(*box[0]) for box in cut if box])
    assert rows.tolist() == list(range(num_rows))


def test_five_rows_on_four_fsdp_ranks_leave_the_last_without():
    # Blocks of ceil(5 / 4) = 2 rows: 2, 2, 1, 0.
    spec = TensorSpec("x", (5, 7), None, "norm")
    assert boxes(spec, "torch", "d4") == [((0, 2), (0, 7)), ((2, 4), (0, 7)), ((4, 5), (0, 7)), None]


def test_fsdp_cuts_what_the_tensor_axis_leaves():
    # 12 rows in 4 heads of 3: each of two tensor ranks has 6 rows, each of two data ranks 3 of these.
    spec = TensorSpec("q", (12, 4), 0, "layer", 0, 4)
    edges = [box[0] for box in boxes(spec, "torch", "d2t2")]
    assert edges == [(0, 3), (6, 9), (3, 6), (9, 12)]


def test_more_tensor_ranks_than_key_value_heads_repeat_them():
    # 2 heads of 3 rows: ranks 0 and 1 have the first, 2 and 3 the second, in both data shards.
    spec = TensorSpec("k", (6, 4), 0, "layer", 0, 2, may_repeat=True)
    found = tensor_shards(spec, traits("embedded"), Layout.parse("d2t4"))
    assert [(piece.box[0], piece.stage_ranks) for piece in found] == [
        ((0, 3), (0, 1, 4, 5)),
        ((3, 6), (2, 3, 6, 7)),
    ]


def test_megatron_pads_each_rank_of_a_vocabulary():
    # 600 tokens on 2 ranks: padded to a multiple of 128 * 2 = 256, 768, so 384 each; 216 are real.
    spec = TensorSpec("embedding", (600, 4), None, "embedding", 0, 600, may_pad=True)
    assert [box[0] for box in boxes(spec, "megatron", "t2")] == [(0, 384), (384, 600)]
    # 520 tokens divide by 4, but are padded to 1024 all the same: 256 each, and 8 are left for the third.
    even = dataclasses.replace(spec, shape=(520, 4), split_units=520)
    rows = ((0, 4),)
    assert boxes(even, "megatron", "t4") == [
        ((0, 256), *rows),
        ((256, 512), *rows),
        ((512, 520), *rows),
        None,
    ]
    # 100 tokens on 2 ranks: 256 rows, 128 each, so that the second rank holds padding only.
    few = dataclasses.replace(spec, shape=(100, 4), split_units=100)
    assert boxes(few, "megatron", "t2") == [((0, 100), (0, 4)), None]


def test_vllm_pads_the_vocabulary_as_a_whole():
    # 600 tokens: padded to 640, a multiple of 64, whatever the ranks: 320 each for two.
    spec = TensorSpec("embedding", (600, 4), None, "embedding", 0, 600, may_pad=True)
    assert [box[0] for box in boxes(spec, "vllm", "t2")] == [(0, 320), (320, 600)]
    with pytest.raises(PlanError, match="embedding has 600 units, which cannot be split over 3 tensor ranks"):
        boxes(spec, "vllm", "t3")


def test_the_remainder_of_layers_goes_to_the_first_stages():
    assert stage_layers(5, 2) == ((0, 3), (3, 5))
    assert stage_layers(7, 3) == ((0, 3), (3, 5), (5, 7))


def test_the_last_stage_holds_a_tied_embedding_too():
    tied = read_shape({"model_type": "llama", **SMALL, "tie_word_embeddings": True})
    embedding = tensors(tied)[0]
    assert [is_on_stage(embedding, tied, stage, 3) for stage in range(3)] == [True, False, True]
    apart = dataclasses.replace(tied, is_tied=False)
    assert [is_on_stage(embedding, apart, stage, 3) for stage in range(3)] == [True, False, False]
    names = [
        spec.name for spec, _ in rank_tensors(tied, traits("embedded"), Layout.parse("p3"), (0, 0, 2, 0))
    ]
    assert names[0] == "model.embed_tokens.weight"
    assert names[-1] == "model.norm.weight"
