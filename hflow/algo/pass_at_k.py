"""pass@k: the probability that one of k answers to a prompt is right."""

from __future__ import annotations

from math import comb


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Return the unbiased estimate of pass@k from the samples of one prompt.

    With n samples of which c are correct, it is the probability that k of them, drawn without replacement,
    include a correct one:

        pass@k = 1 - C(n - c, k) / C(n, k)

    (Chen et al. 2021, "Evaluating Large Language Models Trained on Code", equation 1; the mean over prompts
    estimates pass@k of the model). The binomials are computed exactly.

    Raises:
        ValueError: unless 1 <= k <= n and 0 <= c <= n.
    """
    if not (1 <= k <= num_samples and 0 <= num_correct <= num_samples):
        raise ValueError(f"pass@{k} of {num_correct} correct among {num_samples} samples is not defined")
    return 1.0 - comb(num_samples - num_correct, k) / comb(num_samples, k)
