"""Mistakes, made through the command line: each ends in one line that says what to change, and code 2."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from command_line import CommandLine
from transformers import AutoConfig, AutoModelForCausalLM

from hflow.launch import plan

FAST = ["workers=inproc", "cluster=cpu-1x1", "steps=2", "batch=2", "schedule.max_refused_per_step=3"]
TINY = "+model@models.actor=tiny-qwen2"
ADDITION = "+data@data.train=addition"

HEAD = """
import os, sys, threading, time
from hflow import *
from hflow import compute, encode, generate, infer, nodes, train, use

data = Dataset("train", prompt=Text, answer=Text)
actor = Model("actor", trainable=True)
"""
SFT = HEAD + 'recipe = Recipe("r", data, [use(nodes.sft_view, actor), use(nodes.sft_train, actor)])\n'
GENERATED = "use(nodes.actor_gen, actor, group=2, max_tokens=3)"


def grpo(*nodes: str, source: str = GENERATED) -> str:
    listed = ", ".join([source, *nodes, "use(nodes.actor_train, actor, prox='none')"])
    return f'recipe = Recipe("r", data, [{listed}])\n'


def score(body: str, options: str = "", prefix: str = "") -> str:
    """A recipe whose reward does `body`."""
    return (
        HEAD
        + f'@compute(per="sample", returns="reward"{options})\n'
        + f"{prefix}def score(completion: str, answer: str) -> float:\n    {body}\n\n"
        + grpo("score", "nodes.group_advantage")
    )


def batch_body(body: str) -> str:
    """A recipe whose advantages do `body`."""
    return (
        HEAD
        + '@compute(returns="advantages")\n'
        + f"def adv(num_tokens: PerSequence, seqs: Sequences) -> PerSequence:\n    {body}\n\n"
        + grpo("adv")
    )


def inferred(body: str) -> str:
    return (
        HEAD
        + f'@infer(actor, returns="advantages")\ndef look(out: Output) -> PerToken:\n    {body}\n\n'
        + grpo("look")
    )


def loss(body: str) -> str:
    return (
        HEAD
        + '@train(actor, reduce="token-mean")\n'
        + f"def learn(out: Output, seqs: Sequences) -> PerToken:\n    {body}\n\n"
        + 'recipe = Recipe("r", data, [use(nodes.sft_view, actor), learn])\n'
    )


def episode(body: str, options: str = "") -> str:
    return (
        HEAD
        + f"@generate(actor, group=2, max_tokens=3{options})\n"
        + f"async def talk(engine: Engine, prompt: str) -> Trajectory:\n    {body}\n\n"
        + '@compute(per="sample", returns="reward")\ndef score(answer: str) -> float:\n    return 1.0\n\n'
        + grpo("score", "nodes.group_advantage", source="talk")
    )


def encoded(body: str) -> str:
    return (
        HEAD
        + "@encode(actor)\n"
        + f"def view(tokenizer: Tokenizer, prompt: str, answer: str) -> Trajectory:\n    {body}\n\n"
        + 'recipe = Recipe("r", data, [view, use(nodes.sft_train, actor)])\n'
    )


Cli = Callable[..., str]


@pytest.fixture
def fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hflow: CommandLine) -> Cli:
    """Run a recipe's text through the command line in this process; return its one line of complaint."""
    monkeypatch.chdir(tmp_path)

    def attempt(text: str, *overrides: str, command: str = "run") -> str:
        (tmp_path / "r.py").write_text(text)
        return hflow.fails(command, "r.py", *FAST, *overrides)

    return attempt


