# ruff: noqa: E501 - tables of cases
"""Generates bad input of every kind from good input: chosen classes of mistakes, and random changes.

`good_inputs` makes a recipe with its data, and runs it once for a checkpoint, a plan file and a ledger.
`cases` yields the classes, each once, and `changes` random changes of every kind's files.
"""

from __future__ import annotations

import dataclasses
import io
import json
import sqlite3
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, redirect_stdout
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, get_args, get_type_hints

import pyarrow as pa
import pyarrow.parquet as pq
from bad_input import Case, Content, Copy, Link, Pipe, Sparse

from hflow import launch
from hflow.config import RunConfig
from hflow.config.schema import DataConfig, ModelConfig

RECIPE = '''"""Supervised fine-tuning, as small as it gets."""

from hflow import Dataset, Model, Recipe, Text, compute, nodes, use

data = Dataset("train", prompt=Text, answer=Text)
actor = Model("actor", trainable=True)


@compute(per="sample", returns="reward")
def score(completion: str, answer: str) -> float:
    return float(completion == answer)


recipe = Recipe(
    "good", data, [use(nodes.sft_view, actor), use(nodes.sft_train, actor)]
)
'''
GENERATING = RECIPE.replace(
    "use(nodes.sft_view, actor), use(nodes.sft_train, actor)",
    "use(nodes.actor_gen, actor, group=2, max_tokens=3), score, nodes.group_advantage, "
    "use(nodes.actor_train, actor, prox='none')",
)
YAML = """\
models:
  actor:
    architecture:
      model_type: qwen2
      vocab_size: 20
      hidden_size: 16
      intermediate_size: 16
      num_hidden_layers: 1
      num_attention_heads: 2
      num_key_value_heads: 2
      max_position_embeddings: 32
      tie_word_embeddings: true
      pad_token_id: 0
      bos_token_id: 1
      eos_token_id: 2
    alphabet: "0123456789+="
    gen:
      max_model_len: 32
data:
  train:
    path: rows.jsonl
workers: inproc
cluster: cpu-1x1
placement: "actor=0:d1"
out: out
steps: 1
batch: 2
"""
GENERATING_YAML = YAML.replace("actor=0:d1", "actor=0:d1 actor.gen=0:d1")
ROWS = "".join(f'{{"prompt": "{i}+{i}=", "answer": "{2 * i}"}}\n' for i in range(4))


def _interpolations(reference: str) -> str:
    """Return the YAML of ten levels of interpolations, each of ten times the level before."""
    levels = (f"  A{i}: '{(reference % (i - 1)) * 10}'\n" for i in range(1, 11))
    return "env:\n  A0: xxxxxxxxxxxxxxxx\n" + "".join(levels)


QUOTED = "'${a%s}'"
DEEP = 50_000
"""Nested brackets: more than any parser's stack."""
HUGE = 2 << 30
"""Bytes of a file that memory does not hold."""


@dataclass(frozen=True)
class Good:
    """Good inputs."""

    run: Path
    """The directory of a run."""
    files: dict[str, Content]
    """A recipe `good.py` with its configuration and data."""

    @property
    def checkpoint(self) -> Path:
        """Weights, tokenizer and shards of the run's model."""
        return self.run / "checkpoints" / "latest" / "actor"

    def generating(self, **more: Content) -> dict[str, Content]:
        """Return the files with a recipe that generates."""
        return {
            "good.py": GENERATING.encode(),
            "good.yaml": GENERATING_YAML.encode(),
            "rows.jsonl": ROWS.encode(),
            **more,
        }


def good_inputs(directory: Path) -> Good:
    """Make good inputs in a new directory."""
    directory.mkdir(parents=True)
    files: dict[str, Content] = {
        "good.py": RECIPE.encode(),
        "good.yaml": YAML.encode(),
        "rows.jsonl": ROWS.encode(),
    }
    for name, content in files.items():
        assert isinstance(content, bytes)
        (directory / name).write_bytes(content)
    with redirect_stdout(io.StringIO()):
        summary = launch.run(
            directory / "good.py",
            [f"data.train.path={directory / 'rows.jsonl'}", f"out={directory / 'out'}"],
            live=False,
        )
    return Good(summary.directory.resolve(), files)


def cases(good: Good, random: Random, changes: int) -> Iterator[Case]:
    """Yield the chosen cases of every kind, and `changes` random changes of every kind's files."""
    for kind, chosen, changed in KINDS:
        for name, arguments, files, says in chosen(good):
            yield Case(
                kind, name, tuple(arguments), files, is_found_late=name.startswith(FOUND_LATE), says=says
            )
        for number in range(changes):
            name, arguments, files = changed(good, random)
            yield Case(
                kind,
                f"{number}: {name}",
                tuple(arguments),
                files,
                is_refused=False,
                is_found_late=kind in CHANGED_LATE,
            )


CHANGED_LATE = ("data", "checkpoint")
"""Kinds of which a random change may be in a part that only a run reads, such as the third row."""
FOUND_LATE = (
    "characters that the model lacks",
    "a row longer than the model",
    "a prompt of millions",
    "an index of shards",
)

Chosen = Iterator[tuple[str, Sequence[str], dict[str, Content], str]]
Changed = tuple[str, Sequence[str], dict[str, Content]]


# Random changes


def change_bytes(content: bytes, random: Random) -> tuple[str, bytes]:
    """Return what was changed, and the changed bytes."""
    size = len(content)
    a, b = sorted(random.randrange(size + 1) for _ in range(2))
    b = min(b, a + 64)
    match random.choice(
        ["flip", "flip", "flip", "cut", "drop", "repeat", "zero", "insert", "number", "utf-16"]
    ):
        case "flip":
            changed = bytearray(content)
            places = [random.randrange(size) for _ in range(random.choice([1, 1, 4, 32]))] if size else []
            for place in places:
                changed[place] ^= 1 << random.randrange(8)
            return f"bits flipped at {places[:3]}", bytes(changed)
        case "cut":
            return f"cut at {a}", content[:a]
        case "drop":
            return f"without {a}:{b}", content[:a] + content[b:]
        case "repeat":
            return f"{a}:{b} twice", content[:b] + content[a:b] + content[b:]
        case "zero":
            return f"zeros at {a}:{b}", content[:a] + bytes(b - a) + content[b:]
        case "insert":
            added = random.choice(
                [
                    b"\xff",
                    b"\x00",
                    b"\n",
                    b"{",
                    b"]",
                    b'"',
                    b":",
                    b"*a",
                    b"&a",
                    b"\t",
                    b"'",
                    b"${",
                    b"%",
                    "é".encode(),
                ]
            )
            return f"{added!r} at {a}", content[:a] + added + content[a:]
        case "number":
            digits = [i for i, byte in enumerate(content) if chr(byte).isdigit()]
            if digits:
                a = random.choice(digits)
                added = random.choice([b"-", b"9" * 30, b"e99", b".5", b"x", b"0x", b"_"])
                return f"{added!r} at {a}", content[:a] + added + content[a:]
    return "as UTF-16", content.decode("latin-1").encode("utf-16")


VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 1.5, 10**9, 10**23, -(10**23), 1e300, "", "x", "x" * 5000, [], {}, [None], {"a": 1}, [[[[]]]],
    "../../etc/passwd", "\x00", "\ud800", "nan",
)  # fmt: skip
"""Values that a place in a JSON file does not expect."""


def change_json(content: bytes, random: Random) -> tuple[str, bytes]:
    """Return what was changed, and a JSON document with a value replaced, removed or renamed."""
    document = json.loads(content)
    places = list(_places(document))
    holder, key = random.choice(places)
    value = random.choice(VALUES)
    match random.choice(["value", "value", "value", "remove", "nan", "again"]):
        case "remove":
            del holder[key]
            return f"without {key!r}", json.dumps(document).encode()
        case "nan":
            holder[key] = random.choice([float("nan"), float("inf"), -float("inf")])
            return f"{key!r} is {holder[key]}", json.dumps(document).encode()
        case "again" if isinstance(holder, dict):
            holder["?"] = value
            again = json.dumps(document).replace('"?"', json.dumps(key))
            return f"{key!r} again, as {str(value)[:20]!r}", again.encode()
        case _:
            holder[key] = value
            return f"{key!r} is {str(value)[:20]!r}", json.dumps(document).encode()


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every place of a document, as a mapping or list with a key."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield value, key
        yield from _places(value[key])


