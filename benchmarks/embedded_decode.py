"""Tokens a second of the embedded engine on one model directory; measures once a line of stdin."""

from __future__ import annotations

import json
import os
import sys
import time

import torch

from hflow.backends.embedded_engine.engine import EmbeddedEngine
from hflow.backends.interface import ModelSettings, SamplingParams


def main(model: str, num_prompts: int, group: int, prompt_tokens: int, max_tokens: int) -> None:
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    engine = EmbeddedEngine(ModelSettings("actor", path=model), {"max_running": num_prompts * group})
    print(json.dumps({"ready": True, "threads": torch.get_num_threads()}), flush=True)
    count = 0
    for _ in sys.stdin:
        start = time.perf_counter()
        for prompt in range(num_prompts):
            ids = [4 + (prompt * 31 + i * 7) % 90 for i in range(prompt_tokens)]
            for _member in range(group):
                engine.add(count, ids, SamplingParams(max_tokens=max_tokens, seed=count))
                count += 1
        tokens = 0
        while engine.num_unfinished:
            tokens += sum(len(made.ids) for _, made in engine.step())
        seconds = time.perf_counter() - start
        print(json.dumps({"tokens_per_second": tokens / seconds, "tokens": tokens}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], *(int(a) for a in sys.argv[2:6]))
