"""What a plan assumes of the data: lengths of prompts and responses.

A response has a whole number of tokens, at least 1 and at most `max_response`. `cdf` is the one
definition of its distribution; quantiles, samples and expectations follow from it.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

_STANDARD = NormalDist()


@dataclass(frozen=True)
class Workload:
    """Lengths of one stream's samples, in tokens.

    Responses follow a lognormal distribution cut off at `max_response`, which real rollouts resemble:
    many short ones and a long tail, that synchronous generation waits for.
    """

    prompt: int
    """Tokens of a prompt, all alike."""
    response_mean: float
    """Mean of the responses before the cut."""
    response_cv: float
    """Standard deviation over mean, before the cut; 0: all alike."""
    max_response: int
    """`max_tokens` of the node that generates."""
    is_assumed: bool = True
    """Whether any of these is hflow's own guess rather than the user's number."""


def cdf(workload: Workload, tokens: int) -> float:
    """Probability that a response has at most `tokens` tokens.

    The lognormal variable is rounded to the nearest whole number, what is below 1 to 1, and what is
    above `max_response` to that.
    """
    if tokens < 1:
        return 0.0
    if tokens >= workload.max_response:
        return 1.0
    if not workload.response_cv:
        return float(tokens + 0.5 >= workload.response_mean)
    mu, sigma = _of_logarithm(workload)
    return 0.5 * math.erfc((mu - math.log(tokens + 0.5)) / (sigma * math.sqrt(2)))


def quantile(workload: Workload, share: float) -> int:
    """The least number of tokens that a `share` of all responses, above 0 and below 1, do not exceed."""
    real = workload.response_mean
    if workload.response_cv:
        mu, sigma = _of_logarithm(workload)
        real = math.exp(mu + sigma * _STANDARD.inv_cdf(share))
    return min(workload.max_response, max(1, math.ceil(real - 0.5)))


def sample_lengths(workload: Workload, num: int, seed: int) -> list[int]:
    """Tokens of `num` samples, prompt and response together.

    The responses are the `num` quantiles at (i + 1/2) / num, so that their distribution is that of the
    workload whatever `num` is; `seed` decides their order and nothing else.
    """
    lengths = [workload.prompt + quantile(workload, (i + 0.5) / num) for i in range(num)]
    random.Random(f"lengths/{seed}").shuffle(lengths)
    return lengths


@lru_cache
def expected_max(workload: Workload, num: int) -> float:
    """Mean tokens of the longest of `num` responses: what synchronous generation waits for.

    The sum over t from 0 of P(longest > t) = 1 - cdf(t)^num, exact for `cdf`.
    """
    return sum(1.0 - cdf(workload, tokens) ** num for tokens in range(workload.max_response))


@lru_cache
def _of_logarithm(workload: Workload) -> tuple[float, float]:
    """Mean and standard deviation of the lognormal variable's logarithm."""
    variance = math.log1p(workload.response_cv**2)
    return math.log(workload.response_mean) - variance / 2, math.sqrt(variance)
