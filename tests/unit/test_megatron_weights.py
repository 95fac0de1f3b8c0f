"""The blocks of a checkpoint that a rank holds are those of the plan, and only they are read."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import megatron_kit as kit
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from late_megatron import megatron
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from hflow.base.errors import BackendError
from hflow.models.host_copy import HostCopies
from hflow.models.settings import ModelSettings, RankPosition
from hflow.planner.plan.traits import traits
from hflow.planner.weights.sharding import rank_tensors
from hflow.shapes.architectures import read_shape
from hflow.shapes.layout import Layout
from hflow.shapes.model_shape import (
    AdapterShape,
    Experts,
    ModelShape,
    adapter_targets,
    expert_targets,
    outer_targets,
    tensors,
)
from hflow.training.fsdp.backend import TorchModel
from hflow.training.megatron.hf_mapping import (
    ShardPosition,
    backbone_shapes,
    padded_vocab_size,
    rank_parameters,
)
from hflow.training.megatron.supported_models import supported_shape
from hflow.types.kernels import LayerKernels
from hflow.types.tensor_slices import Box

if TYPE_CHECKING:
    from hflow.training.megatron.model import Stage

MEGATRON = traits("megatron")
CASE = kit.Case("model", architecture=kit.QWEN2 | kit.UNTIED)


def shape_of(architecture: Mapping[str, Any], head: str = "lm") -> ModelShape:
    options = {key: value for key, value in architecture.items() if key != "model_type"}
    return supported_shape(AutoConfig.for_model(architecture["model_type"], **options), head)


def test_layers_of_transformer_engine_have_other_names_and_the_same_tensors():
    """A norm belongs to the linear layer after it, but before experts and copied key-value heads."""
    shape = shape_of(kit.QWEN3_MOE | {"num_hidden_layers": 2, "mlp_only_layers": [0]})

    def rows(num_tensor: int, kernels: LayerKernels) -> dict[str, set[str]]:
        parameters = rank_parameters(shape, ShardPosition(0, num_tensor), kernels)
        return {row.name: {part.tensor for part in row.parts} for row in parameters}

    torch_names, names = (rows(2, kernels) for kernels in LayerKernels)
    assert set().union(*torch_names.values()) == set().union(*names.values())
    layer = "decoder.layers."
    assert names[f"{layer}0.self_attention.linear_qkv.layer_norm_weight"] == {
        "model.layers.0.input_layernorm.weight"
    }
    assert names[f"{layer}0.mlp.linear_fc1.layer_norm_weight"] == {
        "model.layers.0.post_attention_layernorm.weight"
    }
    assert f"{layer}1.pre_mlp_layernorm.weight" in names
    experts = {name for name in names.keys() - torch_names.keys() if ".experts." in name}
    assert experts == {f"{layer}1.mlp.experts.linear_fc{x}.weight{i}" for x in (1, 2) for i in range(4)}
    assert f"{layer}0.input_layernorm.weight" in rows(4, LayerKernels.TRANSFORMER_ENGINE)


# ------------------------------------------------------------------------------- the plan's boxes
def boxes(shape: ModelShape, place: ShardPosition, kernels: LayerKernels) -> dict[str, list[Box]]:
    """Return a rank's blocks of each tensor, neighbours as one box."""
    found: dict[str, list[Box]] = {}
    for row in rank_parameters(shape, place, kernels):
        for part in row.parts:
            if part.length:
                held, box = found.setdefault(part.tensor, []), part.box
                held[-1:] = joined(held[-1], box) if held else [box]
    return found


def joined(one: Box, other: Box) -> list[Box]:
    """Return two boxes, as one if the second continues the first on one axis."""
    differ = [axis for axis, (a, b) in enumerate(zip(one, other, strict=True)) if a != b]
    if len(differ) == 1 and one[differ[0]][1] == other[differ[0]][0]:
        return [tuple((a, d) for (a, _), (_, d) in zip(one, other, strict=True))]
    return [one, other]


LAYOUTS = ["t2p2", "t4p3", "p5", "p4", "t2p3", "t1", "d2c2e4", "d4t2p2e2"]


