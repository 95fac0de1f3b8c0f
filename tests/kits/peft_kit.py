"""peft's model with the adapters of a backend."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
import torch_kit as kit
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from hflow.config.schema import LoraConfig as OurConfig
from hflow.data.batches.batch import Batch
from hflow.models.expert_adapters import as_in_peft
from hflow.shapes.model_shape import EXPERT_TARGETS
from hflow.training.interface import ModelBackend

ATTENTION, DENSE = ["q_proj", "k_proj", "v_proj", "o_proj"], ["gate_proj", "up_proj", "down_proj"]
OUTER = ("embed_tokens", "lm_head")


def twin(backend: ModelBackend, base: Path, lora: OurConfig) -> PeftModel:
    """Return peft's model with adapters, and give the backend the same random ones.

    Magnitudes are around 1, so that rows have other lengths than before.
    """
    plain = AutoModelForCausalLM.from_pretrained(base)
    has_experts = hasattr(plain.config, "num_experts")  # then peft takes names of dense matrices for theirs
    parameters = [*(f"{name}.weight" for name in DENSE), *(x for x in lora.targets if x in EXPERT_TARGETS)]
    config = LoraConfig(
        r=lora.r,
        lora_alpha=lora.alpha,
        use_rslora=lora.rslora,
        use_dora=lora.dora,
        target_modules=[
            *ATTENTION,
            *(() if has_experts else DENSE),
            *(name for name in lora.targets if name in OUTER),
        ],
        target_parameters=parameters if has_experts else None,
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(plain, config)
    generator = torch.Generator().manual_seed(0)
    drawn = {
        name: torch.randn(x.shape, generator=generator) * 0.1 + (x.dim() == 1)
        for name, x in kit.weights(backend).items()
    }
    named, ours = adapters(model), as_named_by_peft(drawn, lora)
    assert ours.keys() == named.keys()
    with torch.no_grad():
        for name, x in named.items():
            x.copy_(ours[name])
        for block in backend.blocks():
            block.values.copy_(drawn[block.tensor])
    return model


def as_named_by_peft(weights: Mapping[str, Tensor], lora: OurConfig) -> dict[str, Tensor]:
    """Return the weights of a backend's adapters as peft has them: those of experts are in one matrix."""
    targets = [name for name in EXPERT_TARGETS if name in lora.targets]
    return as_in_peft(weights, targets)


def adapters(model: PeftModel) -> dict[str, nn.Parameter]:
    """Return peft's adapters by name, without what is the same in all names."""
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
