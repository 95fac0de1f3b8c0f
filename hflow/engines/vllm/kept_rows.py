"""Entries of `sampling_mask`, made of the log-probs that vLLM returns of the likeliest tokens."""

from __future__ import annotations

from typing import Any

import numpy as np

from hflow.base.errors import BackendError
from hflow.types.sampling_mask import pack_ids

_MORE = 64
"""Candidates beside twice `top_k`."""


def num_candidates(top_k: int, vocab_size: int) -> int:
    """Return the number of likeliest tokens whose log-probs are to be returned.

    They are more than `top_k`, as vLLM also keeps the tokens that are as likely as the last of these. In bf16
    many are.
    """
    assert top_k, "the plan refuses samples without a limit of their tokens"
    return min(2 * top_k + _MORE, vocab_size)


def kept_entry(logprobs: Any, vocab_size: int) -> bytes:
    """Return the entry of a drawn token, of all tokens with a probability.

    vLLM's `LogprobsLists` of one token have the drawn one, then the likeliest, which are more than there are
    with a probability.

    Raises:
        BackendError: if there may be more of them than were returned.
    """
    ids, values = logprobs.logprob_token_ids[0, 1:], logprobs.logprobs[0, 1:]
    kept = ids[np.isfinite(values)]
    if len(kept) == len(ids) < vocab_size:
        raise BackendError(
            f"vLLM drew from more than {len(ids)} tokens, as many are equally likely, and does not return "
            "all of them; set models.NAME.gen.engine=embedded, or top_k=0 top_p=1.0 min_p=0.0"
        )
    return pack_ids(kept)