@pytest.mark.parametrize("kernels", LayerKernels)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("head", ["lm", "value"])
@pytest.mark.parametrize(
    "architecture",
    [
        kit.QWEN2 | {"num_hidden_layers": 5},
        kit.QWEN2 | kit.UNTIED | {"num_hidden_layers": 5, "num_key_value_heads": 1},
        kit.QWEN3 | {"num_hidden_layers": 7, "num_key_value_heads": 4},
        kit.LLAMA | {"num_hidden_layers": 5, "mlp_bias": True, "vocab_size": 1000},
        kit.MISTRAL | {"num_hidden_layers": 6},
        kit.QWEN3_MOE | {"num_hidden_layers": 5, "mlp_only_layers": [0]},
        kit.GLM4_MOE | {"num_hidden_layers": 6},
        kit.DEEPSEEK | {"num_hidden_layers": 6},
        kit.GEMMA3 | {"num_hidden_layers": 6},
        kit.GLM4 | {"num_hidden_layers": 5},
    ],
)
def test_a_rank_holds_the_boxes_of_the_plan(architecture, head, layout, kernels):
    """With layers that divide unevenly, copied key-value heads and a padded vocabulary."""
    shape, grid = shape_of(architecture, head), Layout.parse(layout)
    assert shape == read_shape(architecture, head)
    check_boxes(shape, grid, kernels)
    others = (*expert_targets(shape), *outer_targets(shape)) if kernels is LayerKernels.TORCH else ()
    for targets in ((*adapter_targets(shape), *others), ("k_proj", "down_proj")):
        check_boxes(replace(shape, adapter=AdapterShape(4, targets)), grid, kernels)


def check_boxes(shape: ModelShape, grid: Layout, kernels: LayerKernels) -> None:
    for stage in range(grid.pipe):
        for d, t, p, c in grid.stage_coords(stage):
            planned: dict[str, list[Box]] = {}
            for spec, box in rank_tensors(shape, MEGATRON, grid, (d, t, p, c)):
                planned.setdefault(spec.name, []).append(box)
            expert = grid.expert_index(d, c)
            place = ShardPosition(t, grid.tensor, p, grid.pipe, expert, grid.expert)
            assert boxes(shape, place, kernels) == planned


def test_the_vocabulary_is_padded_as_planned():
    """300 tokens on 2 ranks: a multiple of 2 x 128, so 512, of which rank 1 has 300 - 256 = 44."""
    assert padded_vocab_size(300, 2) == 512
    shape = shape_of(kit.QWEN2)
    (embedding,) = [r for r in rank_parameters(shape, ShardPosition(1, 2)) if r.name.startswith("embedding")]
    assert embedding.shape == (256, 32)
    assert embedding.parts[0].span == (256, 300)
    assert padded_vocab_size(151936, 8) == 152576  # 149 x 1024


def test_the_first_stages_have_one_layer_more():
    names = [
        {r.name for r in rank_parameters(shape_of(kit.QWEN2), ShardPosition(stage=p, num_stages=2))}
        for p in (0, 1)
    ]
    assert "decoder.layers.1.mlp.linear_fc2.weight" in names[0]
    assert "decoder.layers.1.mlp.linear_fc2.weight" not in names[1]
    assert "decoder.layers.0.mlp.linear_fc2.weight" in names[1]


def test_tensors_are_those_of_the_plan():
    others = (kit.MISTRAL, kit.QWEN3_MOE | {"decoder_sparse_step": 2}, kit.GLM4_MOE, kit.DEEPSEEK, kit.GEMMA3)
    for architecture in (kit.QWEN2, kit.QWEN3 | kit.UNTIED, kit.LLAMA | {"mlp_bias": True}, *others):
        planned = {spec.name: spec.shape for spec in tensors(read_shape(architecture))}
        assert backbone_shapes(shape_of(architecture)) == planned


