"""Tokens a second of transformers' `generate` on a model; each line of stdin is a number of sequences."""

from __future__ import annotations

import json
import sys
import time

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

GROUP = 8


def main(path: str, prompt_tokens: int, max_tokens: int) -> None:
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    # Without an end-of-text token every sequence has max_tokens new tokens.
    config = GenerationConfig(max_new_tokens=max_tokens, do_sample=True, top_k=0, pad_token_id=0)
    model.generation_config = config
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        num = int(line)
        rows = [[4 + (s // GROUP * 31 + i * 7) % 12 for i in range(prompt_tokens)] for s in range(num)]
        ids = torch.tensor(rows)
        start = time.process_time()
        with torch.inference_mode():
            out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
        seconds = time.process_time() - start
        tokens = out[:, prompt_tokens:].numel()
        print(json.dumps({"tokens_per_second": tokens / seconds, "tokens": tokens}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], *(int(arg) for arg in sys.argv[2:4]))
