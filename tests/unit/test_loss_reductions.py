"""Every reduction x mask x number of minibatches x shards, against losses written out by hand.

`test_torch_model_ranks.py` compares the same losses on two ranks.
"""

import numpy as np
import pytest
import reduction_cases as cases
import torch
import torch_kit as kit

from hflow.training.interface import TrainShard

BATCH = cases.make_batch()


@pytest.fixture(scope="module")
def backends():
    """One model for each number of tokens in a micro-batch. Losses do not depend on its weights."""
    return [kit.model(tokens_per_microbatch=size) for size in (1, 13, 1000)]


@pytest.mark.first(len(cases.CASES) // 2)  # each reduction with each mask
@pytest.mark.parametrize(
    ("reduction", "mask", "num_minibatches"),
    [*cases.CASES[0::4], *cases.CASES[3::4], *cases.CASES[1::4], *cases.CASES[2::4]],
)
def test_loss_by_hand(backends, reduction, mask, num_minibatches):
    wanted = cases.loss_by_hand(BATCH, reduction, mask, num_minibatches)
    call = cases.call_of(reduction, mask)
    for backend in backends:
        for num_shards in (1, 2):
            shards = cases.shards_of(BATCH, num_minibatches, num_shards)
            loss = backend.train(call, shards, 0)["loss"]
            assert loss == pytest.approx(wanted, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("name", kit.TWO_PASS)
def test_a_first_pass_sees_the_whole_minibatch(name):
    """Metrics and weights do not depend on micro-batches, shards or the order of groups."""
    batch = kit.make_batch(kit.LENGTHS)
    pairs = [np.reshape(rows, (-1, 2))[::-1].ravel() for rows in kit.MINIBATCHES]
    backwards = TrainShard(tuple(batch.take(rows) for rows in pairs))
    divisions = {1: kit.whole(batch), 13: kit.halves(batch), 1000: [backwards]}
    results = []
    for size, shards in divisions.items():
        backend = kit.model(tokens_per_microbatch=size)
        results.append((backend.train(kit.CALLS[name], shards, 5), kit.weights(backend)))
    (metrics, weights), *others = results
    chosen = [metrics.get(f"{name}.sum", 0) for name in ("dropped", "penalised", "trained")]
    assert sum(chosen) > len(kit.MINIBATCHES) or metrics["reference_point"] > 0
    for other_metrics, other_weights in others:
        assert other_metrics == pytest.approx(metrics, rel=1e-4, abs=1e-5)
        torch.testing.assert_close(other_weights, weights, atol=1e-5, rtol=0)