@st.composite
def divided(draw: st.DrawFn) -> tuple[ModelShape, int, int, int]:
    """Draw sizes, and numbers of tensor ranks, stages and expert ranks that divide them."""
    tensor = draw(st.sampled_from([1, 2, 3, 4]))
    expert, num_layers = draw(st.sampled_from([1, 1, 2, 3])), draw(st.integers(1, 5))
    experts = Experts(
        num=expert * draw(st.integers(1, 2)),
        per_token=1,
        intermediate=tensor * draw(st.integers(1, 2)),
        first=draw(st.integers(0, num_layers)),
        step=draw(st.integers(1, 2)),
    )
    kv = draw(st.sampled_from([n for n in (1, 2, 3, 4, 6) if n % tensor == 0 or tensor % n == 0]))
    queries = draw(st.integers(1, 3)) * (tensor if kv < tensor else 1)
    head = draw(st.sampled_from(["lm", "value", "score"]))
    shape = ModelShape(
        family="qwen3_moe",
        num_layers=num_layers,
        hidden=6,
        intermediate=tensor * draw(st.integers(1, 4)),
        num_heads=kv * queries,
        num_kv_heads=kv,
        head_dim=4,
        vocab=draw(st.integers(1, 700)),
        is_tied=draw(st.booleans()) and head == "lm",
        has_qkv_bias=draw(st.booleans()),
        has_out_bias=draw(st.booleans()),
        has_mlp_bias=draw(st.booleans()),
        has_qk_norm=draw(st.booleans()),
        head=head,
        experts=experts,
    )
    return shape, tensor, draw(st.integers(1, shape.num_layers)), expert


@given(divided())
def test_ranks_read_every_entry_and_only_their_own(drawn):
    """Without copies, each entry is read once, and parameters are filled except for padding."""
    shape, tensor, pipe, expert = drawn
    counts = {name: torch.zeros(size) for name, size in backbone_shapes(shape).items()}
    for t, p, e in itertools.product(range(tensor), range(pipe), range(expert)):
        for row in rank_parameters(shape, ShardPosition(t, tensor, p, pipe, e, expert)):
            spare = math.prod(row.shape) - sum(math.prod(b - a for a, b in x.box) for x in row.parts)
            assert spare == 0 or "embedding" in row.name or "output_layer" in row.name
            for part in row.parts:
                is_whole = part.length == part.shape[part.axis]
                is_copy = row.is_copy or (is_whole and t > 0) or (e > 0 and not row.is_expert)
                if part.tensor in counts and not is_copy:
                    counts[part.tensor][tuple(slice(*span) for span in part.box)] += 1
    assert all((count == 1).all() for count in counts.values())


def test_padding_is_zero_and_qkv_rows_have_megatrons_order():
    """One key-value head has two query heads: rows are q0 q1 k v of the rank's head, 8 rows each."""
    shape = shape_of(kit.QWEN2)
    rows = rank_parameters(shape, ShardPosition(1, 2))
    values = {row.name: torch.full(row.shape, 7.0) for row in rows}
    whole = {name: torch.randn(shape) for name, shape in backbone_shapes(shape).items()}
    megatron("checkpoint_reader").load_parameters(
        rows, values, lambda part: whole[part.tensor][tuple(slice(*span) for span in part.box)]
    )
    embedding = values["embedding.word_embeddings.weight"]
    assert torch.equal(embedding[:44], whole["model.embed_tokens.weight"][256:])
    assert not embedding[44:].any()
    qkv = values["decoder.layers.0.self_attention.linear_qkv.bias"]
    q, k, v = (whole[f"model.layers.0.self_attn.{x}_proj.bias"] for x in "qkv")
    assert torch.equal(qkv, torch.cat([q[16:32], k[8:16], v[8:16]]))
    gate, up = (whole[f"model.layers.0.mlp.{x}_proj.weight"] for x in ("gate", "up"))
    assert torch.equal(values["decoder.layers.0.mlp.linear_fc1.weight"], torch.cat([gate[24:], up[24:]]))


# ------------------------------------------------------------------------------- reading and writing
def alone(settings: ModelSettings) -> Stage:
    return megatron("model").build_stage(
        settings, megatron("parallel_state").ParallelState.of(RankPosition())
    )


def weights(stage: Stage) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in megatron("weight_export").named_weights(stage)}


