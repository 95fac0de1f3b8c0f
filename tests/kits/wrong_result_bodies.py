"""Bodies whose results are wrong for most samples. Imports little, as their processes import it."""

from __future__ import annotations

from typing import Any

import torch

from hflow.types import Engine, Tokenizer


def result_of(case: int, right: Any) -> Any:
    """Return the right result, or one that no body may return."""
    graded = torch.ones(2, requires_grad=True) * 1
    return (right, None, b"?", graded, float("nan"), [[1.0]], object(), {1: {2}})[case % 8]


def case_of(text: str) -> int:
    return sum(map(ord, text)) % 8


def scored(completion: str, answer: str, num_tokens: int, **_: Any) -> Any:
    return result_of(case_of(answer), 0.7), answer


def numbered(completion: str, answer: str, num_tokens: int, **_: Any) -> Any:
    return torch.tensor(float(case_of(answer)), requires_grad=True), answer


async def awaited(hint: str) -> Any:
    return result_of(case_of(hint), 7)


def group_kept(reward: list[float], **_: Any) -> Any:
    return result_of(int(reward[0]), right=True)


def viewed(tokenizer: Tokenizer, prompt: str, answer: str) -> Any:
    return result_of(case_of(answer), tokenizer.join(prompt, answer))


async def talked(engine: Engine, prompt: str) -> Any:
    return result_of(case_of(prompt), await engine.complete(prompt))


async def called(engine: Engine, prompt: str) -> Any:
    talk = await engine.complete(prompt)
    await engine.call(result_of, case=case_of(prompt), right=1)
    return talk