# ----------------------------------------------------------------- before anything starts
@pytest.mark.parametrize(
    ("text", "override", "message"),
    [
        (
            SFT,
            "models.actor.architecture.vocab_size=8",
            "models.actor: the tokenizer has 16 tokens, but the model's vocab_size is only 8. Set "
            "models.actor.architecture.vocab_size=16 or more",
        ),
        (
            score("return 1.0"),
            "models.actor.architecture.max_position_embeddings=3",
            "nodes.actor_gen.max_tokens is 3, but max_position_embeddings of actor is 3",
        ),
        (SFT, "models.actor.path=r.py", "models.actor.path is r.py, which has no checkpoint"),
        (SFT, "models.actor.alphabet=null", "a tokenizer needs the path of a checkpoint or an alphabet"),
        (SFT, "out=r.py", "cannot make a directory in out='r.py': Not a directory"),
        (SFT, "name=/etc/run", "name is '/etc/run', which is not the name of a directory"),
        (SFT, "data.train.path=r.jsonl", "data.train has both path and generator; set"),
        (
            SFT,
            "data.train.sources={a:{generator:addition}}",
            "data.train has both generator and sources; set data.train.generator=null",
        ),
    ],
)
def test_a_configuration_that_does_not_fit(
    fails: Cli, tmp_path: Path, text: str, override: str, message: str
) -> None:
    assert message in fails(text, TINY, ADDITION, override)
    assert not (tmp_path / "runs").exists()


def test_a_checkpoint_without_a_tokenizer(fails: Cli, tmp_path: Path) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    config = AutoConfig.for_model("qwen2", **sizes, **heads)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    assert "model holds no tokenizer; save one there" in fails(SFT, ADDITION, "models.actor.path=model")
    (tmp_path / "model" / "model.safetensors").write_bytes(b"no tensors")
    line = fails(SFT, ADDITION, "models.actor.path=model", "models.actor.alphabet='0123456789+='")
    assert "model 'actor': " in line
    assert "model has no readable weights" in line


CHAT_TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "system", "says"),
    [
        (CHAT_TEMPLATE, "é", "the tokenizer has no token for 'é' (in 'é'); add it to the alphabet"),
        (
            '{% if messages[0].role == "system" %}{{ raise_exception("no system role") }}{% endif %}'
            "{{ messages[0].content }}",
            "12",
            "no system role",
        ),
    ],
)
def test_a_system_message_that_the_tokenizer_cannot_encode(
    fails: Cli, template: str, system: str, says: str
) -> None:
    text = score("return 0.5").replace("nodes.actor_gen, actor", f"nodes.chat_gen, actor, system={system!r}")
    told = fails(text, TINY, ADDITION, f"models.actor.chat_template='{template}'")
    assert told.startswith("nodes.chat_gen.system: ")
    assert says in told


def test_a_broken_yaml_beside_the_recipe(fails: Cli, tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text("defaults:\n  - _self_\n steps: [1\n")
    assert "r.yaml:3: invalid YAML: " in fails(SFT)
    (tmp_path / "r.yaml").write_text("defaults:\n  - model@models.actor: tiny-qwen\n  - _self_\n")
    assert "there is no model 'tiny-qwen'; did you mean 'tiny-qwen2'?" in fails(SFT)


# ----------------------------------------------------------------------------------- data
GOOD_ROW = '{"prompt": "1+1=", "answer": "2"}\n'


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            '{"prompt": "1+1=", "anser": "2"}\n',
            "r.jsonl row 0: no column 'answer' (it has 'prompt', 'anser')",
        ),
        (
            '{"question": "1+1=", "solution": "2"}\n',
            "no columns 'prompt', 'answer' (it has 'question', 'solution'); set data.train.map.prompt and "
            "data.train.map.answer to the columns that hold them",
        ),
        ('{"prompt": "1+1=", "answer": 2}\n', "column 'answer' is 2, but the recipe declares a string"),
        (2 * GOOD_ROW + '{"prompt": \n' + GOOD_ROW, "r.jsonl row 2 is not JSON"),
        (
            2 * GOOD_ROW + '{"prompt": "1+a=", "answer": "2"}\n' + GOOD_ROW,
            "r.jsonl row 2: the tokenizer has no token for 'a' (in '1+a='); add it to the alphabet",
        ),
        (
            2 * GOOD_ROW + '{"prompt": "%s", "answer": "2"}\n' % ("1" * 99) + GOOD_ROW,
            "step 2, worker 0: a sequence has 102 tokens, but model 'actor' has positions for 64",
        ),
    ],
)
def test_a_dataset_that_does_not_fit(fails: Cli, tmp_path: Path, rows: str, message: str) -> None:
    (tmp_path / "r.jsonl").write_text(rows)
    assert message in fails(SFT, TINY, "data.train.path=r.jsonl", "data.train.shuffle=false")


