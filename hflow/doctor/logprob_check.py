"""Compares log-probs and entropy, forward and backward, with those that torch computes in float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hflow.doctor.attention_check import relative_error
from hflow.training.loop.logprobs import MatrixLogits, OutputMatrix

NUM_ROWS, HIDDEN, VOCAB = 300, 64, 20_001
"""More logits of a row than a kernel reads at once, and no multiple of it."""
TEMPERATURE = 0.7
ENTROPY_WEIGHT = 0.1


class LogprobError(NamedTuple):
    """How far results are from those in float64, relative to the largest of these."""

    output: float
    """The larger one of log-probs and entropy."""
    gradient: float
    """The larger one of hidden states and output matrix."""


def logprob_error(device: str, dtype: torch.dtype) -> LogprobError:
    """Compute log-probs and entropy of random hidden states.

    Raises:
        RuntimeError: what torch or Triton raises where a kernel does not run.
    """
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(n, HIDDEN, generator=generator).div(2).to(dtype) for n in (NUM_ROWS, VOCAB)]
    ids = torch.randint(0, VOCAB, (NUM_ROWS,), generator=generator)
    upstream = torch.randn(NUM_ROWS, generator=generator)
    inputs = [x.to(device).requires_grad_() for x in drawn]
    logits = MatrixLogits(inputs[0], OutputMatrix(inputs[1]), TEMPERATURE)
    found = _with_gradients(logits.measure(("logprobs", "entropy"), ids.to(device)), inputs, upstream)
    inputs = [x.detach().double().requires_grad_() for x in drawn]
    every = torch.log_softmax(inputs[0] @ inputs[1].T / TEMPERATURE, -1)
    measures = every.gather(1, ids[:, None])[:, 0], -(every.exp() * every).sum(-1)
    exact = _with_gradients(measures, inputs, upstream)
    errors = [relative_error(*pair) for pair in zip(found, exact, strict=True)]
    return LogprobError(max(errors[:2]), max(errors[2:]))


def _with_gradients(measures: Sequence[Tensor], inputs: Sequence[Tensor], upstream: Tensor) -> list[Tensor]:
    """Return log-probs and entropy, and the gradients of a loss of both by the inputs."""
    logprobs, entropy = measures
    loss = (logprobs * upstream.to(logprobs.device) + ENTROPY_WEIGHT * entropy).sum()
    return [logprobs, entropy, *torch.autograd.grad(loss, inputs)]
