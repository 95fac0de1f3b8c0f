"""peft's model with the adapters of a backend."""

from __future__ import annotations

from pathlib import Path

import torch
import torch_kit as kit
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from hflow.config.schema import LoraConfig as OurConfig
from hflow.data.batches.batch import Batch
from hflow.training.interface import ModelBackend

LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
OUTER = ("embed_tokens", "lm_head")


def twin(backend: ModelBackend, base: Path, lora: OurConfig) -> PeftModel:
    """Return peft's model with adapters, and give the backend the same random ones.

    Magnitudes are around 1, so that rows have other lengths than before.
    """
    config = LoraConfig(
        r=lora.r,
        lora_alpha=lora.alpha,
        use_rslora=lora.rslora,
        use_dora=lora.dora,
        target_modules=[*LINEAR, *(name for name in lora.targets if name in OUTER)],
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    named = adapters(model)
    assert kit.weights(backend).keys() == named.keys()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for x in named.values():
            x.copy_(torch.randn(x.shape, generator=generator) * 0.1 + (x.dim() == 1))
        for block in backend.blocks():
            block.values.copy_(named[block.tensor])
    return model


def adapters(model: PeftModel) -> dict[str, nn.Parameter]:
    """Return peft's adapters by the names that a backend has for them."""
    return {
        name.removeprefix("base_model.model.").replace(".default", ""): x
        for name, x in model.named_parameters()
        if x.requires_grad
    }


def learned_logprobs(model: PeftModel, batch: Batch) -> Tensor:
    """Return the log-probs of the learned tokens of a sequence."""
    ids, mask = (torch.tensor(batch.columns[name].values) for name in ("input_ids", "loss_mask"))
    logprobs = model(ids[None]).logits[0].log_softmax(-1)[:-1].gather(-1, ids[1:, None])[:, 0]
    return logprobs[mask[1:]]
