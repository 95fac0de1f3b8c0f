"""Speed of hflow beside its peers and beside the limit of the processor, on one core.

    python -m benchmarks.speed.peers --peer .venv-peers/bin/python             # everything, about 20 minutes
    python -m benchmarks.speed.peers --only decode --sizes tiny --rounds 3     # a part of it

Three comparisons, for random Qwen2 models of 0.5 and 19 million parameters; the first one also for
SmolLM2-135M, which has a vocabulary of 49,152, as real models have. Every process has one thread, and
all of them share one core, in turn (A B C A B C). All figures are processor seconds, with those of child
processes, so that other programs disturb them through shared caches only.

- grpo: a step of recipes/grpo.py in one process beside TRL's GRPOTrainer (in the environment of `--peer`),
  and the threads in which hflow spends it;
- decode: tokens a second of hflow's engines (embedded and vLLM), of HF `generate` and of vLLM by itself, by
  running sequences. Sampling is seeded by sample and log-probs are recorded, except by `generate`;
- train: forward, backward and optimizer step of the torch backend beside its matrix products alone.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from threading import enumerate as enumerate_threads
from typing import Any

from benchmarks.lib import harness
from hflow.models import smollm2

HERE = Path(__file__).parent
CHECKPOINT = HERE.parents[1] / "configs" / "checkpoints" / "addition"
SIZES: dict[str, dict[str, int]] = {
    "tiny": {},
    "19m": {
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    },
}
"""Size -> what differs from the Qwen2 of `configs/checkpoints/addition`, 2 layers of width 128."""
SEQUENCES = (8, 64, 256)
PROMPT_TOKENS, MAX_TOKENS, GROUP = 16, 64, 8
ADDITION_TOKENS = 7
"""Tokens of a prompt of the additions."""
WARMUP = 3
PARTS = ("grpo", "decode", "train")


@dataclass(frozen=True)
class Grpo:
    """One step of GRPO, eight answers a prompt."""

    prompts: int
    updates: int
    max_tokens: int
    lr: float
    steps: int
    shots: int = 0
    """Solved additions in front of each prompt, of ten tokens each."""
    budget: int = 16384
    """Tokens of a micro-batch."""


GRPO: dict[str, Grpo] = {
    "tiny": Grpo(prompts=8, updates=1, max_tokens=64, lr=0.0, steps=15),
    "19m": Grpo(prompts=8, updates=1, max_tokens=64, lr=0.0, steps=7),
    "recipe": Grpo(prompts=64, updates=2, max_tokens=4, lr=1e-4, steps=20),
    "smollm2": Grpo(prompts=4, updates=1, max_tokens=32, lr=0.0, steps=5),
    "smollm2-long": Grpo(prompts=4, updates=1, max_tokens=65, lr=0.0, steps=5, shots=52, budget=2200),
}
"""The first two: answers end at random after 27 tokens on average. `recipe`: recipes/grpo.py as it is.
`smollm2-long`: prompts of about 530 tokens, two groups of which fit into a micro-batch."""
REAL = "smollm2"


def make_model(directory: Path, size: str) -> None:
    """Write a random model of a size, with the tokenizer of the additions."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    values = AutoConfig.from_pretrained(CHECKPOINT).to_dict() | SIZES[size] | {"max_position_embeddings": 512}
    del values["layer_types"]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**values)).float()
    model.save_pretrained(directory)
    AutoTokenizer.from_pretrained(CHECKPOINT).save_pretrained(directory)


def model_of(size: str, directory: Path) -> Path:
    """Return the checkpoint of a case; a random one is made in a directory."""
    if size == "recipe":
        return CHECKPOINT
    if size.startswith(REAL):
        return smollm2.fetch("models.actor.path")
    make_model(directory / size, size)
    return directory / size


