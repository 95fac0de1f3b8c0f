"""Seeds the generators of Python, numpy and torch before a body, so that what it draws can be repeated.

A body draws the same numbers wherever and whenever it is called for the same thing. So nothing of these
generators has to be saved with a run, and a sample is rewarded alike on any worker.

This module must import neither numpy nor torch: it is used in child processes, which stay small.
"""

from __future__ import annotations

import hashlib
import random
import sys


def seed_generators(seed: int, node: str, *key: int) -> None:
    """Seed the global generators of this process.

    A library that is not imported yet is left alone, so bodies import numpy and torch at the top of a file.

    The key is what a body is called for: the sample or group, or the step and the data rank.
    """
    name = "/".join(map(str, (seed, node, *key)))
    number = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
    random.seed(number)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(number % 2**32)
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.manual_seed(number >> 1)  # torch.manual_seed takes 25 times longer
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(number >> 1)
