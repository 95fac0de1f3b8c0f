"""Random numbers that depend on what they are for, and not on the order in which they are drawn.

Number i of a seed is a hash of (seed, i): the finalizer of SplitMix64 (Steele, Lea and Flood, "Fast
splittable pseudorandom number generators", OOPSLA 2014).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def request_seed(seed: int, num_tokens: int) -> int:
    """Return the seed of a request, for an engine that draws its tokens in order from one generator.

    A sample makes several requests: one for each turn, and one more after each interruption. Each begins at
    another position, so no two of them draw with the same random numbers, and each is the same in every run.
    An engine that draws each token from (seed, position) needs no such seed. The seed of the sample,
    `SamplingParams.seed`, has any size and sign; the result has 63 bits. `num_tokens` are those before the
    first one to draw, those drawn before an interruption included.
    """
    digest = hashlib.blake2b(f"{seed}/{num_tokens}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_words(seeds: Sequence[int]) -> npt.NDArray[np.uint64]:
    """Hash seeds of any size and sign to 64-bit words, so that neighbouring seeds have unrelated words."""
    words = np.array([seed & 0xFFFFFFFFFFFFFFFF for seed in seeds], np.uint64)
    return _mix(words + _GOLDEN)


def uniforms(words: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Return a number in [0, 1) for each (seed word, position), a multiple of 2^-52."""
    mixed = _mix(words + positions.astype(np.uint64) * _GOLDEN)
    return (mixed >> np.uint64(12)).astype(np.float64) * 2.0**-52


def _mix(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: npt.NDArray[np.uint64] = words ^ (words >> np.uint64(31))
    return mixed
