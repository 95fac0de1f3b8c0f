"""Tokens a second of the embedded engine, of the vLLM engine, and of vLLM by itself, by running sequences.

    python benchmarks/engine_throughput.py --cores 1

A random two-layer Qwen2, 128 wide: what is measured is mostly the engines' own work for each step and each
sequence. Engines are built once and measured in turn, A B C A B C.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

import harness

SEQUENCES = (8, 32, 128, 512)
GROUP = 8
HERE = Path(__file__).parent


def make_model(directory: str) -> None:
    """A random two-layer Qwen2, 128 wide, vocabulary 128, in HF layout."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=128,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    Qwen2ForCausalLM(config).float().save_pretrained(directory)


def serve(name: str, model: str, cores: int, prompt_tokens: int, max_tokens: int) -> None:
    """Measure an engine of hflow, once for each number of sequences on stdin."""
    import torch

    from hflow.backends.interface import EngineSetup, GenerationEngine, ModelSettings, SamplingParams
    from hflow.planner.backends import engine_kind

    torch.set_num_threads(cores)
    setup = EngineSetup(
        ModelSettings("actor", path=model),
        {"max_running": max(SEQUENCES), "max_model_len": 512},
        cores=(tuple(sorted(os.sched_getaffinity(0))),),
    )
    engine: GenerationEngine = engine_kind(name).factory(setup)
    engine.set_version(0)
    count = 0
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        start, tokens = time.perf_counter(), 0
        for sequence in range(int(line)):
            ids = [4 + (sequence // GROUP * 31 + i * 7) % 90 for i in range(prompt_tokens)]
            engine.add(count, ids, SamplingParams(max_tokens=max_tokens, seed=count))
            count += 1
        while engine.num_unfinished:
            tokens += sum(len(made.ids) for _, made in engine.step())
        seconds = time.perf_counter() - start
        print(json.dumps({"tokens_per_second": tokens / seconds, "tokens": tokens}), flush=True)
    engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cores", type=int, default=1)
    parser.add_argument("--prompt-tokens", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--serve", nargs=2, metavar=("ENGINE", "MODEL"), help="measure in this process")
    args = parser.parse_args()
    if args.serve:
        serve(*args.serve, args.cores, args.prompt_tokens, args.max_tokens)
        return
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.cores])
    env = {"OMP_NUM_THREADS": str(args.cores)}
    lengths = [str(args.prompt_tokens), str(args.max_tokens)]
    options = ["--cores", str(args.cores), "--prompt-tokens", lengths[0], "--max-tokens", lengths[1]]
    with tempfile.TemporaryDirectory() as model:
        make_model(model)
        here, plain = [sys.executable, __file__], str(HERE / "peers" / "vllm_decode.py")
        children = {
            "embedded": harness.Server([*here, "--serve", "embedded", model, *options], env),
            "vllm": harness.Server([*here, "--serve", "vllm", model, *options], env),
            "vllm alone": harness.Server([sys.executable, plain, model, str(max(SEQUENCES)), *lengths], env),
        }
        summary, rows = {}, {}
        for num in SEQUENCES:
            measures = {name: lambda c=child, n=num: c.measure(n) for name, child in children.items()}
            harness.interleave(measures, 1)  # warm-up
            rows[str(num)] = harness.interleave(measures, args.rounds)
            summary[str(num)] = harness.compare(rows[str(num)], "tokens_per_second", "vllm alone")
        for child in children.values():
            child.close()
    config = {**harness.numbers(args), "group": GROUP}
    path = harness.write("engine-throughput", {"summary": summary, "config": config, "rows": rows})
    print(json.dumps(summary, indent=2), path, sep="\n")


if __name__ == "__main__":
    main()
