"""Kernels of log-probs without a GPU: Triton's interpreter runs them, and its compiler translates them."""

from __future__ import annotations

import pytest
from triton_scripts import needs_triton, run_with_triton

from hflow.doctor.gpus import MAX_LOGPROB_ERROR
from hflow.doctor.logprob_check import logprob_error
from hflow.models.dtypes import SAVED_DTYPES

pytestmark = needs_triton

INTERPRETED = """
import triton_interpreter
import torch
from hflow.training.loop import logit_kernels, logprobs

def measured(rows, weight, ids, temperature, with_entropy):
    leaves = [x.clone().requires_grad_() for x in (rows, weight)]
    matrix = logprobs.OutputMatrix(leaves[1], num_valid=len(weight) - 3)
    logits = logprobs.MatrixLogits(leaves[0], matrix, temperature)
    names = ["entropy", "logprobs"] if with_entropy else ["logprobs"]
    several = torch.stack([ids, ids, ids - 1]).T
    results = [*logits.measure(names, ids), logits.logprobs_of(several)]
    sum((x * torch.linspace(-1, 2, x.numel()).view(x.shape)).sum() for x in results).backward()
    return [*(x.detach() for x in results), *(x.grad for x in leaves)]

torch.manual_seed(0)
logit_kernels._COLUMNS = 64
for num_tokens, chunk in ((9, 5), (64, 5), (64, 2), (205, 5)):
    logprobs.CHUNK_BYTES = 4 * num_tokens * chunk
    for temperature, with_entropy in ((1.0, False), (0.3, True)):
        given = (2 * torch.randn(5, 8), torch.randn(num_tokens, 8), torch.randint(1, num_tokens - 3, (5,)))
        logprobs.has_cuda_api = lambda kind: False
        expected = measured(*given, temperature, with_entropy)
        logprobs.has_cuda_api = lambda kind: True
        for found, wanted in zip(measured(*given, temperature, with_entropy), expected, strict=True):
            torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)

# The first block has tokens outside of the set alone.
logits = torch.randn(2, 200).half()
logits[:, :100] = -60000.0
found, wanted = torch.zeros(2, 3, 2)
logit_kernels.fill_statistics(found, logits, 0.5)
logprobs.has_cuda_api = lambda kind: False
logprobs.fill_statistics(wanted, logits, 0.5, with_entropy=True)
torch.testing.assert_close(found, wanted)
"""

COMPILED = """
import itertools
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from hflow.training.loop.logit_kernels import _COLUMNS, _WARPS, _gradients, _statistics

IN_FP32 = ("out", "normaliser", "mean", "slope", "grad_entropy", "added")
KERNELS = ((_statistics, {}), (_gradients, {"has_entropy": False}), (_gradients, {"has_entropy": True}))
for capability, dtype in itertools.product((80, 90, 100), ("bf16", "fp32")):
    of_all = dict.fromkeys(IN_FP32, "*fp32") | {"logits": "*" + dtype, "temperature": "fp32", "index": "*i64"}
    for kernel, constants in KERNELS:
        constants |= {"columns": _COLUMNS}
        types = {name: of_all.get(name, "i32") for name in kernel.arg_names}
        types |= dict.fromkeys(constants, "constexpr")
        target = GPUTarget("cuda", capability, 32)
        made = compile(ASTSource(kernel, types, constants), target, options={"num_warps": _WARPS})
        assert made.asm["cubin"] and made.metadata.shared < 48 * 1024
"""


@pytest.mark.parametrize("script", [INTERPRETED, COMPILED], ids=["interpreted", "compiled"])
def test_logit_kernels(script: str) -> None:
    run_with_triton(script)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", MAX_LOGPROB_ERROR)
def test_log_probs_on_a_gpu_are_those_of_float64(dtype: str) -> None:
    assert max(logprob_error("cuda", SAVED_DTYPES[dtype])) <= MAX_LOGPROB_ERROR[dtype]
