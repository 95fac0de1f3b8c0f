"""Runs that need to know which text a token makes: rewards of steps, and a teacher with another tokenizer."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from runs import TINY, run, steps_of
from tokenizers import Tokenizer, decoders, models
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

LETTERS = "<>usreaitn+=0123456789"
NAMES = ("<pad>", "<bos>", "<eos>")
PAIRS = [(a, b) for a in "0123456789" for b in "0123456789"]
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}"
)
SIZES = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
NOTED = """
import json
from pathlib import Path

from hflow import *

train = Dataset("train", prompt=Text, answer=Text)
actor = Model("actor", trainable=True)


def note(file, *values):
    with Path(file).open("a") as notes:
        notes.write(json.dumps(values) + "\\n")
    return 0.0
"""
TEACHER = (
    NOTED
    + """
teacher = Model("teacher")


@compute(per="sample")
def noted(prompt: str, completion: str, token_ends: list[int], behav_logprobs: list[float],
          advantages: list[float], spans: dict, *, file: str = "") -> float:
    return note(file, prompt, completion, token_ends, behav_logprobs, advantages, spans)


recipe = Recipe("teacher", train, [
    use(nodes.traced_gen, actor, group=2, max_tokens=6),
    use(nodes.aligned_view, teacher),
    use(nodes.span_inf, teacher, on="aligned_view"),
    use(nodes.span_advantage, on="traced_gen"),
    use(noted, on="traced_gen"),
    use(nodes.actor_train, actor, on="traced_gen", prox="none"),
])
"""
)
STEPS = (
    NOTED
    + """
prm = Model("prm", head="score")


@compute(per="sample")
def noted(completion: str, token_ends: list[int], token_reward: list[float], *, file: str = "") -> float:
    return note(file, completion, token_ends, token_reward)


recipe = Recipe("steps", train, [
    use(nodes.traced_gen, actor, group=2, max_tokens=12),
    use(nodes.step_ends, delimiter="1"),
    use(nodes.step_inf, prm),
    noted,
    ADVANTAGE,
    use(nodes.actor_train, actor, prox="none"),
])
"""
)


def teacher(path: Path, template: str | None = TEMPLATE) -> Path:
    """Save a teacher whose tokens are letters and pairs of digits."""
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**SIZES)).save_pretrained(path)
    texts = [*NAMES, *LETTERS, *(a + b for a, b in PAIRS)]
    core = Tokenizer(models.BPE({text: i for i, text in enumerate(texts)}, PAIRS))
    core.decoder = decoders.Fuse()
    core.add_special_tokens(list(NAMES))
    built = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>")
    built.chat_template = template
    built.save_pretrained(path)
    return path


def notes_of(recipe: str, tmp_path: Path, *changes: str) -> list[list]:
    file, notes = tmp_path / "spans.py", tmp_path / "notes"
    file.write_text(recipe)
    overrides = ["workers=inproc", "cluster=cpu-1x1", "batch=4", "steps=2", f"nodes.noted.file={notes}"]
    summary = run(file, tmp_path / "runs", *TINY[:3], *overrides, *changes)
    assert len(steps_of(summary)) == 2
    return [json.loads(line) for line in notes.read_text().splitlines()]


@pytest.mark.parametrize("template", [TEMPLATE, None])
def test_a_teacher_with_another_tokenizer_scores_the_same_text(template, tmp_path):
    path = teacher(tmp_path / "teacher", template)
    rows = notes_of(TEACHER, tmp_path, f"+models.teacher.path={path}")
    model = AutoModelForCausalLM.from_pretrained(path).eval()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(path)
    sizes = []
    for prompt, completion, ends, behav, advantages, spans in rows:
        asked = [{"role": "user", "content": prompt}]
        talk = [*asked, {"role": "assistant", "content": completion}]
        if template:
            text = tokenizer.apply_chat_template(talk, tokenize=False)
            start = text.rindex(">" + completion + "<eos>") + 1
        else:
            text, start = prompt + completion + "<eos>", len(prompt)
        before, after = (
            tokenizer(x, add_special_tokens=False)["input_ids"] for x in (text[:start], text[start:])
        )
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([before + after])).logits[0, len(before) - 1 : -1]
        logprobs = logits.log_softmax(-1).gather(1, torch.tensor(after)[:, None])[:, 0].numpy()
        pieces = [tokenizer.decode([token]) for token in after[:-1]]
        # The student has a token for each character, so the teacher's tokens are the spans.
        bounds = spans["student"]
        texts = np.cumsum([0, *map(len, pieces)]).tolist()
        assert [ends[place - 1] for place in bounds[1 : len(texts)]] == texts[1:]
        has_ended = ends[-1] == len(completion) + 1
        assert len(bounds) == len(texts) + has_ended, "a cut answer has no end of turn"
        assert (bounds[0], bounds[-1]) == (len(prompt) + 1, len(ends)), "behind the prompt and its <bos>"
        sizes += map(len, pieces)
        for i, (first, last) in enumerate(itertools.pairwise(bounds)):
            wanted = logprobs[i] - sum(behav[first:last])
            np.testing.assert_allclose(advantages[first:last], wanted, atol=1e-4)
        assert not any(advantages[: bounds[0]])
    assert {1, 2} <= set(sizes)


@pytest.mark.parametrize("advantage", ["nodes.returns_to_go", "nodes.turn_advantage"])
def test_rewards_of_steps_are_scores_of_their_last_tokens(advantage, tmp_path):
    rows = notes_of(STEPS.replace("ADVANTAGE", advantage), tmp_path, "+model@models.prm=tiny-qwen2")
    num_steps = 0
    for completion, token_ends, reward in rows:
        marked = np.flatnonzero(reward)
        ends = [i for i, letter in enumerate(completion) if letter == "1"]
        if completion and not completion.endswith("1"):
            ends.append(len(completion) - 1)
        num_steps += len(ends)
        assert [token_ends[i] - 1 for i in marked] == ends
        assert all(0 < reward[i] < 1 for i in marked)
    assert num_steps > len(rows)