# Overrides

NUMBERS = (int, float)
NOT_NUMBERS = ("nan", "inf", "-inf", "x", "[[1]]", "{a: 1}", "true", "1e999")
TOO_LARGE = ("1" + "0" * 30, "1e23")


def number_keys(cls: type, prefix: str = "") -> Iterator[tuple[str, bool]]:
    """Yield every key of the configuration that holds a number, and whether it is a whole one."""
    for name, hint in get_type_hints(cls, include_extras=False).items():
        kinds = set(_flat(hint))
        if dataclasses.is_dataclass(hint):
            yield from number_keys(hint, f"{prefix}{name}.")
        elif kinds & set(NUMBERS) and bool not in kinds and tuple not in kinds:
            yield prefix + name, int in kinds


def _flat(hint: Any) -> Iterator[Any]:
    if not get_args(hint):
        yield hint
    for argument in get_args(hint):
        yield from _flat(argument)


def _overrides(good: Good) -> Chosen:
    files = good.generating()
    keys = [
        *number_keys(RunConfig),
        *((f"models.actor.{key}", whole) for key, whole in number_keys(ModelConfig)),
        *((f"data.train.{key}", whole) for key, whole in number_keys(DataConfig)),
        *((f"nodes.actor_gen.{key}", True) for key in ("group", "top_k", "max_tokens")),
        *((f"nodes.actor_gen.{key}", False) for key in ("temperature", "top_p")),
        *((f"nodes.actor_train.{key}", True) for key in ("minibatches", "epochs", "every", "after")),
        ("nodes.actor_train.clip", False),
        ("nodes.score.timeout", False),
        ("nodes.score.retries", True),
        ("nodes.score.concurrency", True),
    ]
    for number, (key, whole) in enumerate(keys):
        values = [NOT_NUMBERS[number % len(NOT_NUMBERS)], *(TOO_LARGE[:1] if whole else ())]
        for value in dict.fromkeys(["nan", *values]):
            yield f"{key}={value}", ["check", "good.py", f"{key}={value}"], files, key
    for key in (
        "steps",
        "batch",
        "schedule.sync_every",
        "nodes.actor_gen.group",
        "models.actor.gen.max_running",
    ):
        for value in ("-1", "0", "1.5", "null", ""):
            yield f"{key}={value}", ["check", "good.py", f"{key}={value}"], files, key
    for pair in ("[2.0,0.9]", "[-1.0,0.9]", "[nan,0.9]", "[0.9]", "[0.9,0.9,0.9]", "[0.9,1.0]"):
        yield f"betas={pair}", ["check", "good.py", f"models.actor.optim.betas={pair}"], files, "betas"
    for text, says in [
        ("batch=1000000000", "batch"),
        ("steps=9000000000000000000", "steps"),
        ("cluster=cpu-1x99999999", "cluster"),
        ("cluster=h100-99999999x8", "cluster"),
        ("cluster=h100-" + "9" * 5000 + "x8", "cluster"),
        ("cluster=cpu-0x1", "cluster"),
        ("cluster=''", "cluster"),
        ("cluster=cpu-1x1x1", "cluster"),
        ("cluster=" + "a" * 5000 + "-1x1", "cluster"),
        ("cores=[0]", "cores"),
        ("cores=[99999999]", "cores"),
        ("cores=[]", "cores"),
        ("placement='actor=0-999999999:d1 actor.gen=0:d1'", "999999999"),
        ("placement='actor=0:d999999999 actor.gen=0:d1'", "d999999999"),
        ("placement='actor=0:d" + "9" * 5000 + "'", "layout"),
        ("placement='actor=9-0:d1'", "actor"),
        ("placement=''", "placement"),
        ("placement='='", "placement"),
        ("models.actor.layout=d0t1", "layout"),
        ("models.actor.layout=d99999999999t9", "layout"),
        ("models.actor.gen.layout=d99999999999", "layout"),
        ("groups.a=[0,99999999]", "group"),
        ("groups.a=[-1]", "group"),
        ("groups.a=[0,0]", "group"),
        ("groups.a=[]", "group"),
        ("network=" + "a" * 5000, "network"),
        ("calibration=" + "a" * 5000, "calibration"),
        ("calibration=/dev/zero", "/dev/zero"),
        ("calibration=.", "'.'"),
        ("device_memory_gib=1e-300", "device_memory_gib"),
        ("device_memory_gib=1e300", "device_memory_gib"),
        ("models.actor.architecture.num_hidden_layers=1000000000", "num_hidden_layers"),
        ("models.actor.architecture.num_hidden_layers=true", "num_hidden_layers"),
        ("models.actor.architecture.vocab_size=100000000000", "vocab_size"),
        ("models.actor.architecture.hidden_size=nan", "hidden_size"),
        ("models.actor.architecture.hidden_size=4.0", "hidden_size"),
        ("models.actor.architecture.num_attention_heads=[1]", "num_attention_heads"),
        ("models.actor.architecture=[1]", "architecture"),
        ("models.actor.architecture.model_type=[1]", "model_type"),
        ("models.actor.architecture={1: 2}", "architecture"),
        ("models.actor.architecture.rope_parameters={a: {2.5: 1}}", "rope_parameters.a"),
        ("env={1: x}", "env"),
        ("nodes={1: {}}", "nodes"),
        ("name=latest", "latest"),
        ("nodes.actor_gen.temperature=1e-300", "temperature is 1e-300"),
        ("nodes.actor_gen.temperature=5e-324", "temperature"),
        ("nodes.actor_gen.temperature=1e300", "temperature"),
        ("nodes.actor_gen.top_p=0", "top_p is 0"),
        ("nodes.actor_gen.top_k=9223372036854775808", "top_k"),
        ("models.actor.path=''", "path"),
        ("models.actor.path=" + "a" * 5000, "path"),
    ]:
        yield text[:60], ["plan", "good.py", text], files, says
    run = ["run", "good.py", "--plain"]
    for text, says in [
        ("name=..", "name"),
        ("name=.", "name"),
        ("name=''", "name"),
        ("name=a/b", "name"),
        ("name=" + "a" * 300, "name"),
        ("name='a\x00b'", "name"),
        ("out=''", "out"),
        ("out=" + "a" * 300, "out"),
        ("out=" + "a/" * 3000, "out"),
        ("out=rows.jsonl", "out"),
        ("out=/proc/none", "out"),
        ("out='a\x00b'", "out"),
        ("data.train.path=''", "path"),
        ("data.train.path=" + "a" * 5000, "path"),
        ("data.train.path=.", "path"),
        ("data.train.path=/dev/zero", "path"),
        ("data.train.generator=''", "generator"),
        ("models.actor.alphabet=''", "alphabet"),
        ("models.actor.alphabet=00", "alphabet"),
        ("models.actor.chat_template='{% for %}'", "chat_template"),
        ("report.show=[x]", "x"),
    ]:
        yield text[:60], [*run, text], files, says
    for text in [
        "", "=", "==", "steps", "steps=", "=1", "steps==1", "+", "~", "++", "steps=[", "steps={", "steps='", 'steps="',
        "steps=" + "[" * DEEP, "steps=" + "[" * 200 + "]" * 200, "a" * 100_000 + "=1", "steps=" + "9" * 100_000, "steps=\udcff", "steps=\x00",
        "steps=1\nbatch=2", "steps=${batch}${", "steps=${steps}", "steps=${oc.env:NO_SUCH}", "steps=${unknown:1}", "steps.a=1", "steps.a.b=1",
        "hydra.run.dir=x", "hydra/launcher=x", "+hydra=x", "model@models.actor=none", "+model@models.actor=../../etc", "+model@=x", "models=1",
        "models.actor=1", "models.none.path=x", "nodes.none.x=1", "nodes.score.none=1", "nodes=[1]", "data=x", "schedule=1", "steps=\u202e1", "é=1",
        "models.actor.optim=rl-tiny", "-1", "steps=1,2", "steps=range(1,5)", "steps=choice(1,2)", "steps=glob(*)", "STEPS=1", "steps =1",
        "steps=" + "9" * 5000, "steps=-" + "9" * 5000, "seed=" + "9" * 4000, "cores=[" + "9" * 5000 + "]",
    ]:  # fmt: skip
        yield f"{text[:40]!r}", ["check", "good.py", text], files, ""


