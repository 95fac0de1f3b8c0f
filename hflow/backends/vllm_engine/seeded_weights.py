"""Random weights of a model that no trainer owns, as the embedded engine draws them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from hflow.backends.common.expert_tensors import stacked_views
from hflow.backends.hf_config import read_config, translate_errors
from hflow.backends.settings import ModelSettings
from hflow.weights.incoming import IncomingWeights


@dataclass(frozen=True)
class SeededWeights:
    """The weights of a model with an architecture and a seed, built when they are iterated."""

    settings: ModelSettings

    def incoming(self) -> IncomingWeights:
        """Return them as what a rank receives. They can be pickled."""
        return IncomingWeights.of_tensors(self._tensors)

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[self.settings.dtype]
        with translate_errors(self.settings.name), torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.settings.seed)
            module = AutoModelForCausalLM.from_config(read_config(self.settings), dtype=torch.float32)
        for weight in module.parameters():  # drawn as by the trainer: torch draws other numbers in bf16
            weight.data = weight.data.to(dtype)
        yield from stacked_views(module.config.model_type, module.named_parameters())
