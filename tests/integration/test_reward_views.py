"""Reward models of Hugging Face in a recipe: with a tokenizer of their own, and what a plan refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from runs import TINY, run, steps_of
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedTokenizerFast,
)

from hflow.base.errors import ConfigError, RecipeError
from hflow.data.text.tokenizer import character_tokenizer
from hflow.launch.planning.compile import plan
from hflow.launch.planning.read_recipe import read_recipe
from hflow.report.text.plan.data import samples_section

RECIPE = '''"""A reward model scores the text of the actor."""

import json
from pathlib import Path

from hflow import Dataset, Model, Recipe, Text, compute, nodes, use

train = Dataset("train", prompt=Text, answer=Text)
actor = Model("actor", trainable=True)
rm = Model("rm", head="score", trainable=TRAINABLE)


@compute(per="sample", on="actor_gen")
def noted(prompt: str, completion: str, reward: float, *, file: str = "") -> float:
    with Path(file).open("a") as notes:
        notes.write(json.dumps([prompt, completion, reward]) + "\\n")
    return reward


recipe = Recipe(
    "views",
    train,
    [
        use(nodes.actor_gen, actor, group=2),
        use(nodes.reward_view, rm),
        use(nodes.rew_inf, rm, on="STREAM"),
        noted,
        nodes.group_advantage,
        use(nodes.actor_train, actor, prox="none"),
    ],
)
'''
SIZES = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("rm"))


def checkpoint(path: Path, kind: Any = AutoModelForSequenceClassification, **changes: Any) -> Path:
    torch.manual_seed(1)
    kind.from_config(AutoConfig.for_model(**{**SIZES, "num_labels": 1, **changes})).save_pretrained(path)
    tokenizer = character_tokenizer("<>usreaitn+=0123456789")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    return path


def recipe_in(directory: Path, stream: str = "reward_view", trainable: bool = False) -> Path:
    file = directory / "views.py"
    file.write_text(RECIPE.replace("STREAM", stream).replace("TRAINABLE", str(trainable)))
    return file


def settings(model: Path) -> list[str]:
    return [*TINY, f"+models.rm.path={model}", "workers=inproc", "cluster=cpu-1x1", "batch=2", "steps=2"]


def test_text_is_encoded_again_for_a_reward_model_with_another_tokenizer(
    reward_model: Path, tmp_path: Path
) -> None:
    notes = tmp_path / "notes"
    overrides = [*settings(reward_model), f"nodes.noted.file={notes}"]
    summary = run(recipe_in(tmp_path), tmp_path / "runs", *overrides)
    assert len(steps_of(summary)) == 2
    model = AutoModelForSequenceClassification.from_pretrained(reward_model).eval()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(reward_model)
    rows = [json.loads(line) for line in notes.read_text().splitlines()]
    assert len(rows) == 8
    for prompt, completion, reward in rows:
        talk = [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
        ids = tokenizer.apply_chat_template(talk, return_dict=True, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            np.testing.assert_allclose(reward, model(input_ids=ids).logits.item(), atol=1e-5)


def test_the_plan_says_what_is_encoded_again(reward_model: Path, tmp_path: Path) -> None:
    made = plan(recipe_in(tmp_path), settings(reward_model))
    (*_, sentence, _) = samples_section(made, 120).body
    assert "reward_view is the text of actor_gen, encoded again with the tokenizer of rm" in str(sentence)


def test_tokens_of_another_tokenizer_are_refused(reward_model: Path, tmp_path: Path) -> None:
    with pytest.raises(
        RecipeError, match=r"rew_inf: model 'rm' would read .*List use\(nodes.reward_view, rm\)"
    ):
        read_recipe(recipe_in(tmp_path, stream="actor_gen"), settings(reward_model))


def test_checkpoints_without_the_declared_head_are_refused(tmp_path: Path) -> None:
    recipe = recipe_in(tmp_path)
    two = checkpoint(tmp_path / "two", num_labels=2)
    with pytest.raises(ConfigError, match=r"is a LlamaForSequenceClassification with 2 labels"):
        read_recipe(recipe, settings(two))
    language_model = checkpoint(tmp_path / "lm", AutoModelForCausalLM)
    with pytest.raises(
        ConfigError, match=r"models.rm.path: .* is a LlamaForCausalLM, which has no score head"
    ):
        read_recipe(recipe, settings(language_model))
    one = checkpoint(tmp_path / "one")
    with pytest.raises(ConfigError, match=r"models.actor.path: .* cannot generate"):
        read_recipe(recipe, [*settings(one), f"models.actor.path={one}"])
