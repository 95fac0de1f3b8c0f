"""Sources: one answer to a prompt, and texts that were written rather than generated."""

from __future__ import annotations

from hflow.dsl import encode, generate
from hflow.types import Engine, Tokenizer, Trajectory


@generate()
async def actor_gen(engine: Engine, prompt: str) -> Trajectory:
    """Complete the prompt once; `group`, `temperature` and `max_tokens` are options."""
    return await engine.complete(prompt)


@encode()
def sft_view(tokenizer: Tokenizer, prompt: str, answer: str) -> Trajectory:
    """Prompt and answer; the answer is learned."""
    return tokenizer.join(prompt, answer)


@encode(group=2)
def pair(tokenizer: Tokenizer, prompt: str, chosen: str, rejected: str) -> list[Trajectory]:
    """Two answers to a prompt as a group of two, the chosen first."""
    return [tokenizer.join(prompt, chosen), tokenizer.join(prompt, rejected)]
