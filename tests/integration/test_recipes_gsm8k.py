"""The recipes of GSM8K run as they are: questions, chat template, answers, rewards and the evaluation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import ROOT, largest_difference, run, steps_of, weights_of
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from hflow.runtime.saving.run_directory import read_metrics

ROWS = ROOT / "recipes" / "gsm8k" / "example.jsonl"
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
SETTINGS = [
    f"data.train.path={ROWS}",
    "data.train.limit=2",
    f"data.heldout.path={ROWS}",
    "workers=inproc",
    "cluster=cpu-1x1",
    "placement=null",
    "steps=2",
    "models.actor.dtype=fp32",
    "models.actor.architecture=null",
    "models.actor.optim.lr=1e-3",
    "models.actor.gen.engine=embedded",
    "models.actor.gen.max_model_len=400",
    "models.actor.gen.max_running=64",
    "nodes.chat_gen.max_tokens=16",
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny chat model that answers every question with `#### 3` or `#### 7`, or badly formed.

    Its attention adds nothing, so what it has learned from answers alone holds after any question.
    """
    torch.manual_seed(0)
    directory = tmp_path_factory.mktemp("model")
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(directory)
    sizes = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    kind = {"model_type": "qwen2", "num_key_value_heads": 2, "max_position_embeddings": 512}
    ids = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**kind, **sizes, **ids))
    for layer in model.model.layers:
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight).requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    answers = [f"\n######## {digit}<|im_end|>" for digit in "37"]
    batch = tokenizer(answers, return_tensors="pt")["input_ids"]
    for _ in range(100):
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(directory)
    return directory


def byte_tokenizer() -> Any:
    """A tokenizer of bytes with the chat template and the special tokens of Qwen2.5."""
    words = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    core = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    names = {"pad_token": SPECIAL[0], "eos_token": SPECIAL[2], "additional_special_tokens": [SPECIAL[1]]}
    tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=core, **names)  # type: ignore[no-untyped-call]
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("grpo", ["batch=8"]),
        pytest.param(
            *("grpo_async", ["batch=8", "cluster=cpu-1x2", "placement='actor=0 actor.gen=1'"]),
            marks=pytest.mark.long,
        ),
        pytest.param("ppo", ["batch=32"], marks=pytest.mark.long),
    ],
)
def test_two_steps_of_a_recipe(name: str, changes: list[str], checkpoint: Path, tmp_path: Path) -> None:
    path = f"models.actor.path={checkpoint}"
    summary = run(f"recipes/gsm8k/{name}.py", tmp_path, *SETTINGS, path, *changes)
    assert (summary.reason, summary.steps) == ("done", 2)
    rows = steps_of(summary)
    # The answers to the two questions are 7 and 3.
    assert all(0 < row["chat_gen/reward"] < 0.6 for row in rows)
    assert all(row["actor_train/grad_norm"] > 0 for row in rows)
    assert largest_difference(load_file(checkpoint / "model.safetensors"), weights_of(summary)) > 1e-4

    samples = texts(summary.directory / "samples" / "step-2.jsonl")
    trained = [sample for sample in samples if sample["stream"] == "chat_gen"]
    questions = [json.loads(line)["question"] for line in ROWS.read_text().splitlines()]
    for sample in trained:
        prompt = sample["turns"][0]["text"]
        assert prompt.startswith(
            '<|im_start|>system\nReason step by step. Write the final answer, a number, after "####"'
        )
        assert any(
            prompt.endswith(f"<|im_start|>user\n{q}<|im_end|>\n<|im_start|>assistant\n")
            for q in questions[:2]
        )
    evaluations = [
        row for row in read_metrics(summary.directory / "metrics.jsonl") if "eval_gen/accuracy" in row
    ]
    assert evaluations
    assert all(0 <= row["eval_gen/accuracy"] <= 0.25 for row in evaluations)


def texts(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]