def write_prompts(path: Path, shots: int) -> None:
    """Write additions with solved ones in front of them; `peers/trl_grpo.py` has the same."""
    rng = random.Random(0)
    pairs = [(rng.randrange(100), rng.randrange(100)) for _ in range(4096)]
    solved = "".join(f"{a:02d}+{b:02d}={a + b:03d}\n" for a, b in pairs[:shots])
    rows = [{"prompt": f"{solved}{a:02d}+{b:02d}=", "answer": f"{a + b:03d}"} for a, b in pairs]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def step_overrides(model: Path, case: Grpo, out: str) -> list[str]:
    """Return the configuration of recipes/grpo.py in one process, without evaluations."""
    rows: list[str] = []
    if case.shots:
        path = Path(out) / "prompts.jsonl"
        write_prompts(path, case.shots)
        rows = ["data.train.generator=null", f"data.train.path={path}", f"workload.prompt={10 * case.shots}"]
    return [
        *rows,
        *(f"models.actor.path={model}", f"steps={case.steps}", f"out={out}", "save_every=100000"),
        *(f"batch={case.prompts}", f"nodes.actor_gen.max_tokens={case.max_tokens}"),
        *(f"nodes.actor_train.minibatches={case.updates}", f"models.actor.optim.lr={case.lr}"),
        *(f"models.actor.gen.max_model_len={128 + 10 * case.shots}", "nodes.eval_gen.after=100000"),
        f"models.actor.tokens_per_microbatch={case.budget}",
        *("workers=inproc", "cluster=cpu-1x1"),
    ]


def serve_steps(model: str, case: Grpo) -> None:
    """Run recipes/grpo.py; print the processor seconds of a step, in all and by thread."""
    from hflow import Observer
    from hflow.launch.planning.compile import compile_recipe
    from hflow.launch.running.run_recipe import run_compiled

    found: list[dict[str, float]] = []

    class Clock(Observer):
        def on_step(self, step: int, values: Mapping[str, float]) -> None:
            found.append(thread_seconds() | {"processes of bodies": descendant_seconds(os.getpid())})

    with tempfile.TemporaryDirectory() as out:
        recipe = HERE.parents[1] / "recipes" / "grpo.py"
        compiled = compile_recipe(recipe, step_overrides(Path(model), case, out))
        run_compiled(replace(compiled, observers=(Clock(),)), False)
    first, last, num_steps = found[WARMUP - 1], found[-1], len(found) - WARMUP
    parts = {name: (last[name] - first.get(name, 0.0)) / num_steps for name in last}
    seconds = sum(parts.values())
    parts = {name: round(part, 4) for name, part in parts.items() if part > 0.001 * seconds}
    print(json.dumps({"step_seconds": seconds, "steps_per_second": 1 / seconds, "threads": parts}))


def thread_seconds() -> dict[str, float]:
    """Return the processor seconds of the threads of this process, by name."""
    names = {
        thread.native_id: thread.name.rpartition("_")[0] or thread.name for thread in enumerate_threads()
    }
    seconds: dict[str, float] = {}
    for directory in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError):  # a thread that has just ended
            name = names.get(int(directory.name), "others")
            seconds[name] = seconds.get(name, 0.0) + stat_seconds(directory)
    return seconds


def used_seconds() -> float:
    """Return the processor seconds of this process and of those that it has started."""
    return time.process_time() + descendant_seconds(os.getpid())


def descendant_seconds(pid: int) -> float:
    """Return the processor seconds of the processes that a process has started, and of theirs."""
    total = 0.0
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in children.read_text().split():
            with suppress(FileNotFoundError):  # a process that has just ended
                total += stat_seconds(Path("/proc") / child) + descendant_seconds(int(child))
    return total


