"""What ranks keep and send, beside the plan's figures: real widths, few layers, many fake ranks."""

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import fake_rank_kit as kit
import pytest

from hflow.planner.forecast.communicators import rank_groups
from hflow.planner.plan.traits import traits
from hflow.shapes.layout import Layout

TIED = {
    "model_type": "qwen2",
    "vocab_size": 50_000,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 3,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}
EXPERTS = TIED | {
    "model_type": "qwen3_moe",
    "head_dim": 128,
    "moe_intermediate_size": 768,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}
GLM = EXPERTS | {
    "model_type": "glm4_moe",
    "attention_bias": True,
    "use_qk_norm": True,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
del GLM["num_experts"]
DEEPSEEK = GLM | {
    "model_type": "deepseek_v3",
    "attention_bias": False,
    "num_key_value_heads": 16,
    "q_lora_rank": 768,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
GEMMA = TIED | {"model_type": "gemma3_text", "head_dim": 128, "sliding_window": 512}
LORA = {"lora": {"r": 16, "alpha": 32}}
OF_EXPERTS = {"lora": LORA["lora"] | {"targets": ["q_proj", "experts.gate_up_proj", "experts.down_proj"]}}
CASES = [
    kit.Case("torch", "d64", 5, TIED),
    kit.Case("megatron", "d32t2", 0, TIED | {"tie_word_embeddings": False}),
    kit.Case("megatron", "d4t4p2", 0, TIED, {"sequence_parallel": True, "activation_checkpointing": True}),
    kit.Case("megatron", "d4t2p2c2", 31, TIED),
    kit.Case("megatron", "d8t2c2e8", 0, EXPERTS),
    kit.Case("megatron", "d4p2e4", 7, EXPERTS, {"activation_checkpointing": True}),
    kit.Case("megatron", "d8t2c2e8", 0, GLM),
    kit.Case("megatron", "d4t2c2", 0, GEMMA, {"sequence_parallel": True}),
    kit.Case("megatron", "d8t2c2e8", 0, DEEPSEEK),
    kit.Case("megatron", "d4t2p2e4", 5, DEEPSEEK | {"q_lora_rank": None}, {"activation_checkpointing": True}),
    kit.Case("torch", "d64r4", 21, TIED),
    kit.Case(
        "megatron", "d4t4p2", 0, TIED, LORA | {"sequence_parallel": True, "activation_checkpointing": True}
    ),
    kit.Case("megatron", "d8t2c2e8", 0, EXPERTS, LORA),
    kit.Case("megatron", "d8t4", 3, TIED, {"lora": {"r": 16, "dora": True}}),
    kit.Case("torch", "d16", 5, EXPERTS, OF_EXPERTS),
    *(
        kit.Case("torch", layout, 21, TIED, {"zero_stage": stage, "tokens_per_microbatch": 512})
        for stage, layout in ((3, "d64"), (2, "d64"), (1, "d64r4"))
    ),
]
IDS = [
    f"{case.backend} {case.layout} {case.architecture['model_type']} {case.settings.get('zero_stage', '')}"
    f"{' adapters' if 'lora' in case.settings else ''}"
    for case in CASES
]


@pytest.fixture(scope="module")
def found() -> list[kit.Figures]:
    """What the ranks keep and send. One process acts as each of them in turn."""
    command = [sys.executable, kit.__file__, *map(kit.as_json, CASES)]
    paths = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    env = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.long
@pytest.mark.parametrize("index", range(len(CASES)), ids=IDS)
def test_a_rank_keeps_and_sends_what_the_plan_says(index: int, found):
    assert kit.differences(CASES[index], found[index]) == []


@pytest.mark.long
def test_every_difference_is_found(found):
    case, right = CASES[1], found[1]
    for kind, (number, size) in right["collectives"].items():
        if kind == kit.OTHERS:
            continue
        for wrong in ([number + 1, size], [number, round(size * 1.02)]):
            changed = copy.deepcopy(right)
            changed["collectives"][kind] = wrong
            (text,) = kit.differences(case, changed)
            assert text.startswith(f"{kind}: planned [")
    unplanned = right | {"collectives": right["collectives"] | {"reduce": [1, 10]}}
    assert kit.differences(case, unplanned) == ["reduce: planned [0, 0], found [1, 10] (number, bytes)"]
    large = right | {"collectives": right["collectives"] | {kit.OTHERS: [1, 2 * kit.MAX_OTHERS]}}
    assert len(kit.differences(case, large)) == 1
    assert kit.differences(case, right | {"groups": 4}) == ["groups: planned 3, found 4"]


def test_the_groups_of_a_rank():
    megatron = traits("megatron")

    def of(layout: str, rank: int = 0) -> set[tuple[int, ...]]:
        groups = rank_groups(Layout.parse(layout), megatron, None, rank)
        return {tuple(sorted(group)) for group in groups}

    assert of("d1") == set()
    assert of("d4") == {(0, 1, 2, 3)}
    assert of("d2t2", 3) == {(0, 1, 2, 3), (2, 3), (1, 3)}
    # Stages of two ranks each, of which the first and the last share an embedding.
    assert of("d2p3", 1) == {tuple(range(6)), (0, 1), (1, 3, 5), (1, 5)}
    assert of("d2p3", 2) == {tuple(range(6)), (2, 3), (0, 2, 4)}
    # Neighbours divide the experts, and every second rank has the same ones.
    assert of("d4e2") == {(0, 1, 2, 3), (0, 1), (0, 2)}
    assert rank_groups(Layout.parse("d4"), traits("torch"), None, 2) == {frozenset(range(4))}
    replicated = rank_groups(Layout.parse("d4r2"), traits("torch"), None, 2)
    assert replicated == {frozenset(range(4)), frozenset((2, 3)), frozenset((0, 2))}
