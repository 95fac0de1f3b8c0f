"""Random numbers that depend on a request's seed and a token's position, and on nothing else.

A generator with a state would tie a sequence's draws to the order in which sequences are
served. Here number i of a seed is a hash of (seed, i): the finalizer of SplitMix64 (Steele,
Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def seed_words(seeds: Sequence[int]) -> npt.NDArray[np.uint64]:
    """Seeds of any size and sign as 64-bit words, mixed so that neighbours share nothing."""
    words = np.array([seed & 0xFFFFFFFFFFFFFFFF for seed in seeds], np.uint64)
    return _mixed(words + _GOLDEN)


def uniforms(words: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """One number in [0, 1) for each (seed word, position), a multiple of 2^-52."""
    mixed = _mixed(words + positions.astype(np.uint64) * _GOLDEN)
    return (mixed >> np.uint64(12)).astype(np.float64) * 2.0**-52


def _mixed(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: npt.NDArray[np.uint64] = words ^ (words >> np.uint64(31))
    return mixed
