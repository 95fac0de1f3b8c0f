"""The values of sampling options that every engine can draw with, for recipes and requests alike."""

from __future__ import annotations

MIN_TEMPERATURE = 0.01
"""The lowest temperature but 0. Logits divided by less may overflow, and vLLM draws with this one instead."""
MAX_TEMPERATURE = 100.0
MAX_TOP_K = 1_000_000_000


def find_sampling_problem(
    temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0
) -> tuple[str, str] | None:
    """Return the option that no token can be drawn with, and what is wrong with it; None if there is none."""
    if temperature != 0 and not MIN_TEMPERATURE <= temperature <= MAX_TEMPERATURE:
        bounds = f"{MIN_TEMPERATURE:g} to {MAX_TEMPERATURE:g}"
        return "temperature", f"temperature is {temperature:g}; it must be from {bounds}, or 0"
    if not 0 < top_p <= 1:
        return "top_p", f"top_p is {top_p:g}; it must be more than 0 and at most 1"
    if not 0 <= top_k <= MAX_TOP_K:
        return "top_k", f"top_k is {top_k}; it must be from 0, which means all tokens, to {MAX_TOP_K:,}"
    return None
