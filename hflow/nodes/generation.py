"""Nodes that open a stream: by generating completions, or by encoding written examples."""

from __future__ import annotations

from hflow.dsl import encode, generate
from hflow.types import Engine, Tokenizer, Trajectory


@generate()
async def actor_gen(engine: Engine, prompt: str) -> Trajectory:
    """Generate one completion of the prompt."""
    return await engine.complete(prompt)


@encode()
def sft_view(tokenizer: Tokenizer, prompt: str, answer: str) -> Trajectory:
    """Encode a prompt and its answer. Only the answer is learned."""
    return tokenizer.join(prompt, answer)


@encode(group=2)
def pair(tokenizer: Tokenizer, prompt: str, chosen: str, rejected: str) -> list[Trajectory]:
    """Encode two answers to a prompt as a group of two, the chosen one first."""
    return [tokenizer.join(prompt, chosen), tokenizer.join(prompt, rejected)]
