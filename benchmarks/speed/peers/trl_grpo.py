"""TRL's GRPOTrainer on the addition task: same model, batch, lengths and updates as a run of recipes/grpo.py.

Takes one JSON object (see `peers.Grpo`) and prints one: the processor seconds of a step.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
import time
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", TRL_EXPERIMENTAL_SILENCE="1", WANDB_MODE="disabled")

WARMUP = 3


def exact(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    return [float(c.strip() == a) for c, a in zip(completions, answer, strict=True)]


def main(
    model: str, prompts: int, updates: int, max_tokens: int, lr: float, steps: int, shots: int, budget: int
) -> None:
    """Run steps. TRL has no micro-batches by tokens, so `budget` is not used."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(1)
    rng = random.Random(0)
    pairs = [(rng.randrange(100), rng.randrange(100)) for _ in range(4096)]
    solved = "".join(f"{a:02d}+{b:02d}={a + b:03d}\n" for a, b in pairs[:shots])
    rows = [{"prompt": f"{solved}{a:02d}+{b:02d}=", "answer": f"{a + b:03d}"} for a, b in pairs]
    stamps: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            stamps.append(time.process_time())

    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=prompts * 8 // updates,
        steps_per_generation=updates,
        num_generations=8,
        max_completion_length=max_tokens,
        max_steps=updates * steps,
        learning_rate=lr,
        beta=0.0,
        temperature=1.0,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
        logging_steps=1000,
        save_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(model),
        reward_funcs=exact,
        args=config,
        train_dataset=Dataset.from_list(rows),
        callbacks=[Clock()],
    )
    trainer.train()
    ends = stamps[updates - 1 :: updates][WARMUP - 1 :]
    seconds = (ends[-1] - ends[0]) / (len(ends) - 1)
    print(json.dumps({"step_seconds": seconds, "steps_per_second": 1 / seconds}), flush=True)


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