@pytest.mark.parametrize(
    "overrides",
    [
        ["data.train.path=r.jsonl", "data.train.generator=addition"],
        ["data.train.path=r.jsonl"],
        ["data.train.path=r.jsonl", "data.train.map={prompt:question,anwser:x}"],
        ["data.train.sources={a:{path:r.jsonl,generator:addition}}"],
    ],
)
def test_a_plan_refuses_data_as_a_run_does(fails: Cli, tmp_path: Path, overrides: list[str]) -> None:
    (tmp_path / "r.jsonl").write_text('\n{"question": "1+1=", "answer": "2"}\n')
    assert fails(SFT, TINY, *overrides, command="plan") == fails(SFT, TINY, *overrides)
    mapped = [TINY, "data.train.path=[r.jsonl,none.jsonl]", "data.train.map={prompt:question}"]
    assert plan(tmp_path / "r.py", mapped), "files that are not on this machine are left to the run"


def test_other_data_files_that_cannot_be_read(fails: Cli, tmp_path: Path) -> None:
    (tmp_path / "r.parquet").write_text("no parquet")
    assert "r.parquet cannot be read as Parquet: " in fails(SFT, TINY, "data.train.path=r.parquet")
    pq.write_table(pa.Table.from_pylist([{"answer": "2"}]), tmp_path / "r.parquet")
    line = fails(SFT, TINY, "data.train.path='*.parquet'", command="plan")
    assert "r.parquet: no column 'prompt' (it has 'answer'); set data.train.map.prompt" in line
    assert "there is no data file" in fails(SFT, TINY, "data.train.path=none.jsonl")
    assert "data.train has no rows; set data.train.path" in fails(SFT, TINY)


def test_sources_that_do_not_fit(fails: Cli) -> None:
    half = "data.train.sources={a:{generator:addition},b:{}}"
    assert "data.train.sources.b has no rows; set data.train.sources.b.path" in fails(SFT, TINY, half)
    unknown = "data.train.sources={a:{generator:addition,map:{promt:x}}}"
    assert "data.train.sources.a.map.promt: the recipe declares no column 'promt'" in fails(
        SFT, TINY, unknown
    )
    evaluated = SFT.replace(
        "use(nodes.sft_train, actor)",
        "use(nodes.sft_train, actor), use(nodes.actor_gen, actor, name='eval_gen', max_tokens=3, "
        "data=Dataset('heldout', prompt=Text))",
    )
    weights = "+data.heldout.sources={a:{generator:addition,weight:2}}"
    line = fails(evaluated, TINY, ADDITION, weights)
    assert (
        "data.heldout.sources.a.weight has no effect, as evaluations read every row once; remove it" in line
    )


def test_a_prompt_that_the_tokenizer_cannot_read(fails: Cli, tmp_path: Path) -> None:
    (tmp_path / "r.jsonl").write_text(2 * GOOD_ROW + '{"prompt": "1+a=", "answer": "2"}\n' + GOOD_ROW)
    line = fails(score("return 1.0"), TINY, "data.train.path=r.jsonl", "data.train.shuffle=false")
    assert "r.jsonl row 2: the tokenizer has no token for 'a' (in '1+a=')" in line


