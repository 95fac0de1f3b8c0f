"""The architectures whose forward pass the embedded engine computes by itself. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hflow.shapes.architectures import DENSE_FAMILIES

_POSITION_INDEPENDENT_ROPE = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings whose frequencies do not depend on the length of a sequence."""


THROUGH_MODULES = "it runs through the modules of transformers, which is slower"
"""What the plan and the log say of a model that `DenseDecoder` does not run."""


def own_forward_objection(config: Mapping[str, Any], has_adapters: bool) -> str | None:
    """Return the reason why a model runs through transformers' modules; None if `DenseDecoder` runs it."""
    kind, activation = config.get("model_type"), config.get("hidden_act") or "silu"
    rope = (config.get("rope_parameters") or config.get("rope_scaling") or {}).get("rope_type", "default")
    if kind not in DENSE_FAMILIES:
        return f"{kind} is none of {', '.join(DENSE_FAMILIES)}"
    if has_adapters:
        return "it has adapters"
    if activation != "silu":
        return f"its activation is {activation}"
    if rope not in _POSITION_INDEPENDENT_ROPE:
        return f"its rotary embedding is {rope}"
    if config.get("sliding_window") is not None and config.get("use_sliding_window", True):
        return "it has sliding windows"
    return None
