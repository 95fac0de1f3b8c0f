"""Seeds for engines whose random generator has a state."""

from __future__ import annotations

import hashlib


def request_seed(seed: int, num_tokens: int) -> int:
    """Return the seed of a request, for an engine that draws its tokens in order from one generator.

    A sample makes several requests: one for each turn, and one more after each interruption. Each begins at
    another position, so no two of them draw with the same random numbers, and each is the same in every run.
    An engine that draws each token from (seed, position) needs no such seed.

    Args:
        seed: the sample's (`SamplingParams.seed`), of any size and sign.
        num_tokens: tokens before the first one to draw, those drawn before an interruption included.

    Returns:
        A number of 63 bits.
    """
    digest = hashlib.blake2b(f"{seed}/{num_tokens}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
