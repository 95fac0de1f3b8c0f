"""Writes what hflow says and does for many inputs, one file for each, to compare two versions by `diff -r`.

    python -m benchmarks.behaviour.record_behaviour build/before
    (change the code)
    python -m benchmarks.behaviour.record_behaviour build/after && diff -r build/before build/after

Recorded are, for each shipped recipe and some clusters, the plan as text and as JSON with its digest, and the
simulated seconds; the help of every command; the message for every bad input of the tests; and the metrics of
seeded runs, without those that depend on time. It takes about 15 minutes on two cores.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from random import Random
from unittest import mock

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["COLUMNS"] = "120"
ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "kits"))

import bad_input  # noqa: E402
import bad_input_cases  # noqa: E402
from runs import run  # noqa: E402

from hflow.cli import main as hflow  # noqa: E402
from hflow.cli.commands import app  # noqa: E402
from hflow.runtime.saving.run_directory import read_metrics  # noqa: E402

RECIPES = [
    str(path.relative_to(ROOT))
    for path in sorted([*ROOT.glob("recipes/*.py"), *ROOT.glob("recipes/*/*.py")])
    if "\nrecipe = " in path.read_text()
]
SEVEN = ("model@models.actor=qwen2.5-7b", "models.actor.path=null")
VLLM, MEGATRON = "models.actor.gen.engine=vllm", "models.actor.backend=megatron"
PPO, GRPO, ASYNC = "recipes/ppo.py", "recipes/grpo.py", "recipes/grpo_async.py"
SETUPS = {
    "grpo-2x8": (GRPO, "cluster=h100-2x8"),
    "grpo-vllm": (GRPO, "cluster=h100-1x8", *SEVEN, VLLM, "models.actor.gen.max_model_len=2048"),
    "grpo-megatron": (GRPO, "cluster=h100-1x8", MEGATRON, "models.actor.layout=d2t2c2"),
    "grpo-te": (GRPO, "cluster=h100-1x8", MEGATRON, "models.actor.kernels=transformer_engine"),
    "grpo-deterministic": (GRPO, "cluster=h100-1x8", "deterministic=true", VLLM),
    "grpo-apart": (GRPO, "cluster=h100-8x8", "placement=actor=0-31 actor.gen=32-63", VLLM, *SEVEN),
    "grpo-cpu-t2": (GRPO, "cluster=cpu-1x2", VLLM, "models.actor.gen.layout=t2"),
    "grpo-lora": (GRPO, "cluster=l4-1x1", "models.actor.lora.r=8"),
    "grpo-offload": (GRPO, "cluster=l4-2x8", "models.actor.offload=all", *SEVEN),
    "grpo-moe": (
        GRPO,
        "cluster=h100-4x8",
        "model@models.actor=qwen3-30b-a3b",
        "models.actor.path=null",
        MEGATRON,
        VLLM,
    ),
    "async-2x8": (ASYNC, "cluster=h100-2x8"),
    "async-apart": (
        ASYNC,
        "cluster=h100-8x8",
        VLLM,
        "schedule.max_staleness=4",
        "placement=actor=0-31 actor.gen=32-63",
    ),
    "async-delta": (ASYNC, "cluster=h100-2x8", VLLM, "models.actor.gen.delta=true"),
    "ppo-8x8": (PPO, "cluster=h100-8x8"),
    "ppo-1x8-mixed": (PPO, "cluster=h100-1x8", "placement=actor=0-3:d2t2 actor.gen=4-7:d4", MEGATRON),
    "ppo-overlap": (PPO, "cluster=h100-1x8", "placement=actor.gen=all actor,ref=0-3 critic=4-7"),
    "ppo-one-group": (PPO, "cluster=h100-8x8", "models.critic.group=values", "models.ref.group=values"),
    "ppo-ethernet": (PPO, "cluster=a100-80g-2x8", "network=ethernet-100g", "device_memory_gib=70"),
    "ppo-1024": (PPO, "cluster=h100-128x8", "batch=8192"),
    "ppo-pipeline": (PPO, "cluster=cpu-1x4", MEGATRON, "models.actor.layout=d1t2p2"),
    "self-play": ("recipes/self_play.py", "cluster=h100-1x8", "batch=128"),
    "gsm8k-7b": ("recipes/gsm8k/grpo_7b.py", "cluster=a100-80g-1x8"),
    "agent-b200": ("recipes/tool_agent.py", "cluster=b200-1x8"),
}
"""Name -> a recipe and changes that reach other parts of the planner than the recipe as shipped."""
SMALL = ("cluster=cpu-1x1", "workers=inproc", "steps=3", "seed=1")
TINY = ("+model@models.actor=tiny-qwen2", "+data@data.train=addition", "models.actor.path=null")
RUNS = {
    "grpo": (GRPO, *SMALL, "models.actor.path=null", "batch=4"),
    "grpo-megatron": (GRPO, *SMALL, "models.actor.path=null", "batch=4", MEGATRON),
    "ppo": (PPO, *SMALL, "models.actor.path=null", "batch=16"),
    "sft": ("recipes/sft.py", *SMALL, "batch=8"),
    "dapo": ("recipes/dapo.py", *SMALL, "models.actor.path=null", "batch=4"),
    "gspo": ("recipes/gspo.py", *SMALL, "models.actor.path=null", "batch=4"),
    "agent": ("recipes/tool_agent.py", *SMALL, "models.actor.path=null", "batch=2"),
    "own-kinds": ("tests/integration/recipes/own_kinds.py", *SMALL, *TINY, "batch=2"),
}
TIMED = re.compile(r"second|busy|rollout/|episodes/|memory|staleness|_at$|bytes|retries|time")
"""Metrics that depend on time or on the machine."""


def said(*arguments: str) -> str:
    """Return the exit code and the output of a command of hflow."""
    out = io.StringIO()
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(out),
        contextlib.chdir(ROOT),
        mock.patch.object(sys, "argv", ["hflow", *arguments]),
    ):
        try:
            code: object = hflow()
        except SystemExit as exit:
            code = exit.code
    return f"exit code {code or 0}\n{out.getvalue()}"


def recorded(directory: Path) -> Iterator[tuple[str, str]]:
    """Yield a file's name and text for everything that is recorded."""
    for command in [command.name or command.callback.__name__ for command in app.registered_commands]:
        yield f"help/{command.removesuffix('_command')}", said(command, "--help")
    setups = {recipe.removeprefix("recipes/").removesuffix(".py"): (recipe,) for recipe in RECIPES}
    for name, arguments in {**setups, **SETUPS}.items():
        yield f"check/{name}", said("check", arguments[0])
        yield f"plan/{name}", said("plan", *arguments)
        yield f"json/{name}", said("plan", *arguments, "--json")
        yield f"simulate/{name}", said("simulate", *arguments, "--steps", "20")
    for name, (recipe, *changes) in RUNS.items():
        summary = run(recipe, directory / name, *changes)
        rows = read_metrics(summary.directory / "metrics.jsonl")
        kept = [{key: row[key] for key in sorted(row) if not TIMED.search(key)} for row in rows]
        yield f"metrics/{name}", "\n".join(map(json.dumps, kept)) + f"\n{summary.plan_digest}\n"
    good = bad_input_cases.good_inputs(directory / "good")
    for number, case in enumerate(bad_input_cases.cases(good, Random(0), 0)):
        outcome = bad_input.run_case(case, directory / "case")
        yield f"refused/{number:03}", f"{case}\n{case.arguments}\nexit code {outcome.code}\n{outcome.errors}"


def main() -> None:
    """Write the files."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        hidden = re.compile(rf"{re.escape(name)}|{re.escape(str(ROOT))}|\d{{8}}-\d{{6}}\b")
        for file, text in recorded(Path(name)):
            path = arguments.out.absolute() / f"{file}.txt"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(hidden.sub("...", text))


if __name__ == "__main__":
    main()
