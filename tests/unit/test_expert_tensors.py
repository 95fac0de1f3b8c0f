"""Experts' weights under hflow's names, in checkpoints, and in the modules of transformers."""

from __future__ import annotations

from pathlib import Path

import torch
from megatron_kit import QWEN3_MOE, Case, model
from safetensors import safe_open
from safetensors.torch import load_file

from hflow.models.expert_tensors import (
    file_names,
    file_shapes,
    file_tensors,
    read_stacked,
    stacked_views,
)

GATE = "model.layers.1.mlp.experts.gate_proj.weight"


def test_names_of_single_experts():
    assert file_names(GATE, 2) == [
        "model.layers.1.mlp.experts.0.gate_proj.weight",
        "model.layers.1.mlp.experts.1.gate_proj.weight",
    ]
    assert file_names("model.layers.1.mlp.gate.weight", 2) == ["model.layers.1.mlp.gate.weight"]
    assert file_shapes({GATE: (2, 3, 4), "model.norm.weight": (4,)}) == {
        "model.layers.1.mlp.experts.0.gate_proj.weight": (3, 4),
        "model.layers.1.mlp.experts.1.gate_proj.weight": (3, 4),
        "model.norm.weight": (4,),
    }


def test_views_of_a_module_are_the_tensors_of_its_checkpoint(tmp_path: Path):
    made, _ = model(Case("experts", architecture=QWEN3_MOE))
    made.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    views = dict(stacked_views("qwen3_moe", made.named_parameters()))
    found = file_tensors(views)
    assert found.keys() == saved.keys()
    assert all(torch.equal(found[name], saved[name]) for name in saved)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        slices = {name: file.get_slice(name) for name in saved}
        box = (slice(1, 3), slice(4, 9), slice(0, 32))
        assert torch.equal(read_stacked(slices, GATE, box), views[GATE][box])
        assert torch.equal(
            read_stacked(slices, "model.norm.weight", (slice(2, 5),)), saved["model.norm.weight"][2:5]
        )
    views[GATE].zero_()
    fused = made.get_parameter("model.layers.1.mlp.experts.gate_up_proj")
    assert not fused[:, :24].any()
    assert fused[:, 24:].all()


def test_other_families_keep_their_names():
    named = [("model.layers.0.mlp.experts.gate_up_proj", torch.zeros(2, 4, 4))]
    assert [name for name, _ in stacked_views("gpt_oss", named)] == [named[0][0]]