def stat_seconds(directory: Path) -> float:
    """Return the processor seconds in the `stat` of a process or thread."""
    fields = (directory / "stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def compare_grpo(model: Path, case: Grpo, peer: str, rounds: int) -> dict[str, Any]:
    """Compare processor seconds of steps of GRPO; the ratio is speed beside TRL's."""
    arguments = json.dumps({"model": str(model), **asdict(case)})
    trl = [peer, str(HERE / "peers" / "trl_grpo.py"), arguments]
    hflow = [sys.executable, "-m", __spec__.name, "--serve", "steps", arguments]
    rows = harness.interleave(
        {"trl": lambda: harness.run_once(trl), "hflow": lambda: harness.run_once(hflow)}, rounds
    )
    return {"summary": harness.compare(rows, "steps_per_second", "trl"), "rows": rows}


def serve_engine(name: str, model: str) -> None:
    """Measure an engine of hflow, once for each number of sequences on stdin."""
    from hflow.engines.interface import EngineSetup, GenerationEngine, SamplingParams
    from hflow.models.settings import ModelSettings
    from hflow.planner.models.descriptors import engine_kind
    from hflow.workers.process_setup import keep_freed_memory

    keep_freed_memory()  # as a worker does
    setup = EngineSetup(
        ModelSettings(name="actor", path=model),
        {"max_running": max(SEQUENCES), "max_model_len": 512},
        cores=(tuple(sorted(os.sched_getaffinity(0))),),
    )
    engine: GenerationEngine = engine_kind(name).factory(setup)
    engine.set_version(0)
    count = 0
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        start, tokens = used_seconds(), 0
        for sequence in range(int(line)):
            ids = [4 + (sequence // GROUP * 31 + i * 7) % 12 for i in range(PROMPT_TOKENS)]
            engine.add(count, ids, SamplingParams(max_tokens=MAX_TOKENS, seed=count))
            count += 1
        while engine.num_unfinished:
            tokens += sum(len(made.ids) for _, made in engine.step())
        seconds = used_seconds() - start
        print(json.dumps({"tokens_per_second": tokens / seconds, "tokens": tokens}), flush=True)
    engine.close()


def compare_decode(model: Path, rounds: int) -> dict[str, Any]:
    """Compare engines by running sequences; ratios are speed beside HF `generate`'s."""
    lengths = [str(PROMPT_TOKENS), str(MAX_TOKENS)]
    peers = HERE / "peers"
    children = {
        "generate": harness.Server([sys.executable, str(peers / "hf_generate.py"), str(model), *lengths]),
        "hflow": harness.Server([sys.executable, "-m", __spec__.name, "--serve", "embedded", str(model)]),
        "hflow_vllm": harness.Server([sys.executable, "-m", __spec__.name, "--serve", "vllm", str(model)]),
        "vllm": harness.Server(
            [sys.executable, str(peers / "vllm_decode.py"), str(model), str(max(SEQUENCES)), *lengths]
        ),
    }
    found: dict[str, Any] = {}
    for num in SEQUENCES:
        measures: dict[str, Callable[[], dict[str, Any]]] = {
            name: lambda child=child, num=num: child.measure(num)  # type: ignore[misc]
            for name, child in children.items()
        }
        harness.interleave(measures, 1)  # warm-up
        rows = harness.interleave(measures, rounds)
        found[str(num)] = {"summary": harness.compare(rows, "tokens_per_second", "generate"), "rows": rows}
    for child in children.values():
        child.close()
    return found


@dataclass(frozen=True)
class Answers:
    """Answers of a training step, eight to a prompt."""

    groups: int = 8
    prompt: int = ADDITION_TOKENS
    longest: int = MAX_TOKENS


TRAINED = {"smollm2-long": Answers(groups=1, prompt=530, longest=97)}
"""Size -> answers, if they are not those of the comparison of GRPO steps."""


def serve_training(model: str, case: Answers) -> None:
    """Measure training steps and their matrix products, once for each line on stdin."""
    from hflow import nodes
    from hflow.config.schema import OptimConfig
    from hflow.graph.ir import Read
    from hflow.models.settings import ModelSettings, RankPosition
    from hflow.training.fsdp.backend import TorchModel
    from hflow.training.interface import NodeCall, TrainShard
    from hflow.types import Unit
    from hflow.workers.process_setup import keep_freed_memory

    fields = {
        "behav_logprobs": "behav_logprobs",
        "prox_logprobs": "behav_logprobs",
        "advantages": "advantages",
    }
    reads = [Read(name, field, "g", "g", Unit.TOKEN, Unit.TOKEN, "tensor") for name, field in fields.items()]
    call = NodeCall(
        "actor_train",
        nodes.actor_train,
        tuple(reads),
        (("out", "output"), ("seqs", "sequences")),
        (("loss", "token"),),
        metrics=True,
        knobs={"behav_weight_cap": None},
        options={"reduce": "token-mean"},
    )
    settings = ModelSettings(name="actor", trainable=True, path=model, optim=OptimConfig(lr=0.0))
    keep_freed_memory()  # as a worker does
    trained, batch = TorchModel(settings, RankPosition()), answers(case)
    shard = TrainShard((batch,))
    products = list(matrix_products(trained, case.groups * case.prompt, batch))
    trained.train(call, [shard], 0)
    print(json.dumps({"ready": True}), flush=True)
    for step, _ in enumerate(sys.stdin):
        seconds, products_seconds = cpu_seconds(lambda step=step: trained.train(call, [shard], step)), 0.0
        for first, second in products:
            products_seconds += cpu_seconds(lambda a=first, b=second: a @ b)
        print(json.dumps({"seconds": seconds, "products": products_seconds}), flush=True)


def answers(case: Answers) -> Any:
    """Return a batch: that of the comparison of GRPO steps, or answers of a third to all of `longest`."""
    import numpy as np

    from hflow.data.batches.batch import Batch, Column
    from hflow.types import Unit

    rng, count = np.random.default_rng(0), case.groups * GROUP
    if case == Answers():
        drawn = np.minimum(rng.geometric(1 / 32, count), MAX_TOKENS)
    else:
        drawn = rng.integers(case.longest // 3, case.longest + 1, count)
    lengths = case.prompt + drawn
    total, groups = int(lengths.sum()), np.arange(count) // GROUP
    within = np.arange(total) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    is_prompt = within < case.prompt
    prompt_ids = 4 + (np.repeat(groups, lengths) * 31 + within * 7) % 12
    columns = {
        "input_ids": np.where(is_prompt, prompt_ids, rng.integers(3, 32, total)),
        "loss_mask": ~is_prompt,
        "behav_logprobs": np.where(is_prompt, 0, -3.5).astype(np.float32),
        "advantages": rng.normal(0, 1, total).astype(np.float32),
    }
    named = {name: Column(Unit.TOKEN, values) for name, values in columns.items()}
    return Batch(np.arange(count), groups, lengths, named)


def matrix_products(trained: Any, num_prompt_rows: int, batch: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the factors of all products of linear layers: forward, and backward by input and by weight.

    Prompts count once. Products of attention are left out; here they are 1 to 2 % of the others.
    """
    import torch

    num_learned = int(batch.columns["loss_mask"].values.sum())
    for name, module in trained._model.named_modules():
        if isinstance(module, torch.nn.Linear):
            num_rows = num_learned if name == "lm_head" else num_learned + num_prompt_rows
            rows_in, rows_out = (
                torch.randn(num_rows, module.in_features),
                torch.randn(num_rows, module.out_features),
            )
            weight = module.weight.detach()
            yield rows_in, weight.T
            yield rows_out, weight
            yield rows_out.T, rows_in


def cpu_seconds(work: Callable[[], Any]) -> float:
    """Return the processor seconds of this process during a call."""
    start = time.process_time()
    work()
    return time.process_time() - start


def compare_training(model: Path, case: Answers, rounds: int) -> dict[str, Any]:
    """Measure a training step beside its matrix products, in processor seconds."""
    arguments = json.dumps({"model": str(model), **asdict(case)})
    child = harness.Server([sys.executable, "-m", __spec__.name, "--serve", "training", arguments])
    child.measure()  # warm-up
    rows = [child.measure() for _ in range(3 * rounds)]
    child.close()
    summary = {
        "seconds": statistics.median(row["seconds"] for row in rows),
        "products": statistics.median(row["products"] for row in rows),
        "ratio": statistics.median(row["seconds"] / row["products"] for row in rows),
    }
    return {"summary": summary, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--peer", help="python of an environment with TRL, for the comparison of GRPO steps")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="parts; default: all")
    parser.add_argument("--sizes", nargs="+", choices=tuple(GRPO), default=list(GRPO))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--name", default="peers", help="of the result file")
    parser.add_argument("--serve", nargs=2, metavar=("WHAT", "MODEL"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        what, model = args.serve
        if what == "steps":
            case = json.loads(model)
            serve_steps(case.pop("model"), Grpo(**case))
        elif what == "training":
            case = json.loads(model)
            serve_training(case.pop("model"), Answers(**case))
        else:
            serve_engine(what, model)
        return
    if "grpo" in args.only and not args.peer:
        parser.error("the comparison of GRPO steps needs --peer; leave it out by --only decode train")
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-1:])
    os.environ["OMP_NUM_THREADS"] = "1"
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as directory:
        for size in args.sizes:
            path = model_of(size, Path(directory))
            part: dict[str, Any] = {}
            if "grpo" in args.only:
                part["grpo"] = compare_grpo(path, GRPO[size], args.peer, args.rounds)
            if "decode" in args.only and size in (*SIZES, REAL):
                part["decode"] = compare_decode(path, args.rounds)
            if "train" in args.only and size in (*SIZES, REAL, *TRAINED):
                part["train"] = compare_training(path, TRAINED.get(size, Answers()), args.rounds)
            found[size] = part
            print(size, json.dumps(summaries(part), indent=2), flush=True)
    lengths = {"prompt_tokens": PROMPT_TOKENS, "max_tokens": MAX_TOKENS, "group": GROUP}
    cases = {size: asdict(GRPO[size]) for size in args.sizes}
    config = {"rounds": args.rounds, "parts": args.only, "grpo": cases, "decode": lengths}
    print(harness.write(args.name, {"config": config, **found}))


def summaries(content: dict[str, Any]) -> dict[str, Any]:
    """Return the content without its rows."""
    if "summary" in content:
        summary: dict[str, Any] = content["summary"]
        return summary
    return {name: summaries(part) for name, part in content.items()}


if __name__ == "__main__":
    main()
