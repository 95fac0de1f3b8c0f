"""Every reduction x mask x number of minibatches x shards, against losses written out by hand.

`test_torch_model_ranks.py` compares the same losses on two ranks.
"""

import pytest
import reduction_cases as cases
import torch_kit as kit

BATCH = cases.make_batch()


@pytest.fixture(scope="module")
def backends():
    """One model for each number of tokens in a micro-batch. Losses do not depend on its weights."""
    return [kit.model(tokens_per_microbatch=size) for size in (1, 13, 1000)]


@pytest.mark.parametrize(("reduction", "mask", "num_minibatches"), cases.CASES)
def test_loss_by_hand(backends, reduction, mask, num_minibatches):
    wanted = cases.loss_by_hand(BATCH, reduction, mask, num_minibatches)
    call = cases.call_of(reduction, mask)
    for backend in backends:
        for num_shards in (1, 2):
            shards = cases.shards_of(BATCH, num_minibatches, num_shards)
            loss = backend.train(call, shards, 0)["loss"]
            assert loss == pytest.approx(wanted, rel=1e-5, abs=1e-6)
