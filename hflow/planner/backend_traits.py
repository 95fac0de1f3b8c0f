"""What the planner knows of each backend: how it cuts a model, and what it keeps in memory.

Planning imports no backend, so these are facts about them, held to the truth by measurements.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from hflow.errors import PlanError, nearest


@dataclass(frozen=True)
class BackendTraits:
    """Facts about one training backend or generation engine."""

    name: str
    kind: Literal["train", "generate"]
    over_data: Literal["whole", "optimizer", "everything"]
    """What the data axis shards: nothing (every data rank holds its tensor and pipeline shard whole),
    the optimizer state (megatron's distributed optimizer), or weights, gradients and optimizer state
    (FSDP2: each tensor's first axis in equal blocks of rows, the last ones short or empty)."""
    vocab_multiple: int | None = None
    """A vocabulary is padded to a multiple of this times the tensor size; None: it must divide."""
    pads_whole: bool = False
    """Whether that multiple is of the whole vocabulary, which then must divide (vllm), rather than of each
    tensor rank's part."""
    master_bytes: int = 4
    """Bytes of a weight that the optimizer steps (training), or that inference keeps (generation: 0, as
    weights are in the compute dtype)."""
    keeps_cast: bool = False
    """Whether weights in the compute dtype stay beside the fp32 ones (megatron in bf16)."""
    cuts_layers: bool = False
    """Whether it has a tensor and a pipeline axis; without, replicas grow along the data axis only."""
    shares_prompts: bool = False
    """Whether a forward computes the prompt of a group once (`data/shared_prefix.py`)."""
    families: tuple[str, ...] | None = None
    """`model_type`s that it builds; None: whatever transformers has a causal language model for."""
    layer_host_ms: float = 0.0
    """Milliseconds in which the host issues one layer's operations, where no captured graph spares it: what a
    layer takes at least. Qwen2.5 of 0.5B to 14B in Hugging Face's transformers: 24 to 48 layers of 0.8 to
    0.9 ms a token (speed benchmark of Qwen's documentation, A100)."""
    step_host_ms: float = 0.0
    """Milliseconds of the host between two decode steps. vLLM 0.6.3 in the same benchmark: 3.2 ms a token of
    the 0.5B model, of which its weights take 0.7."""


TRAITS: Mapping[str, BackendTraits] = {
    "torch": BackendTraits("torch", "train", "everything", shares_prompts=True, layer_host_ms=0.85),
    "megatron": BackendTraits(
        "megatron",
        "train",
        "optimizer",
        vocab_multiple=128,
        keeps_cast=True,
        cuts_layers=True,
        shares_prompts=True,
        families=("llama", "mistral", "qwen2", "qwen3"),
    ),
    "embedded": BackendTraits("embedded", "generate", "whole", master_bytes=0, layer_host_ms=0.85),
    "vllm": BackendTraits(
        "vllm",
        "generate",
        "whole",
        vocab_multiple=64,
        pads_whole=True,
        master_bytes=0,
        cuts_layers=True,
        step_host_ms=2.5,
    ),
}


def traits(backend: str) -> BackendTraits:
    """The facts of a backend.

    Raises:
        PlanError: when the planner does not know it.
    """
    if backend not in TRAITS:
        raise PlanError(f"unknown backend {backend!r}{nearest(backend, TRAITS)} (known: {', '.join(TRAITS)})")
    return TRAITS[backend]
