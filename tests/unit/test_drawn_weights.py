"""Random weights that are drawn one parameter at a time are those that transformers draws all at once."""

from __future__ import annotations

import pytest
import torch
import torch_kit as kit
from transformers import AutoConfig, AutoModelForCausalLM

from hflow.models.drawn_weights import drawn_weights

UNTIED = {"tie_word_embeddings": False, "pad_token_id": 3}
FAMILIES = {
    "qwen2": {},
    "qwen2 untied, with a padding token": UNTIED,
    "qwen3_moe": kit.MIXED,
    "llama": UNTIED,
    "gemma2": {"head_dim": 8, "pad_token_id": 0},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "bos_token_id": 1, "eos_token_id": 1},
    "mamba": {"state_size": 4, "eos_token_id": 1},  # draws numbers that are not parameters
}


@pytest.mark.parametrize("name", FAMILIES)
def test_every_bit_is_the_same(name):
    family = name.partition(" ")[0]
    config = AutoConfig.for_model(**kit.ARCHITECTURE | FAMILIES[name] | {"model_type": family})
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    state = torch.get_rng_state()
    drawn = list(drawn_weights(config, 5))
    assert torch.equal(torch.get_rng_state(), state)
    wanted = dict(model.named_parameters())
    assert sorted(name for name, _ in drawn) == sorted(wanted)
    assert all(torch.equal(wanted[name], tensor) for name, tensor in drawn)
