"""Tokens per second of the embedded engine against vLLM's CPU build; one thread each, A B A B.

python benchmarks/engine_vs_vllm.py --peer .venv-peers/bin/python
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

import harness

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer", required=True, help="python of an environment with vLLM's CPU build")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=64)
    args = parser.parse_args()
    numbers = [str(n) for n in (args.prompts, args.group, args.prompt_tokens, args.max_tokens)]
    env = {"OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as model:
        make_model(model)
        vllm = harness.Server([args.peer, str(HERE / "peers" / "vllm_decode.py"), model, *numbers], env)
        ours = harness.Server([sys.executable, str(HERE / "embedded_decode.py"), model, *numbers], env)
        for child in (vllm, ours):
            child.measure()  # warm-up
        rows = harness.interleave({"vllm": vllm.measure, "embedded": ours.measure}, args.rounds)
        vllm.close()
        ours.close()
    summary = harness.compare(rows, "tokens_per_second", "vllm")
    path = harness.write(
        "engine-vs-vllm", {"summary": summary, "config": harness.numbers(args), "rows": rows}
    )
    print(json.dumps(summary, indent=2), path, sep="\n")


if __name__ == "__main__":
    main()
