"""The distribution of sample lengths that a plan assumes.

A response has a whole number of tokens, at least 1 and at most `max_response`. `cdf` defines its
distribution; quantiles, samples and expectations follow from it.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from functools import lru_cache
from statistics import NormalDist

from hflow.config.schema import WorkloadImages
from hflow.shapes.model_shape import LEFT_OUT_BY_DEFAULT
from hflow.shapes.vision_shape import ImageLoad

_STANDARD = NormalDist()


ASSUMED_WIDTH, ASSUMED_HEIGHT = 640, 480
"""Pixels of an image if the user sets none."""


def image_sizes(asked: WorkloadImages) -> tuple[tuple[int, int], ...]:
    """Return the width and the height of images: as set, or else several to try, the largest first."""
    num = 1 if asked.width or asked.height else 6
    return tuple((asked.width or ASSUMED_WIDTH >> i, asked.height or ASSUMED_HEIGHT >> i) for i in range(num))


@dataclass(frozen=True)
class PromptImages:
    """The images of every prompt, all of one size."""

    count: int
    width: int
    height: int
    load: ImageLoad
    """One of them."""

    @property
    def tokens(self) -> int:
        """Tokens of all images of a prompt."""
        return self.count * self.load.tokens

    def __str__(self) -> str:
        return f"{self.count} image{'s' * (self.count != 1)} of {self.width} x {self.height}"


@dataclass(frozen=True)
class Workload:
    """Lengths of one stream's samples, in tokens.

    Responses follow a lognormal distribution cut off at `max_response`. Real rollouts resemble it: many short
    responses, and a long tail that synchronous generation waits for.
    """

    prompt: int
    """Tokens of every prompt, those of its images included."""
    response_mean: float
    """Mean tokens of a response before the cut-off."""
    response_cv: float
    """Standard deviation over mean, before the cut-off; 0: all responses have equal length."""
    max_response: int
    """`max_tokens` of the node that generates."""
    is_assumed: bool = True
    """Whether hflow assumed any of these, rather than the user setting all of them."""
    images: PromptImages | None = field(default=None, metadata=LEFT_OUT_BY_DEFAULT)
    """None: prompts are texts."""
    shares: tuple[tuple[str, float], ...] = field(default=(), metadata=LEFT_OUT_BY_DEFAULT)
    """Field of `mask=` -> the fraction of samples that infer nodes with it compute; all, if it is missing."""


def cdf(workload: Workload, tokens: int) -> float:
    """Return the probability that a response has at most `tokens` tokens.

    The lognormal variable is rounded to the nearest whole number and clipped to 1 and `max_response`.
    """
    if tokens < 1:
        return 0.0
    if tokens >= workload.max_response:
        return 1.0
    if not workload.response_cv:
        return float(tokens + 0.5 >= workload.response_mean)
    mu, sigma = _log_moments(workload)
    return 0.5 * math.erfc((mu - math.log(tokens + 0.5)) / (sigma * math.sqrt(2)))


def quantile(workload: Workload, share: float) -> int:
    """Return the smallest number of tokens that a `share` of responses, in (0, 1), does not exceed."""
    real = workload.response_mean
    if workload.response_cv:
        mu, sigma = _log_moments(workload)
        real = math.exp(mu + sigma * _STANDARD.inv_cdf(share))
    return min(workload.max_response, max(1, math.ceil(real - 0.5)))


@lru_cache(maxsize=8)
def sample_lengths(workload: Workload, num: int, seed: int) -> tuple[int, ...]:
    """Return the tokens of `num` samples, prompt and response together.

    The responses are the `num` quantiles at (i + 1/2) / num, so they have the workload's distribution for any
    `num`. `seed` decides only their order.
    """
    lengths = [workload.prompt + response for response in _quantiles(workload, num)]
    random.Random(f"lengths/{seed}").shuffle(lengths)
    return tuple(lengths)


@lru_cache(maxsize=8)
def _quantiles(workload: Workload, num: int) -> tuple[int, ...]:
    return tuple(quantile(workload, (i + 0.5) / num) for i in range(num))


@lru_cache
def expected_max(workload: Workload, num: int) -> float:
    """Return the mean tokens of the longest of `num` responses, which synchronous generation waits for.

    This is the sum over t >= 0 of P(longest > t) = 1 - cdf(t)^num.
    """
    return sum(1.0 - cdf(workload, tokens) ** num for tokens in range(workload.max_response))


@lru_cache
def _log_moments(workload: Workload) -> tuple[float, float]:
    """Return mean and standard deviation of the logarithm of the lognormal variable."""
    variance = math.log1p(workload.response_cv**2)
    return math.log(workload.response_mean) - variance / 2, math.sqrt(variance)
