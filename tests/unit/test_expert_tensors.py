"""Experts' weights under hflow's names, in checkpoints, and in the modules of transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from megatron_kit import MIXTRAL, QWEN3_MOE, Case, model
from safetensors import safe_open
from safetensors.torch import load_file

from hflow.models.expert_tensors import (
    file_names,
    file_shapes,
    file_tensors,
    path_of,
    read_stacked,
    stacked_views,
)

GATE = "model.layers.1.mlp.experts.gate_proj.weight"


def test_names_of_single_experts():
    assert file_names("qwen3_moe", GATE, 2) == [
        "model.layers.1.mlp.experts.0.gate_proj.weight",
        "model.layers.1.mlp.experts.1.gate_proj.weight",
    ]
    assert file_names("qwen3_moe", "model.layers.1.mlp.gate.weight", 2) == ["model.layers.1.mlp.gate.weight"]
    assert file_names("mixtral", GATE, 1) == ["model.layers.1.block_sparse_moe.experts.0.w1.weight"]
    assert path_of("mixtral", "model.layers.1.block_sparse_moe.gate") == "model.layers.1.mlp.gate"
    assert file_shapes("qwen3_moe", {GATE: (2, 3, 4), "model.norm.weight": (4,)}) == {
        "model.layers.1.mlp.experts.0.gate_proj.weight": (3, 4),
        "model.layers.1.mlp.experts.1.gate_proj.weight": (3, 4),
        "model.norm.weight": (4,),
    }


@pytest.mark.parametrize("architecture", [QWEN3_MOE, MIXTRAL])
def test_views_of_a_module_are_the_tensors_of_its_checkpoint(architecture, tmp_path: Path):
    family = architecture["model_type"]
    made, _ = model(Case("experts", architecture=architecture))
    made.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    views = dict(stacked_views(family, made.named_parameters()))
    found = file_tensors(family, views)
    assert found.keys() == saved.keys()
    assert all(torch.equal(found[name], saved[name]) for name in saved)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        slices = {name: file.get_slice(name) for name in saved}
        box = (slice(1, 3), slice(4, 9), slice(0, 32))
        assert torch.equal(read_stacked(family, slices, GATE, box), views[GATE][box])
        assert torch.equal(
            read_stacked(family, slices, "model.norm.weight", (slice(2, 5),)), saved["model.norm.weight"][2:5]
        )
    views[GATE].zero_()
    fused = made.get_parameter("model.layers.1.mlp.experts.gate_up_proj")
    rows = len(fused[0]) // 2
    assert not fused[:, :rows].any()
    assert fused[:, rows:].all()


def test_other_families_keep_their_names():
    named = [("model.layers.0.mlp.experts.gate_up_proj", torch.zeros(2, 4, 4))]
    assert [name for name, _ in stacked_views("gpt_oss", named)] == [named[0][0]]