def _changed_override(good: Good, random: Random) -> Changed:
    keys = [line.strip().partition(":")[0] for line in GENERATING_YAML.splitlines()]
    chosen = random.choice(
        [
            "steps",
            "batch",
            "cluster",
            "placement",
            "seed",
            "models.actor.layout",
            "schedule.max_staleness",
            *keys,
        ]
    )
    value = random.choice(
        ["3", "cpu-1x2", "actor=0:d1", "d2t2p1", "[1,2]", "{a: b}", "'x'", "null", "1e5", "${steps}"]
    )
    _, text = change_bytes(f"{chosen}={value}".encode(), random)
    override = text.decode(errors="surrogateescape").replace("\x00", "")
    command = random.choice(["check", "plan"])
    return f"{command} {override!r}", [command, "good.py", override], good.generating()


# Options


def _options(good: Good) -> Chosen:
    files = good.generating()
    plan = Copy(good.run / "plan.json")
    ledger = {"run/plan.json": plan, "run/ledger.sqlite": Copy(good.run / "ledger.sqlite")}
    for arguments in [
        ["--steps", "0"], ["--steps", "1"], ["--steps", "-1"], ["--steps", "x"], ["--steps", "nan"], ["--steps", "1e3"],
        ["--steps", "1" + "0" * 30], ["--layout", ""], ["--layout", "x"], ["--layout", "d0"], ["--layout", "d2d2"], ["--layout", "t2d2"],
        ["--layout", "d99999999"], ["--layout", "d" + "9" * 5000], ["--layout", "d1", "--as-configured"], ["--layout", "d2c2"],
        ["--layout", "d2e2"], ["--layout", "t3"], ["--layout", "p99"], ["--layout", "d64"], ["steps=x"], ["--none"], ["--as-configured", "placement='actor=0:d9'"],
    ]:  # fmt: skip
        yield f"twin {' '.join(arguments)[:40]}", ["twin", "good.py", *arguments], files, ""
    for arguments in [
        ["--steps", "0"], ["--steps", "-1"], ["--steps", "1.5"], ["--steps", "1" + "0" * 30], ["--steps", "1000000000"], ["--seed", "x"],
        ["--seed", "-1"], ["--seed", "1" + "0" * 40], ["--json", "--json=1"], ["steps=1000000000000"],
    ]:  # fmt: skip
        yield f"simulate {' '.join(arguments)[:40]}", ["simulate", "good.py", *arguments], files, ""
    for arguments in [
        [], ["--seconds", "nan"], ["--seconds", "inf"], ["--seconds", "-1"], ["--seconds", "0"], ["--days", "x"], ["--samples", "nan"],
        ["--samples", "1", "--days", "1"], ["--days", "1", "--most", "0"], ["--days", "1", "--most", "1" + "0" * 30], ["--days", "1", "--most", "99999999"],
        ["--days", "1", "--on", ""], ["--days", "1", "--on", "x"], ["--days", "1", "--on", "h100-99999999x8"], ["--days", "1", "--on", "h100-0x8"],
        ["--days", "1", "--on", "a" * 5000], ["--days", "1e-300"], ["--days", "1", "cluster=x"],
    ]:  # fmt: skip
        yield f"size {' '.join(arguments)[:40]}", ["size", "good.py", *arguments], files, ""
    for arguments in [
        ["good.py", "--json", "--dot"], ["good.py", "--what-if"], ["good.py", "--what-if", ""], ["good.py", "--what-if", "x"],
        ["good.py", "--what-if", "batch=nan"], ["good.py", "--what-if", "'"], ["--diff", "good.py"], ["--diff", "none.py", "good.py"],
        ["--diff", "good.py", "rows.jsonl"], ["--diff", "", ""], ["--diff", ".", "good.py"], ["--diff", "a" * 5000, "good.py"], ["--html", "x.html"],
        ["good.py", "--html", "none/x.html"], ["good.py", "--html", "."], ["good.py", "--html", ""], ["good.py", "--html", "a" * 300],
        ["good.py", "--html", "/dev/full"], [], ["good.py", "good.py"],
    ]:  # fmt: skip
        yield f"plan {' '.join(arguments)[:50]}", ["plan", *arguments], files, ""
    for arguments in [
        ["run"], ["run", "none.py"], ["run", "."], ["run", ""], ["run", "a" * 5000 + ".py"], ["run", "rows.jsonl"], ["run", "good"], ["run", "good.yaml"],
        ["run", "--plan", "none.json"], ["run", "--plan", "rows.jsonl"], ["run", "--plan", "a" * 5000],
        ["run", "--plan", "plan.json", "none.py"], ["run", "--plan", "plan.json", "steps=2"], ["run", "--plan"], ["run", "\udcff.py"],
        ["run", "--live", "x"], ["", "good.py"], ["none"], ["--none"], ["check"], ["check", "good.py", "--json"], ["samples"], ["why"], ["serve"],
    ]:  # fmt: skip
        yield " ".join(arguments)[:50], arguments, {**files, "plan.json": plan}, ""
    for arguments in [
        ["none"], [""], ["."], ["a" * 5000], ["rows.jsonl"], ["run", "--limit", "-1"], ["run", "--limit", "x"], ["run", "--limit", "1.5"],
        ["run", "--json", "--csv"], ["run", "x"],
    ]:  # fmt: skip
        yield f"samples {' '.join(arguments)[:40]}", ["samples", *arguments], {**files, **ledger}, ""
    for arguments in [
        ["run"], ["run", ""], ["run", "-1"], ["run", "x"], ["run", "1.5"], ["run", "9" * 5000], ["run", "none/1"], ["run", "/"], ["run", "//1"],
        ["run", "²"], ["run", "٣"], ["run", "9" * 30], ["run", "a" * 5000], ["none", "1"], ["run", "\udcff"],
    ]:  # fmt: skip
        yield f"why {' '.join(arguments)[:40]}", ["why", *arguments], {**files, **ledger}, ""
    checkpoint = {"model": Copy(good.checkpoint)}
    for arguments in [
        ["none"], ["a" * 5000], ["good.py"], ["model", "--port", "-1"], ["model", "--port", "65536"], ["model", "--port", "x"],
        ["model", "--engine", "x"], ["model", "--engine", ""], ["model", "--host", "a b"], ["model", "--host", "999.1.1.1"], ["model", "--model", "x"],
        ["model", "steps=1"], ["model", "gen.max_model_len=nan"], ["model", "gen.max_model_len=" + "9" * 30], ["model", "gen.max_model_len=0"],
        ["model", "gen.max_model_len=["], ["model", "gen.max_model_len=" + "[" * DEEP], ["model", "gen.max_running=1e9"], ["model", "dtype=x"],
         ["model", "gen.layout=x"],  ["model", "chat_template={% for %}"], ["model", "x"], ["model", "gen.max_model_len=&a [*a]"],
            ]:  # fmt: skip
        yield f"serve {' '.join(arguments)[:40]}", ["serve", *arguments], checkpoint, ""
    for arguments in [
        ["--device", "x"],
        ["--device", ""],
        ["--device", "h100"],
        ["--out", "."],
        ["--out", "/dev/full/x"],
    ]:
        yield f"profile {' '.join(arguments)}", ["profile", *arguments], files, ""


