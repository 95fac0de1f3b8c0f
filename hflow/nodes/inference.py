"""Infer nodes, one for each kind of model."""

from __future__ import annotations

from hflow.dsl import infer
from hflow.types import Output, PerSequence, PerToken


@infer(returns="ref_logprobs")
def ref_inf(out: Output) -> PerToken:
    """Return the log-probs `[T]` of the tokens under a reference model."""
    return out.logprobs


@infer(returns=("values", "bootstrap"))
def critic_inf(out: Output) -> tuple[PerToken, PerSequence]:
    """Return V before each token `[T]`, and V after the last one `[S]`."""
    return out.values, out.bootstrap


@infer(returns="reward")
def rew_inf(out: Output) -> PerSequence:
    """Return a reward model's score of each sequence `[S]`."""
    return out.scores
