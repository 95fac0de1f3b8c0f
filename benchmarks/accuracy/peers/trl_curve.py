"""A whole run of TRL's GRPOTrainer on additions: reward, KL and accuracy by step.

Reads one JSON object (`model`, `train`, `heldout`: rows with prompt and answer; `steps`, `every`, `seed`,
`lr`) and prints one. A step is 32 prompts x 8 samples in two updates, as in
`benchmarks/accuracy/recipes/grpo_kl.py`.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", TRL_EXPERIMENTAL_SILENCE="1", WANDB_MODE="disabled")

UPDATES, PROMPTS, GROUP, MAX_TOKENS = 2, 32, 8, 4


def exact(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    return [float(c.strip() == a) for c, a in zip(completions, answer, strict=True)]


def main(
    model: str,
    train: list[dict[str, str]],
    heldout: list[dict[str, str]],
    steps: int,
    every: int,
    seed: int,
    lr: float,
) -> None:
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(model)
    policy: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    asked = tokenizer(
        [row["prompt"] for row in heldout], return_tensors="pt"
    )  # it adds <bos>, as for training
    accuracy: list[tuple[int, float]] = []

    def evaluate(step: int) -> None:
        with torch.no_grad():
            ids = policy.generate(**asked, max_new_tokens=MAX_TOKENS, do_sample=False)
        texts = tokenizer.batch_decode(ids[:, asked["input_ids"].shape[1] :], skip_special_tokens=True)
        right = exact(texts, [row["answer"] for row in heldout])
        accuracy.append((step, sum(right) / len(right)))

    class Evaluation(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step % (every * UPDATES) == 0:
                evaluate(state.global_step // UPDATES)

    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        seed=seed,
        per_device_train_batch_size=PROMPTS * GROUP // UPDATES,
        steps_per_generation=UPDATES,
        num_generations=GROUP,
        max_completion_length=MAX_TOKENS,
        max_steps=UPDATES * steps,
        learning_rate=lr,
        lr_scheduler_type="linear",
        warmup_steps=40,
        adam_beta1=0.9,
        adam_beta2=0.99,
        max_grad_norm=1.0,
        beta=0.01,
        loss_type="bnpo",  # the mean over the tokens of a minibatch
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
        logging_steps=UPDATES,
        save_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    trainer = GRPOTrainer(
        model=policy,
        processing_class=tokenizer,
        reward_funcs=exact,
        args=config,
        train_dataset=Dataset.from_list(train),
        callbacks=[Evaluation()],
    )
    evaluate(0)
    trainer.train()
    logs = [log for log in trainer.state.log_history if "reward" in log]
    result = {
        "reward": [log["reward"] for log in logs],
        "kl": [log["kl"] for log in logs],
        "accuracy": accuracy,
    }
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main(**json.load(sys.stdin))