# Recipes


def _recipes(good: Good) -> Chosen:
    def recipe(content: bytes) -> dict[str, Content]:
        return {**good.generating(), "good.py": content}

    raised = {
        "SystemExit": "raise SystemExit(3)",
        "exit": "import sys; sys.exit('bye')",
        "exit 0": "exit(0)",
        "GeneratorExit": "raise GeneratorExit",
        "its own BaseException": "class Odd(BaseException): pass\nraise Odd('odd')",
        "an error that cannot be printed": "class Odd(Exception):\n    def __str__(self): raise ValueError\nraise Odd",
        "an error of many lines": "raise ValueError('a\\nb\\nc' * 1000)",
        "a long error": "raise ValueError('a' * 1000000)",
        "an error with control characters": "raise ValueError('\\x1b[31m\\r\\x00 \\ud800')",
        "an exception group": "raise ExceptionGroup('several', [ValueError('a')])",
        "endless recursion": "def f(): return f()\nf()",
        "a failed import": "import no_such_module",
        "memory": "x = bytearray(1 << 50)",
        "an assertion": "assert False",
        "MemoryError": "raise MemoryError",
        "Recipe of junk": "recipe = Recipe('x', data, [1, None])",
        "Recipe without a name": "recipe = Recipe('', data, [use(nodes.sft_view, actor)])",
        "Recipe with a number as name": "recipe = Recipe(3, data, [use(nodes.sft_view, actor)])",
        "a second recipe": "again = Recipe('again', data, [use(nodes.sft_view, actor), use(nodes.sft_train, actor)])",
        "a Dataset of junk": "Dataset('x', prompt=3)",
        "a Model of junk": "Model(3)",
        "an option that is not a number": "use(nodes.actor_gen, actor, max_tokens=float('nan'))",
        "an option that is too large": "use(nodes.actor_gen, actor, group=10**30)",
        "no recipe": "del recipe",
    }  # fmt: skip
    for name, line in raised.items():
        yield name, ["check", "good.py"], recipe(f"{GENERATING}\n{line}\n".encode()), "good.py"
    for name, content in {
        "empty": b"",
        "UTF-16": GENERATING.encode("utf-16"),
        "latin-1": GENERATING.replace("small", "sm\xe4ll").encode("latin-1"),
        "NUL": b"\x00",
        "binary": bytes(range(256)) * 10,
        "an unknown encoding": b"# coding: none\n" + GENERATING.encode(),
        "deep parentheses": b"x = " + b"(" * DEEP,
        "deep unary operators": b"x = " + b"-" * 1_000_000 + b"1",
        "deep indentation": b"".join(b" " * i + b"if 1:\n" for i in range(200)),
        "a huge number": b"x = " + b"9" * 100_000,
        "an open string": b"x = '''",
        "a lone surrogate": b"x = '\xed\xa0\x80'",
    }.items():
        yield name, ["check", "good.py"], recipe(content), "good.py"
    yield "a directory", ["check", "good.py"], {"good.py/x": b""}, "good.py"
    yield "a long name", ["check", "a" * 300 + ".py"], {}, ""
    for name, text in {
        "an alias bomb": "a: &a [" + ", ".join("1" * 9) + "]\n" + "".join(
            f"{chr(98 + i)}: &{chr(98 + i)} [{', '.join('*' + chr(97 + i) for _ in range(9))}]\n" for i in range(9)
        ),
        "an alias of itself": "steps: &a [*a]\n",
        "aliases within nodes": "x: &a {b: 1}\nnodes: {score: *a}\n",
        "deep lists": "steps: " + "[" * DEEP + "\n",
        "deep mappings": "steps: " + "{a: " * 2000 + "}" * 2000 + "\n",
        "a list": "- 1\n",
        "a scalar": "x\n",
        "a key twice": "steps: 1\nsteps: 2\n",
        "a tab": "steps:\t- 1\n\t- 2\n",
        "two documents": "steps: 1\n---\nsteps: 2\n",
        "an object of Python": "steps: !!python/object/apply:os.system ['true']\n",
        "an unknown tag": "steps: !x 1\n",
        "an undefined alias": "steps: *x\n",
        "an open quote": 'name: "x\n',
        "a number as key": "1: 2\n",
        "null as key": "null: 2\n",
        "a list as key": "? [1]\n: 2\n",
        "an unknown group": "defaults:\n  - model: none\n",
        "defaults of itself": "defaults:\n  - good\n",
        "defaults that are no list": "defaults: 3\n",
        "an interpolation of itself": "steps: ${steps}\n",
        "an interpolation of nothing": "steps: ${none}\n",
        "an interpolation of the environment": "name: ${oc.env:HFLOW_NONE}\n",
        "a wrong interpolation": "name: ${\n",
        "a date": "steps: 2020-01-01\n",
        "a merge of a number": "<<: 1\n",
        "an unknown key": "stepps: 1\n",
        "ten levels of interpolations": _interpolations("${env.A%s}"),
        "ten levels of relative interpolations": _interpolations("${.A%s}"),
        "ten levels of copied mappings": "a0: {x: 1, y: 1}\n" + "".join(
            f"a{i}: {{{', '.join(f'k{j}: {QUOTED % (i - 1)}' for j in range(10))}}}\n" for i in range(1, 11)
        ),
        "UTF-16": None,
        "latin-1": None,
        "NUL": "steps: 1\x00\n",
        "a huge number": "steps: " + "9" * 100_000 + "\n",
    }.items():  # fmt: skip
        content = {"UTF-16": GENERATING_YAML.encode("utf-16"), "latin-1": b"name: \xe4\n"}.get(name) or str(
            text
        ).encode()
        yield (
            f"configuration with {name}",
            ["check", "good.py"],
            {**good.generating(), "good.yaml": content},
            "",
        )
    for name, content in {
        "a loop of links": Link("good.yaml"),
        "a pipe": Pipe(),
        "a broken link": Link("no"),
    }.items():
        yield (
            f"configuration that is {name}",
            ["check", "good.py"],
            {**good.generating(), "good.yaml": content},
            "good.yaml",
        )
        yield f"recipe that is {name}", ["check", "x.py"], {"x.py": Link("x.py"), **good.generating()}, "x.py"
    for name, old, new in [
        ("a Cyrillic node", "score", "оценка"),
        ("a Cyrillic model", '"actor"', '"актор"'),
        ("a Cyrillic dataset", '"train"', '"данные"'),
        ("a Cyrillic knob", "answer: str)", "answer: str, *, порог: float = 1.0)"),
    ]:
        yield name, ["check", "good.py"], recipe(GENERATING.replace(old, new).encode()), "ASCII"
    yield (
        "a huge configuration",
        ["check", "good.py"],
        {**good.generating(), "good.yaml": Sparse(HUGE, b"steps: 1\n#")},
        "good.yaml",
    )
    bomb = "a: &a [1,1,1,1,1,1,1,1,1]\n" + "".join(
        f"{chr(98 + i)}: &{chr(98 + i)} [{', '.join('*' + chr(97 + i) for _ in range(9))}]\n"
        for i in range(9)
    )
    yield (
        "a group with an alias bomb",
        ["check", "good.py", "+model@models.actor=bomb"],
        {**good.generating(), "model/bomb.yaml": bomb.encode()},
        "bomb.yaml",
    )
    for name, content in {
        "an alias bomb": bomb.encode(),
        "text": b"x",
        "nan": b"memory_gib: .nan\n",
        "NUL": b"\x00",
        "nothing": b"",
    }.items():
        yield (
            f"hardware with {name}",
            ["plan", "good.py"],
            {**good.generating(), "hardware/devices/cpu.yaml": content},
            "cpu",
        )
    yield (
        "huge hardware",
        ["plan", "good.py"],
        {**good.generating(), "hardware/devices/cpu.yaml": Sparse(HUGE)},
        "cpu.yaml",
    )