@pytest.mark.parametrize("shard", ["1GB", "20KB"])
@pytest.mark.parametrize("file_bytes", [1 << 30, 20_000])
def test_one_file_or_many(tmp_path, shard, file_bytes):
    kit.write_checkpoint(CASE, tmp_path, shard)
    assert (tmp_path / "model" / "model.safetensors").exists() is (shard == "1GB")
    read = weights(alone(kit.settings(CASE, tmp_path)))
    wanted = {name: x.detach() for name, x in kit.model(CASE)[0].named_parameters()}
    assert read.keys() == wanted.keys()
    assert all(torch.equal(read[name], wanted[name]) for name in wanted)
    megatron("hf_export").copy_stage(
        alone(kit.settings(CASE, tmp_path)), tmp_path / "again", HostCopies(), file_bytes
    )()
    assert (tmp_path / "again" / "model.safetensors").exists() is (file_bytes == 1 << 30)
    again = weights(alone(kit.settings(CASE, tmp_path, path=str(tmp_path / "again"))))
    assert all(torch.equal(again[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize(
    ("head", "architecture"),
    [*((head, kit.QWEN3 | kit.UNTIED) for head in ("lm", "value", "score")), ("lm", kit.GLM4_MOE)],
)
def test_both_backends_draw_and_save_the_same_weights(tmp_path, head, architecture):
    """Without a checkpoint; megatron reads what torch saved, and torch what megatron saved."""
    drawn = ModelSettings(name="actor", architecture=architecture, seed=9, head=head)
    wanted = dict(TorchModel(drawn, RankPosition()).weights())
    ours = alone(drawn)
    assert_equal(weights(ours), wanted)
    megatron("hf_export").copy_stage(ours, tmp_path / "ours", HostCopies())()
    saved = ModelSettings(name="actor", path=str(tmp_path / "ours"), head=head)
    theirs = TorchModel(saved, RankPosition())
    assert_equal(dict(theirs.weights()), wanted)
    theirs.save(str(tmp_path / "theirs"))()
    assert_equal(
        weights(alone(ModelSettings(name="actor", path=str(tmp_path / "theirs"), head=head))), wanted
    )


def assert_equal(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_a_critic_starts_from_a_language_model(tmp_path):
    kit.write_checkpoint(CASE, tmp_path)
    critic = weights(alone(kit.settings(CASE, tmp_path, head="value")))
    assert "lm_head.weight" not in critic
    torch_critic = TorchModel(kit.settings(CASE, tmp_path, head="value"), RankPosition())
    assert_equal(critic, dict(torch_critic.weights()))
    with pytest.raises(BackendError, match=r"has no score.weight: it is not a reward model"):
        alone(kit.settings(CASE, tmp_path, head="score", trainable=False))


def rewrite(path: Path, change: Any) -> None:
    found = load_file(path / "model" / "model.safetensors")
    change(found)
    save_file(found, path / "model" / "model.safetensors", metadata={"format": "pt"})


def assert_rejected(path: Path, message: str, **changes: Any) -> None:
    with pytest.raises(BackendError, match=message) as error:
        alone(kit.settings(CASE, path, **changes))
    assert "\n" not in str(error.value)


def test_wrong_tensors_of_a_checkpoint_are_named(tmp_path):
    kit.write_checkpoint(CASE, tmp_path)
    rewrite(tmp_path, lambda found: found.pop("lm_head.weight"))
    assert_rejected(tmp_path, r"model 'actor': checkpoint .* lacks lm_head.weight")
    rewrite(tmp_path, lambda found: found.update({"lm_head.weight": torch.zeros(3, 32)}))
    assert_rejected(tmp_path, "has tensors of other shapes than its config says: lm_head.weight")
    good = {"lm_head.weight": torch.zeros(kit.VOCAB, 32), "model.extra": torch.zeros(1)}
    rewrite(tmp_path, lambda found: found.update(good))
    assert_rejected(tmp_path, "has tensors that the model does not know: model.extra")
    rewrite(tmp_path, lambda found: [found.pop(name) for name in list(found)[:7]])
    assert_rejected(tmp_path, r"lacks .*, .*, .* and \d more")


def test_an_unused_output_matrix_is_ignored(tmp_path):
    """A tied model may have one in its file, and old Llama files have frequencies."""
    tied = kit.Case("model")
    kit.write_checkpoint(tied, tmp_path)
    spare = {
        "lm_head.weight": torch.zeros(kit.VOCAB, 32),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4),
    }
    rewrite(tmp_path, lambda found: found.update(spare))
    assert "lm_head.weight" not in weights(alone(kit.settings(tied, tmp_path)))


def test_a_directory_without_weights_is_rejected(tmp_path):
    kit.write_checkpoint(CASE, tmp_path, "20KB")
    index = tmp_path / "model" / "model.safetensors.index.json"
    next((tmp_path / "model").glob("model-*.safetensors")).unlink()
    assert_rejected(tmp_path, "has no readable weights")
    index.write_text(json.dumps({"metadata": {}}))
    assert_rejected(tmp_path, "has no readable weights")
    index.unlink()
    assert_rejected(tmp_path, "has no readable weights")
