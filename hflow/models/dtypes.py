"""The dtypes of weights, by their names in a configuration."""

from __future__ import annotations

from collections.abc import Mapping

import torch

DTYPES: Mapping[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""The dtypes in which models compute."""
SAVED_DTYPES: Mapping[str, torch.dtype] = {**DTYPES, "fp16": torch.float16}
"""The dtypes in which models may be saved."""