def _changed_recipe(good: Good, random: Random) -> Changed:
    if random.random() < 0.5:
        name, text = change_bytes(GENERATING_YAML.encode(), random)
        return f"configuration with {name}", ["plan", "good.py"], {**good.generating(), "good.yaml": text}
    name, text = change_bytes(GENERATING.encode(), random)
    return f"recipe with {name}", ["check", "good.py"], {**good.generating(), "good.py": text}


# Data


def _parquet(columns: dict[str, Any]) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.table(columns), sink)
    return sink.getvalue()


@cache
def _good_parquet() -> bytes:
    return _parquet({"prompt": [f"{i}+{i}=" for i in range(4)], "answer": [f"{2 * i}" for i in range(4)]})


def _data(good: Good) -> Chosen:
    run = ["run", "good.py", "--plain"]
    row = b'{"prompt": "1+1=", "answer": "2"}\n'
    for name, content in {
        "nothing": b"",
        "blank lines": b"\n\n\n",
        "NUL": b"\x00" * 100,
        "UTF-16": ROWS.encode("utf-16"),
        "UTF-32": ROWS.encode("utf-32"),
        "latin-1": b'{"prompt": "\xe4", "answer": "2"}\n',
        "a lone surrogate": b'{"prompt": "\\ud800", "answer": "2"}\n',
        "binary": bytes(range(256)) * 10,
        "CSV": b"prompt,answer\n1+1=,2\n",
        "a JSON list": b'[{"prompt": "1+1=", "answer": "2"}]\n',
        "an indented object": b'{\n  "prompt": "1+1=",\n  "answer": "2"\n}\n',
        "a cut row": b'{"prompt": "1+1=", "ans',
        "two objects in a line": row.strip() * 2 + b"\n",
        "a missing column": b'{"prompt": "1+1="}\n',
        "a misspelt column": b'{"prompt": "1+1=", "anwser": "2"}\n',
        "a column twice": b'{"prompt": "1+1=", "answer": "2", "answer": "3"}\n',
        "null": b'{"prompt": "1+1=", "answer": null}\n',
        "a number": b'{"prompt": "1+1=", "answer": 2}\n',
        "a list": b'{"prompt": "1+1=", "answer": ["2"]}\n',
        "deep lists": b"[" * DEEP + b"\n",
        "deep lists in a column": b'{"prompt": "1+1=", "answer": ' + b"[" * DEEP + b"]" * DEEP + b"}\n",
        "a huge number": b'{"prompt": "1+1=", "answer": ' + b"9" * 100_000 + b"}\n",
        "a bare word": b"null\n",
        "characters that the model lacks": b'{"prompt": "abc", "answer": "2"}\n',
        "a row longer than the model": b'{"prompt": "' + b"1" * 1000 + b'", "answer": "2"}\n',
    }.items():
        yield name, run, {**good.files, "rows.jsonl": content}, ""
    late = ROWS.encode() * 3000 + b'{"prompt": "1+1="}\n'
    yield "a missing column late in the file", run, {**good.files, "rows.jsonl": late}, "rows.jsonl row "
    yield "a huge row", run, {**good.files, "rows.jsonl": Sparse(HUGE // 4, b'{"prompt": "')}, "rows.jsonl"
    yield (
        "a huge row of text",
        run,
        {**good.files, "rows.jsonl": b'{"prompt": "' + b"1" * (80 << 20) + b'", "answer": "2"}\n'},
        "rows.jsonl",
    )
    yield "a directory", run, {**good.files, "rows.jsonl": Copy(good.checkpoint)}, "rows.jsonl"
    yield "a loop of links", run, {**good.files, "rows.jsonl": Link("rows.jsonl")}, "rows.jsonl"
    yield "a pipe", run, {**good.files, "rows.jsonl": Pipe()}, "rows.jsonl"
    yield (
        "a prompt of millions of characters",
        run,
        {**good.files, "rows.jsonl": b'{"prompt": "' + b"1" * (16 << 20) + b'", "answer": "2"}\n'},
        "rows.jsonl row 0",
    )
    for name, content in {
        "nothing": b"",
        "text": ROWS.encode(),
        "no rows": _parquet({"prompt": pa.array([], pa.string()), "answer": pa.array([], pa.string())}),
        "no columns": _parquet({}),
        "a missing column": _parquet({"prompt": ["1"]}),
        "numbers": _parquet({"prompt": ["1"], "answer": [2]}),
        "nulls": _parquet({"prompt": ["1"], "answer": pa.array([None], pa.string())}),
        "bytes": _parquet({"prompt": ["1"], "answer": [b"\xff"]}),
        "structs": _parquet({"prompt": ["1"], "answer": [{"a": 1}]}),
        "only its ends": b"PAR1PAR1",
        "a huge footer": _good_parquet()[:-8] + struct.pack("<I", 2**31 - 1) + b"PAR1",
        "its half": _good_parquet()[: len(_good_parquet()) // 2],
        "without its start": _good_parquet()[100:],
    }.items():
        yield (
            f"Parquet with {name}",
            [*run, "data.train.path=rows.parquet"],
            {**good.files, "rows.parquet": content},
            "rows.parquet",
        )
    for suffix in (".json", ".csv", ".jsonl.gz", "", ".JSONL"):
        yield (
            f"a file rows{suffix}",
            [*run, f"data.train.path=all{suffix}"],
            {**good.files, f"all{suffix}": ROWS.encode()},
            "all",
        )


def _changed_data(good: Good, random: Random) -> Changed:
    run = ["run", "good.py", "--plain"]
    if random.random() < 0.5:
        name, content = change_bytes(_good_parquet(), random)
        return (
            f"Parquet with {name}",
            [*run, "data.train.path=rows.parquet"],
            {**good.files, "rows.parquet": content},
        )
    name, content = change_bytes(ROWS.encode(), random)
    return name, run, {**good.files, "rows.jsonl": content}


# Checkpoints

LOADS: dict[str, list[str]] = {
    "torch": ["run", "good.py", "--plain", "models.actor.path=model"],
    "resumed": ["run", "good.py", "--plain", "models.actor.path=model", "models.actor.resume=true"],
    "plan": ["plan", "good.py", "models.actor.path=model"],
    "serve": ["serve", "model", "--port", "0", "--engine", "embedded"],
}
"""Commands that read a checkpoint."""


def _checkpoint(good: Good, **changed: Content) -> dict[str, Content]:
    """Return the good inputs with a checkpoint `model`, of which some files are changed."""
    files = {
        name.replace("__", "/").replace("_json", ".json").replace("_st", ".safetensors"): content
        for name, content in changed.items()
    }
    return {
        **good.files,
        "model": Copy(good.checkpoint),
        **{f"model/{name}": content for name, content in files.items()},
    }


def _tensors(good: Good) -> bytes:
    return (good.checkpoint / "model.safetensors").read_bytes()


def _with_header(tensors: bytes, change: Callable[[dict[str, Any]], Any]) -> bytes:
    """Return a safetensors file with another header."""
    (size,) = struct.unpack("<Q", tensors[:8])
    header = json.loads(tensors[8 : 8 + size])
    change(header)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + tensors[8 + size :]


def _checkpoints(good: Good) -> Chosen:
    config = json.loads((good.checkpoint / "config.json").read_text())

    def configured(**changes: Any) -> bytes:
        return json.dumps({**config, **changes}).encode()

    odd: dict[str, tuple[bytes, str]] = {
        "1e9 layers": (configured(num_hidden_layers=10**9), "num_hidden_layers"),
        "1e9 layers and no types": (json.dumps({k: v for k, v in config.items() if k != "layer_types"} | {"num_hidden_layers": 10**9}).encode(), "num_hidden_layers"),
        "a huge vocabulary": (configured(vocab_size=10**12), "vocab_size"),
        "a huge hidden size": (configured(hidden_size=10**9), "hidden_size"),
        "negative layers": (configured(num_hidden_layers=-1), "num_hidden_layers"),
        "layers as text": (configured(num_hidden_layers="2"), "num_hidden_layers"),
        "half a layer": (configured(num_hidden_layers=1.5), "num_hidden_layers"),
        "no heads": (configured(num_attention_heads=0), "num_attention_heads"),
        "heads that do not divide": (configured(num_attention_heads=3, num_key_value_heads=3), "num_attention_heads"),
        "a bogus dtype": (configured(dtype="float99"), "dtype"),
        "a dtype that is a number": (configured(dtype=16), "dtype"),
        "a bogus torch_dtype": (configured(torch_dtype="x", dtype=None), "dtype"),
        "a quantisation": (configured(quantization_config={"quant_method": "gptq", "bits": 4}), "quantization_config"),
        "a bogus quantisation": (configured(quantization_config={"quant_method": "x"}), "quantization_config"),
        "a quantisation that is text": (configured(quantization_config="x"), "quantization_config"),
        "code of its own": (configured(auto_map={"AutoConfig": "x.Y", "AutoModelForCausalLM": "x.Z"}, model_type="x"), "code"),
        "no model_type": (configured(model_type=None), "model_type"),
        "a model_type that is a list": (configured(model_type=["qwen2"]), "model_type"),
        "a model that is no language model": (configured(model_type="vit"), "model_type"),
        "an activation that does not exist": (configured(hidden_act="x"), "hidden_act"),
        "nan": (configured(rms_norm_eps=float("nan")), "config.json"),
        "an infinite rope_theta": (configured(rope_parameters={"rope_type": "default", "rope_theta": float("inf")}), "config.json"),
        "a key twice": (json.dumps(config).replace('"vocab_size"', '"vocab_size": 7, "vocab_size"').encode(), "vocab_size"),
        "a list": (b"[]", "config.json"),
        "text": (b"x", "config.json"),
        "nothing": (b"", "config.json"),
        "deep lists": (b"[" * DEEP, "config.json"),
        "UTF-16": (json.dumps(config).encode("utf-16"), "config.json"),
        "its half": (json.dumps(config).encode()[:300], "config.json"),
        "latin-1": (b'{"model_type": "\xe4"}', "config.json"),
    }  # fmt: skip
    for name, (content, says) in odd.items():
        loads = (
            ["torch", "plan"]
            if name
            not in (
                "code of its own",
                "an activation that does not exist",
                "a model that is no language model",
            )
            else ["torch"]
        )
        for load in loads:
            yield (
                f"{load}: config.json with {name}",
                LOADS[load],
                _checkpoint(good, config_json=content),
                says,
            )
    huge: dict[str, Content] = {"model/config.json": Sparse(HUGE, b"{")}
    for load, arguments in LOADS.items():
        yield f"{load}: a huge config.json", arguments, {**_checkpoint(good), **huge}, "config.json"
        if load != "plan":  # the checkpoint of a plan may be trained later
            yield f"{load}: no config.json", arguments, {**good.files, "model/x": b""}, ""

    tensors = _tensors(good)
    (header_size,) = struct.unpack("<Q", tensors[:8])

    def first(header: dict[str, Any]) -> Any:
        return header[next(name for name in header if name != "__metadata__")]

    weights: dict[str, Content] = {
        "nothing": b"",
        "its half": tensors[: len(tensors) // 2],
        "only a header": tensors[: 8 + header_size],
        "a huge header": struct.pack("<Q", 2**62) + tensors[8:],
        "a header of 99 MB": struct.pack("<Q", 99 << 20) + tensors[8:],
        "text": b"x" * 1000,
        "zeros": bytes(len(tensors)),
        "a bogus dtype": _with_header(tensors, lambda h: first(h).update(dtype="F99")),
        "integers": _with_header(tensors, lambda h: first(h).update(dtype="I32")),
        "another shape": _with_header(tensors, lambda h: first(h).update(shape=[3])),
        "a transposed tensor": _with_header(tensors, lambda h: first(h).update(shape=first(h)["shape"][::-1] if len(first(h)["shape"]) > 1 else [1, *first(h)["shape"]])),
        "overlapping tensors": _with_header(tensors, lambda h: first(h).update(data_offsets=[0, 4])),
        "offsets beyond its end": _with_header(tensors, lambda h: first(h).update(data_offsets=[0, 2**40])),
        "a tensor less": _with_header(tensors, lambda h: h.pop(next(name for name in h if name != "__metadata__"))),
        "a renamed tensor": _with_header(tensors, lambda h: h.update(x=h.pop(next(name for name in h if name != "__metadata__")))),
    }  # fmt: skip
    for name, content in weights.items():
        yield f"weights with {name}", LOADS["torch"], _checkpoint(good, model_st=content), "model"
    index = {"metadata": {}, "weight_map": {"model.embed_tokens.weight": "model-1.safetensors"}}
    for name, document in {
        "a missing file": index,
        "a file elsewhere": {"weight_map": {"model.embed_tokens.weight": "../../x.safetensors"}},
        "numbers": {"weight_map": {"model.embed_tokens.weight": 3}},
        "a list": {"weight_map": ["x"]},
        "no map": {},
        "an empty map": {"weight_map": {}},
        "a list at the top": [],
    }.items():
        files = {
            **good.files,
            **{
                f"model/{f}": Copy(good.checkpoint / f)
                for f in ("config.json", "tokenizer.json", "tokenizer_config.json")
            },
        }
        files["model/model.safetensors.index.json"] = json.dumps(document).encode()
        yield f"an index of weights with {name}", LOADS["torch"], files, "model"
    pickled = {
        **good.files,
        **{
            f"model/{f}": Copy(good.checkpoint / f)
            for f in ("config.json", "tokenizer.json", "tokenizer_config.json")
        },
    }
    yield (
        "only pickled weights",
        LOADS["torch"],
        {**pickled, "model/pytorch_model.bin": b"\x80\x04."},
        "model",
    )
    yield "no weights", LOADS["torch"], pickled, "model"

    shards = json.loads((good.checkpoint / "shards" / "shards.json").read_text())
    tensor = next(iter(shards["tensors"]))
    of_tensor = shards["tensors"][tensor]
    for name, document in {
        "another format": {**shards, "format": 99},
        "no tensors": {**shards, "tensors": {}},
        "tensors as a list": {**shards, "tensors": []},
        "a missing tensor": {**shards, "tensors": {k: v for k, v in shards["tensors"].items() if k != tensor}},
        "another shape": {**shards, "tensors": {**shards["tensors"], tensor: {**of_tensor, "shape": [3]}}},
        "boxes as text": {**shards, "tensors": {**shards["tensors"], tensor: {**of_tensor, "boxes": "x"}}},
        "boxes with text": {**shards, "tensors": {**shards["tensors"], tensor: {**of_tensor, "boxes": [["x", "y"]]}}},
        "a file elsewhere": {**shards, "tensors": {**shards["tensors"], tensor: {**of_tensor, "boxes": [[of_tensor["boxes"][0][0], "../model.safetensors"]]}}},
        "a missing file": {**shards, "tensors": {**shards["tensors"], tensor: {**of_tensor, "boxes": [[of_tensor["boxes"][0][0], "none.safetensors"]]}}},
        "boxes of another rank": {**shards, "tensors": {**shards["tensors"], tensor: {**of_tensor, "boxes": [[[[0, 1]], of_tensor["boxes"][0][1]]]}}},
        "no config": {k: v for k, v in shards.items() if k != "config"},
        "config as a list": {**shards, "config": []},
        "steps as text": {**shards, "num_steps": "x"},
        "negative steps": {**shards, "num_steps": -1},
        "another model": {**shards, "config": {**shards["config"], "hidden_size": 99}},
        "another head": {**shards, "head": "value"},
        "only null": None,
    }.items():  # fmt: skip
        yield (
            f"an index of shards with {name}",
            LOADS["resumed"],
            _checkpoint(good, shards__shards_json=json.dumps(document).encode()),
            "shards",
        )
    for name, content in {
        "nothing": b"",
        "deep lists": b"[" * DEEP,
        "UTF-16": json.dumps(shards).encode("utf-16"),
    }.items():
        yield (
            f"an index of shards with {name}",
            LOADS["resumed"],
            _checkpoint(good, shards__shards_json=content),
            "shards",
        )
    shard = next(iter((good.checkpoint / "shards").glob("*.safetensors")))
    content = shard.read_bytes()
    for name, changed in {
        "nothing": b"",
        "its half": content[: len(content) // 2],
        "zeros": bytes(len(content)),
        "a renamed tensor": _with_header(
            content, lambda h: h.update(x=h.pop(next(name for name in h if name != "__metadata__")))
        ),
        "a bogus dtype": _with_header(content, lambda h: first(h).update(dtype="F99")),
    }.items():
        yield (
            f"a shard with {name}",
            LOADS["resumed"],
            {**_checkpoint(good), f"model/shards/{shard.name}": changed},
            shard.name,
        )
    yield (
        "no shards",
        LOADS["resumed"],
        {
            **good.files,
            **{f"model/{f}": Copy(good.checkpoint / f) for f in ("config.json", "model.safetensors")},
        },
        "shards",
    )

    tokenizer = json.loads((good.checkpoint / "tokenizer.json").read_text())
    for name, text in {
        "nothing": b"",
        "text": b"x",
        "a list": b"[]",
        "deep lists": b"[" * DEEP,
        "no model": json.dumps({**tokenizer, "model": None}).encode(),
        "a bogus model": json.dumps({**tokenizer, "model": {"type": "X"}}).encode(),
        "negative ids": json.dumps({**tokenizer, "model": {**tokenizer["model"], "vocab": {"a": -1}}}).encode(),
        "huge ids": json.dumps({**tokenizer, "model": {**tokenizer["model"], "vocab": {"a": 10**30}}}).encode(),
        "too many tokens": json.dumps({**tokenizer, "model": {**tokenizer["model"], "vocab": {str(i): i for i in range(999)} | {"<unk>": 999}}}).encode(),
    }.items():  # fmt: skip
        yield f"tokenizer.json with {name}", LOADS["torch"], _checkpoint(good, tokenizer_json=text), ""
    for file in ("tokenizer_config_json", "generation_config_json"):
        for name, text in {
            "a list": b"[]",
            "text": b"x",
            "nothing": b"",
            "deep lists": b"[" * DEEP,
            "UTF-16": "{}".encode("utf-16"),
        }.items():
            yield f"{file} with {name}", LOADS["torch"], _checkpoint(good, **{file: text}), "config.json"
    yield (
        "tokenizer_config.json with a bogus class",
        LOADS["torch"],
        _checkpoint(good, tokenizer_config_json=b'{"tokenizer_class": 3}'),
        "tokenizer",
    )
    yield (
        "generation_config.json with text as end",
        LOADS["torch"],
        _checkpoint(good, generation_config_json=b'{"eos_token_id": "x"}'),
        "eos_token_id",
    )
    yield (
        "an unreadable chat template",
        LOADS["torch"],
        {**_checkpoint(good), "model/chat_template.jinja": b"{% for %}"},
        "chat template",
    )


def _changed_checkpoint(good: Good, random: Random) -> Changed:
    load = random.choice(["torch", "resumed", "plan", "torch", "resumed"])
    names = ["config.json", "tokenizer.json", "tokenizer_config.json"]
    names += {"torch": ["model.safetensors"] * 3, "resumed": ["shards/shards.json"] * 2, "plan": []}[load]
    names += (
        [f"shards/{path.name}" for path in (good.checkpoint / "shards").glob("*.safetensors")]
        if load == "resumed"
        else []
    )
    name = random.choice(names if load != "plan" else ["config.json"])
    content = (good.checkpoint / name).read_bytes()
    if name.endswith(".json") and random.random() < 0.7:
        what, changed = change_json(content, random)
    elif name.endswith(".safetensors") and random.random() < 0.7:
        (size,) = struct.unpack("<Q", content[:8])
        what, start = change_bytes(content[: 8 + size], random)
        changed = start + content[8 + size :]
    else:
        what, changed = change_bytes(content, random)
    return f"{load}: {name}: {what}", LOADS[load], {**_checkpoint(good), f"model/{name}": changed}


# Plan files


def _plan_files(good: Good) -> Chosen:
    plan = json.loads((good.run / "plan.json").read_text())
    rows = plan["plan"]

    def changed(**changes: Any) -> bytes:
        return json.dumps({**plan, **changes}).encode()

    documents: dict[str, bytes] = {
        "nothing": b"",
        "null": b"null",
        "a list": b"[]",
        "an empty object": b"{}",
        "its half": changed()[:2000],
        "deep lists": b"[" * DEEP,
        "UTF-16": json.dumps(plan).encode("utf-16"),
        "binary": bytes(range(256)),
        "another format": changed(format=99),
        "no format": json.dumps({k: v for k, v in plan.items() if k != "format"}).encode(),
        "format as text": changed(format="1"),
        "format true": changed(format=True),
        "an edited digest": changed(plan={**rows, "digest": "0" * 64}),
        "digest as a number": changed(plan={**rows, "digest": 3}),
        "no digest": changed(plan={k: v for k, v in rows.items() if k != "digest"}),
        "another batch": changed(plan={**rows, "schedule": {**rows["schedule"], "batch": 99}}),
        "another order": changed(plan={**rows, "replicas": rows["replicas"][::-1] * 2}),
        "nan": changed(plan={**rows, "x": float("nan")}),
        "a key twice": json.dumps(plan).replace('"plan": {', '"plan": {}, "plan": {', 1).encode(),
        "the recipe twice": json.dumps(plan).replace('"recipe":', '"recipe": "x.py", "recipe":', 1).encode(),
        "an unknown key in its configuration": changed(config={**plan["config"], "none": 1}),
        "nan in its configuration": changed(config={**plan["config"], "seed": float("nan")}),
        "configuration as a list": changed(config=[]),
        "plan as a list": changed(plan=[]),
        "recipe as a number": changed(recipe=3),
        "no recipe": changed(recipe=""),
        "a long recipe": changed(recipe="a" * 5000),
        "a recipe with NUL": changed(recipe="a\x00.py"),
        "a recipe that is a directory": changed(recipe="."),
        "another seed": changed(config={**plan["config"], "seed": 99}),
        "a huge batch": changed(config={**plan["config"], "batch": 10**9}),
    }  # fmt: skip
    for key in rows:
        documents[f"no {key}"] = changed(plan={k: v for k, v in rows.items() if k != key})
        documents[f"{key} as a number"] = changed(plan={**rows, key: 3})
    for name, content in documents.items():
        yield (
            name,
            ["run", "--plan", "plan.json", *([] if "recipe" in name else ["good.py"]), "--plain"],
            {**good.files, "plan.json": content},
            "",
        )
    yield (
        "a huge file",
        ["run", "--plan", "plan.json"],
        {**good.files, "plan.json": Sparse(HUGE, b"{")},
        "plan.json",
    )
    for name, link in {
        "a pipe": Pipe(),
        "endless": Link("/dev/zero"),
        "a loop of links": Link("plan.json"),
    }.items():
        for arguments in (["run", "--plan", "plan.json"], ["plan", "--diff", "plan.json", "good.py"]):
            yield f"{name}: {arguments[0]}", arguments, {**good.files, "plan.json": link}, "plan.json"
        calibrated = ["plan", "good.py", "calibration=plan.json"]
        yield f"{name}: calibration", calibrated, {**good.files, "plan.json": link}, "plan.json"
    yield (
        "a huge file to compare",
        ["plan", "--diff", "plan.json", "good.py"],
        {**good.files, "plan.json": Sparse(HUGE, b"{")},
        "plan.json",
    )


def _changed_plan_file(good: Good, random: Random) -> Changed:
    content = (good.run / "plan.json").read_bytes()
    what, changed = (change_json if random.random() < 0.7 else change_bytes)(content, random)
    command = random.choice(
        [
            ["run", "--plan", "plan.json", "good.py", "--plain"],
            ["plan", "--diff", "plan.json", "old.json"],
            ["plan", "--diff", "old.json", "plan.json"],
        ]
    )
    return f"{command[1]} {what}", command, {**good.files, "plan.json": changed, "old.json": content}


# Ledgers


def _ledgers(good: Good) -> Chosen:
    plan = {"run/plan.json": Copy(good.run / "plan.json")}
    ledger = {**plan, "run/ledger.sqlite": Copy(good.run / "ledger.sqlite")}
    for where in [
        "", " ", "x", "nope = 1", "1 +", "(", ")", "1; DROP TABLE issued", "1; SELECT 1", "id = 'x", "--", "/*", "\x00", "id = \x00", "\udcff", "é",
        "1 UNION SELECT 1", "EXISTS (SELECT 1 FROM none)", "id IN (SELECT * FROM samples)", "load_extension('x')", "writefile('x', 'y')", "readfile('x')",
        "(ATTACH 'x' AS y)", "PRAGMA table_info(issued)", "randomblob(1000000000) = 1", "zeroblob(2000000000) = 1", "printf('%.*c', 1000000000, 'x') = 1",
        "length(replace(printf('%.*c', 100000, 'x'), 'x', printf('%.*c', 100000, 'y'))) > 0", "hex(zeroblob(900000000)) = 1", "id = " + "(" * 5000 + "1" + ")" * 5000,
        " AND ".join(["id = 1"] * 20_000), "id = ?", "id = :x", "id = @x", "match(id, 1)", "sum(id) > 1", "count(*) > 1", "row_number() OVER () = 1", "id = 1 LIMIT 1",
        "1 ORDER BY 1", "x" * 1_000_000, "id REGEXP 'x'", "fts3_tokenizer('x') = 1", "sqlite_compileoption_get(1) = none", "json_extract('[', '$') = 1", "abs(-9223372036854775808) = 1",
        "(SELECT count(*) FROM " + ", ".join(f"issued AS t{i}" for i in range(40)) + ") > 0",
        "(WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT count(*) FROM c) > 0",
        "(WITH RECURSIVE c(x) AS (SELECT 'a' UNION ALL SELECT x || x FROM c) SELECT max(length(x)) FROM c) > 0",
        "id LIKE '" + "%a" * 30_000 + "'",
    ]:  # fmt: skip
        arguments = ["samples", "run", "--where", where]
        yield f"--where {where[:50]!r}", arguments, ledger, "--where"
    for name, content in {
        "nothing": b"",
        "text": b"x" * 1000,
        "only a header": (good.run / "ledger.sqlite").read_bytes()[:100],
        "its half": (good.run / "ledger.sqlite").read_bytes()[
            : (good.run / "ledger.sqlite").stat().st_size // 8192 * 4096
        ],
        "zeros": bytes(8192),
        **_other_databases(good),
    }.items():
        for arguments in (["samples", "run"], ["samples", "run", "--count"], ["why", "run", "0"]):
            yield (
                f"{' '.join(arguments)}: {name}",
                arguments,
                {**plan, "run/ledger.sqlite": content},
                "ledger.sqlite",
            )
    for arguments in (["samples", "run"], ["why", "run", "0"]):
        yield f"{arguments[0]}: a directory", arguments, {**plan, "run/ledger.sqlite/x": b""}, ""
        yield f"{arguments[0]}: an empty directory", arguments, {"run/x": b""}, ""


def _other_databases(good: Good) -> dict[str, bytes]:
    """Return databases that are not ledgers, or have lost something."""

    def database(*statements: str, start: bytes = b"") -> bytes:
        with closing(sqlite3.connect(":memory:")) as opened:
            if start:
                opened.deserialize(start)
            for statement in statements:
                opened.execute(statement)
            opened.commit()
            return opened.serialize()

    whole = _in_memory(good)
    about = "CREATE TABLE about (key TEXT PRIMARY KEY, value)"
    return {
        "of another program": database("CREATE TABLE x (y)"),
        "empty about": database(about),
        "about without columns": database("CREATE TABLE about (x)"),
        "only a format": database(about, "INSERT INTO about VALUES ('format', 2)"),
        "format null": database("UPDATE about SET value = NULL WHERE key = 'format'", start=whole),
        "format as text": database("UPDATE about SET value = '2' WHERE key = 'format'", start=whole),
        "format as bytes": database("UPDATE about SET value = x'ff' WHERE key = 'format'", start=whole),
        "another format": database("UPDATE about SET value = 99 WHERE key = 'format'", start=whole),
        "no issued": database("DROP TABLE issued", start=whole),
        "no streams": database("DROP TABLE streams", start=whole),
        "no rows of streams": database("DELETE FROM streams", start=whole),
    }


def _in_memory(good: Good) -> bytes:
    """Return the ledger without its mark for a write-ahead log, which a database in memory cannot have."""
    content = (good.run / "ledger.sqlite").read_bytes()
    return content[:18] + b"\x01\x01" + content[20:]


def _changed_ledger(good: Good, random: Random) -> Changed:
    content = (good.run / "ledger.sqlite").read_bytes()
    if random.random() < 0.5:
        what, changed = change_bytes(content, random)
    else:
        with closing(sqlite3.connect(":memory:")) as opened:
            opened.deserialize(_in_memory(good))
            tables = [row[0] for row in opened.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
            table = random.choice(tables)
            column = random.choice([row[1] for row in opened.execute(f"PRAGMA table_info({table})")])
            value = random.choice(
                ["NULL", "-1", "'x'", "x'ff'", "1e300", "9e999", "9223372036854775807", "CAST(x'ff' AS TEXT)"]
            )
            what = random.choice(
                [
                    f"UPDATE OR REPLACE {table} SET {column} = {value}",
                    f"DELETE FROM {table}",
                    f"DROP TABLE {table}",
                ]
            )
            try:
                opened.execute(what)
            except sqlite3.Error:
                what = "unchanged"
            opened.commit()
            changed = opened.serialize()
    command = random.choice(
        [
            ["samples", "run"],
            ["samples", "run", "--json"],
            ["samples", "run", "--csv"],
            ["why", "run", "0"],
            ["why", "run", "1", "--json"],
            ["samples", "run", "--where", "reward > 0 OR length > 1"],
        ]
    )
    return (
        f"{' '.join(command)}: {what}",
        command,
        {"run/plan.json": Copy(good.run / "plan.json"), "run/ledger.sqlite": changed},
    )


def _no_change(good: Good, random: Random) -> Changed:
    options = [
        "--steps",
        "--layout",
        "--seed",
        "--limit",
        "--where",
        "--most",
        "--days",
        "--on",
        "--json",
        "--plan",
        "--diff",
        "--what-if",
        "--cfg",
        "--html",
    ]
    values = [
        "1",
        "-1",
        "x",
        "",
        "nan",
        "good.py",
        "steps=2",
        "batch=x",
        "cluster=cpu-1x2",
        "--",
        "d1",
        "plan.json",
        "h100",
    ]
    arguments = [random.choice(["check", "plan", "simulate", "size", "samples", "why", "run"])]
    arguments += [
        random.choice(options if random.random() < 0.5 else values) for _ in range(random.randrange(5))
    ]
    if arguments[0] == "run":
        arguments.append("--cfg")
    files = {
        **good.files,
        "plan.json": Copy(good.run / "plan.json"),
        "run/ledger.sqlite": Copy(good.run / "ledger.sqlite"),
    }
    return " ".join(arguments), arguments, files


KINDS: Sequence[tuple[str, Callable[[Good], Chosen], Callable[[Good, Random], Changed]]] = (
    ("override", _overrides, _changed_override),
    ("option", _options, _no_change),
    ("recipe", _recipes, _changed_recipe),
    ("data", _data, _changed_data),
    ("checkpoint", _checkpoints, _changed_checkpoint),
    ("plan file", _plan_files, _changed_plan_file),
    ("ledger", _ledgers, _changed_ledger),
)
"""Kind of input -> its chosen cases, and a random change of it."""
