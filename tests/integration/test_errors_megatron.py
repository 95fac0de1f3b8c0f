"""Models and layouts that megatron cannot run, through the command line: one line, and code 2."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import CommandLine
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

RECIPE = """
from hflow import Dataset, Model, Recipe, Text, nodes, use

data = Dataset("train", prompt=Text, answer=Text)
actor = Model("actor", trainable=True)
recipe = Recipe("r", data, [use(nodes.sft_view, actor), use(nodes.sft_train, actor)])
"""
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 30,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
GIVEN = ("+data@data.train=addition", "models.actor.path=model", "models.actor.alphabet='0123456789+='")
PLAN = ("plan", "r.py", *GIVEN)
RUN = ("run", "r.py", *GIVEN, "workers=inproc", "cluster=cpu-1x1", "steps=1", "batch=2")


@pytest.fixture(autouse=True)
def _directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands run in a directory with the recipe and a checkpoint."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.py").write_text(RECIPE)
    write_checkpoint(tmp_path / "model")


def write_checkpoint(directory: Path) -> None:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen2", **SIZES)).save_pretrained(directory)


def change_config(directory: Path, **changes: Any) -> None:
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def change_tensors(directory: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    file = directory / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


# -------------------------------------------------------------------------------- at plan time
@pytest.mark.parametrize(
    ("layout", "changes", "message"),
    [
        (
            "t4",
            {"num_attention_heads": 6, "head_dim": 8},
            "actor@train: 6 heads cannot be split over 4 tensor",
        ),
        (
            "t2",
            {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 8},
            "actor@train: 3 key-value heads cannot be split over 2 tensor ranks; 1 fits: d2t1p1",
        ),
        ("t4", {"intermediate_size": 50}, "actor@train: an intermediate size of 50 cannot be split over 4"),
        ("p4", {}, "actor@train: 2 layers cannot be split over 4 pipeline stages; 2 fits: d2t1p2"),
        ("d2t2p2", {}, "actor@train: layout d2t2p2 needs 8 devices, but group 'all' has 4; d1t2p2 fits"),
        (
            "t8",
            {},
            "actor@train: layout d1t8p1 needs 8 devices, but group 'all' has 4",
        ),
    ],
)
def test_a_layout_that_does_not_fit(
    hflow: CommandLine, tmp_path: Path, layout: str, changes: dict[str, int], message: str
) -> None:
    change_config(tmp_path / "model", **changes)
    keys = ("cluster=cpu-1x4", "models.actor.backend=megatron", f"models.actor.layout={layout}", "batch=8")
    assert message in hflow.fails(*PLAN, *keys)


@pytest.mark.parametrize("layout", ["t4", "d2t2", "t2p2"])
def test_a_vocabulary_is_padded_and_key_value_heads_repeat(hflow: CommandLine, layout: str) -> None:
    keys = ("cluster=cpu-1x4", "models.actor.backend=megatron", f"models.actor.layout={layout}", "batch=8")
    assert hflow.prints(*PLAN, *keys)


def test_a_family_that_megatron_does_not_build(hflow: CommandLine, tmp_path: Path) -> None:
    change_config(tmp_path / "model", model_type="phi3")
    line = hflow.fails(*PLAN, "models.actor.backend=megatron")
    assert "the megatron backend does not build model_type 'phi3' (it builds llama, mistral, qwen2" in line


def test_a_setting_of_another_backend(hflow: CommandLine) -> None:
    line = hflow.fails(*PLAN, "models.actor.sequence_parallel=true")
    assert "models.actor.sequence_parallel is true, but the torch backend has no tensor ranks" in line


# ------------------------------------------------------------------------- before a run begins
@pytest.mark.parametrize("backend", ["torch", "megatron"])
def test_tensors_that_are_missing_or_unknown(hflow: CommandLine, tmp_path: Path, backend: str) -> None:
    run = (*RUN, f"models.actor.backend={backend}")
    lost = "model.layers.1.mlp.up_proj.weight"
    change_tensors(tmp_path / "model", lambda tensors: tensors.pop(lost))
    assert f"model 'actor': checkpoint {tmp_path}/model lacks {lost}" in hflow.fails(*run)
    change_tensors(
        tmp_path / "model", lambda t: t.update({lost: torch.zeros(48, 32), "extra": torch.ones(2)})
    )
    assert "has tensors that the model does not know: extra" in hflow.fails(*run)
    change_tensors(tmp_path / "model", lambda t: (t.pop("extra"), t.update({lost: torch.zeros(40, 32)})))
    assert f"has tensors of other shapes than its config says: {lost}" in hflow.fails(*run)


def test_layers_that_megatron_does_not_compute(hflow: CommandLine, tmp_path: Path) -> None:
    change_config(tmp_path / "model", hidden_act="gelu")
    error = hflow.fails(*RUN, "models.actor.backend=megatron")
    assert "model 'actor': hidden_act 'gelu' is not silu" in error
    assert not (tmp_path / "runs").exists()