# ------------------------------------------------------------------------------ refusals
@pytest.mark.first(4)
@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            score("return 1 / 0"),
            "by score (failed): ZeroDivisionError: division by zero (r.py:10); fix score or",
        ),
        (score("raise ValueError('a\\nb')", prefix="async "), "by score (failed): ValueError: a b (r.py:10)"),
        (score("return float('inf')"), "by score (failed): 'reward' is inf, not a finite number"),
        (score("sys.exit(3)"), "by score (failed): SystemExit: 3 (r.py:10)"),
        (
            score("os.kill(os.getpid(), 9)", ", retries=0"),
            "by score (failed): its process died (exit code -9)",
        ),
        (
            score("time.sleep(60)", ", timeout=0.1"),
            "by score (timeout): took longer than its timeout of 0.1 s",
        ),
        (
            score("return lambda: 1"),
            "by score (failed): 'reward' must be a number, the body returned function",
        ),
        (score("return None"), "by score (failed): 'reward' must be a number, the body returned None"),
        (
            score("return 1.0, 2.0"),
            "by score (failed): 'reward' must be a number, the body returned [1.0, 2.0]",
        ),
        (
            score("return 10 ** 400"),
            "by score (failed): 'reward' must be a number, the body returned a number of",
        ),
        (
            episode("return prompt"),
            "by talk (failed): node 'talk' must return a trajectory with tokens, not '",
        ),
        (
            encoded("return None"),
            "by view (failed): node 'view' must return a trajectory with tokens, not None",
        ),
        (episode("raise KeyError('x')"), "by talk (failed): KeyError: 'x' (r.py:10)"),
        (episode("sys.exit(3)"), "by talk (failed): SystemExit: 3 (r.py:10)"),
        (
            episode("await __import__('asyncio').sleep(60)", ", timeout=0.1"),
            "by talk (timeout): took longer than its timeout of 0.1 s",
        ),
        (episode("return await engine.complete(prompt * 20)"), "BackendError: a prompt has 121 tokens"),
        (encoded("raise ValueError('x')"), "by view (failed): ValueError: x (r.py:10)"),
        (encoded("sys.exit(3)"), "by view (failed): SystemExit: 3 (r.py:10)"),
    ],
)
def test_a_body_that_always_fails_is_quoted(fails: Cli, text: str, message: str) -> None:
    line = fails(text, TINY, ADDITION)
    assert "groups were refused since the last batch" in line
    assert message in line


def test_the_first_refusal_of_a_kind_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hflow: CommandLine
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.py").write_text(score("return 1.0 / (answer < '100')"))
    out = hflow.prints("run", "r.py", *FAST[:-1], "schedule.max_refused_per_step=50", TINY, ADDITION)
    noted = [line for line in out.splitlines() if "refused a sample" in line]
    error = "ZeroDivisionError: float division by zero (r.py:10)"
    assert noted == [f"score refused a sample (failed): {error}; more count as refused/failed"]


# ------------------------------------------------------------------------- what ends a run
@pytest.mark.first(3)
@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            batch_body("return num_tokens * float('nan')"),
            "norm is nan at update 1 of step 1; its input 'advantages' is not finite",
        ),
        (
            score("return 1.0")
            .replace("data =", "lock = threading.Lock()\ndata =")
            .replace("1.0", "lock and 1.0"),
            "node 'score': the recipe's bodies use something that cannot be sent to other processes",
        ),
        (
            batch_body("return num_tokens[:-1]"),
            "'advantages' is per sequence, so its shape must start with 4",
        ),
        (
            batch_body("return nothing"),
            "node 'adv', step 1, worker 0: NameError: name 'nothing' is not defined",
        ),
        (batch_body("sys.exit(4)"), "node 'adv', step 1, worker 0: SystemExit: 4 (r.py:10)"),
        (batch_body("return num_tokens, {'a': 1}"), "'advantages' must be a tensor, the body returned tuple"),
        (inferred("return out.entropy[:3]"), "node 'look', step 1, worker 0: 'advantages' is per token"),
        (
            inferred("return out.values"),
            "this output has no 'values'; a language model has entropy, logprobs",
        ),
        (loss("return seqs.sum(out.logprobs)"), "node 'learn', step 1, worker 0: 'loss' is per token"),
        (loss("return out.logprobs.detach()"), "its loss does not depend on the model's output"),
        (loss("return out.logprobs * float('nan')"), "lower the learning rate or check the loss"),
        (
            episode("return await engine.complete(prompt, tools=[print])"),
            "set the generate node's tool_format to the two characters that enclose a call",
        ),
        (
            score("return 0.5").replace("nodes.actor_gen", "nodes.chat_gen"),
            "chat_gen encodes messages, but the tokenizer of actor has no chat template; set models.actor",
        ),
        (encoded("return tokenizer.chat([])"), "row 9403: this tokenizer has no chat template"),
        (
            encoded("return Trajectory.learned((1, 4), (700,))"),
            "a sequence holds token 700, but model 'actor' has a vocabulary of 32",
        ),
    ],
)
def test_a_body_that_returns_something_else(fails: Cli, text: str, message: str) -> None:
    assert message in fails(text, TINY, ADDITION)
