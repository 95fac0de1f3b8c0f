"""The CUDA kernels: variable-length attention in half precision, padding in fp32."""

import numpy as np
import pytest
import torch_kit as kit

from hflow.doctor.attention_check import CASES, attention_error
from hflow.doctor.gpus import MAX_ATTENTION_ERROR
from hflow.models.dtypes import SAVED_DTYPES

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_attention_equals_float64(dtype, case):
    error = attention_error("cuda", SAVED_DTYPES[dtype], CASES[case])
    assert max(error.output, error.gradient) <= MAX_ATTENTION_ERROR[dtype]


@pytest.mark.parametrize(("dtype", "tolerance"), [("fp32", 1e-4), ("bf16", 5e-2)])
def test_a_step_equals_the_cpu(dtype, tolerance):
    batch = kit.make_batch(kit.LENGTHS)
    here, there = kit.model(), kit.model(device="cuda", dtype=dtype, tokens_per_microbatch=13)
    first, other = (b.infer(kit.LOGPROBS, [batch])[0].columns["result"].values for b in (here, there))
    np.testing.assert_allclose(other, first, atol=tolerance)
    wanted = here.train(kit.CALLS["token-mean"], kit.whole(batch), 0)
    got = there.train(kit.CALLS["token-mean"], kit.whole(batch), 0)
    assert got["loss"] == pytest.approx(wanted["loss"], abs=tolerance)
