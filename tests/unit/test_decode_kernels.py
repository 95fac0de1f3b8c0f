"""hflow's Triton kernels without a GPU: Triton's interpreter runs them, and its compiler translates them."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from triton_scripts import needs_triton, run_with_triton

from hflow.doctor.gpus import check_decoding

pytestmark = needs_triton

INTERPRETER = """
import triton_interpreter
import torch
torch.manual_seed(0)
"""

ATTENTION = """
from hflow.models.attention_kernels import Reach
from hflow.models.decode_kernels import triton_decode_attention

lengths = torch.tensor([1, 64, 65, 150, 17], dtype=torch.int32)
for dtype, heads, kv_heads, size in (
    (torch.float32, 14, 2, 48), (torch.float32, 4, 4, 16), (torch.float16, 16, 1, 128)
):
    q = torch.randn(5, heads, size, dtype=dtype)
    # Pages in no order, some of two sequences; columns of the table that are not read; NaN in other pages.
    k, v = (torch.full((60, kv_heads, 16, size), float("nan"), dtype=dtype) for _ in range(2))
    table = torch.randint(50, 60, (5, 14), dtype=torch.int32)[:, 2:]
    order = iter(torch.randperm(50).tolist())
    for i, n in enumerate(lengths.tolist()):
        for page in range(-(-n // 16)):
            table[i, page] = table[3, page] if i == 4 else next(order)
            k[table[i, page]], v[table[i, page]] = torch.randn(2, kv_heads, 16, size, dtype=dtype)
    for window, sinks in ((None, None), (70, None), (None, torch.randn(heads)), (1, 3 * torch.randn(heads))):
        sinks = None if sinks is None else sinks.to(dtype)
        found = triton_decode_attention(q, k, v, table, lengths, 0.2, Reach(window, sinks))
        for i, n in enumerate(lengths.tolist()):
            first = 0 if window is None else max(n - window, 0)
            query = q[i][:, None].float()
            keys, values = (x[table[i]].transpose(0, 1).flatten(1, 2)[:, first:n].float() for x in (k, v))
            keys, values = (x.repeat_interleave(heads // kv_heads, 0) for x in (keys, values))
            scores = query @ keys.mT * 0.2
            if sinks is not None:
                scores = torch.cat((scores, sinks[:, None, None].float()), -1)
            expected = scores.softmax(-1)[..., : n - first] @ values
            tolerance = 1e-5 if dtype is torch.float32 else 2e-3
            torch.testing.assert_close(found[i].float(), expected[:, 0], atol=tolerance, rtol=0)
"""

OTHERS = """
from hflow.doctor.decode_check import decode_errors

# The interpreter has no products in bf16.
for dtype, limit in ((torch.float32, 1e-5), (torch.float16, 3e-3)):
    errors = dict(decode_errors("cpu", dtype))
    assert len(errors) == 6 and all(error <= limit for error in errors.values()), errors
"""

ENGINE = """
import hflow.models.attention_kernels as kernels
from test_decode_graphs import CapturingEngine, assert_equal
from family_kit import architecture
from test_engine import generate, settings
from test_engine_pages import PagedEngine
from hflow.engines.embedded.engine import EmbeddedEngine
from hflow.engines.interface import SamplingParams
from hflow.models.settings import ModelSettings

prompts = [[1, 5, 6], [7], list(range(3, 31)), [1, 5, 6]]
params = [SamplingParams(max_tokens=3 + 2 * i, seed=i, temperature=0.5 * i) for i in range(4)]
gpt_oss = ModelSettings(name="actor", architecture=architecture("gpt_oss"), seed=3)
both = CapturingEngine, PagedEngine
for model, engines in ((settings("qwen2"), both), (settings("qwen3"), both), (gpt_oss, [PagedEngine])):
    expected = generate(EmbeddedEngine(model, {"max_running": 3}), prompts, params)
    kernels.has_cuda_api = lambda kind: True
    for cls in engines:
        assert_equal(generate(cls(model, {"max_running": 3}), prompts, params), expected)
    kernels.has_cuda_api = lambda kind: False
assert kernels.num_calls[kernels.AttentionKernel.TRITON] > 20
"""

COMPILED = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from hflow.models import decode_kernels as kernels

POINTERS = {
    kernels._attend: dict.fromkeys(("q", "k", "v", "sinks", "out"), None)
    | {"lengths": "i32", "table": "i32"},
    kernels._norm: {"x": None, "weight": None, "eps": "fp32", "out": None},
    kernels._gate: {"joined": None},
    kernels._rotate: dict.fromkeys(("heads", "cos", "sin", "q_weight", "k_weight", "keys", "values"), None)
    | {"eps": "fp32", "blocks": "i64", "offsets": "i64"},
    kernels._sum_chunks: {"logits": None, "temperature": "fp32", "largest": "fp32", "sums": "fp32"},
    kernels._draw: {
        **{"logits": None, "temperature": "fp32", "uniform": "fp64", "greedy": "i1", "largest": "fp32"},
        **{"sums": "fp32", "tokens": "fp64", "logprobs": "fp64"},
    },
}
CONSTANTS = {
    kernels._attend: dict(
        num_shared=7, num_rows=16, head_dim=64, num_columns=64, num_tokens=64, page_tokens=16,
        window=128, has_sinks=True,
    ),
    kernels._norm: dict(num_columns=896, block=1024),
    kernels._gate: dict(block=1024),
    kernels._rotate: dict(half=32, block=32, has_norms=True),
    kernels._sum_chunks: dict(chunk=4096, has_temperature=True),
    kernels._draw: dict(chunk=4096, num_slots=64, has_temperature=True, has_greedy=True),
}
for capability in (80, 90, 100):
    for dtype in ("bf16", "fp32"):
        for function, pointers in POINTERS.items():
            types = {name: "i32" for name in function.arg_names} | {"scaling": "fp32"}
            types |= dict.fromkeys(CONSTANTS[function], "constexpr")
            types |= {name: "*" + (of or dtype) for name, of in pointers.items()}
            types = {name: types[name] for name in function.arg_names}
            source = ASTSource(function, types, CONSTANTS[function])
            kernel = compile(source, target=GPUTarget("cuda", capability, 32))
            assert kernel.asm["cubin"] and kernel.metadata.shared < 96 * 1024
"""


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(INTERPRETER + ATTENTION, id="attention"),
        pytest.param(INTERPRETER + OTHERS, id="others"),
        pytest.param(INTERPRETER + ENGINE, id="engine"),
        pytest.param(COMPILED, id="compiled"),
    ],
)
def test_kernels(script: str) -> None:
    run_with_triton(script)


@pytest.mark.gpu
def test_decode_kernel_in_bf16_on_a_gpu() -> None:
    from hflow.models.decode_kernels import triton_decode_attention

    lengths = torch.tensor([1, 700, 64, 65], dtype=torch.int32, device="cuda")
    q = torch.randn(4, 14, 64, dtype=torch.bfloat16, device="cuda")
    k, v = (torch.randn(176, 2, 16, 64, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    table = torch.randperm(176, device="cuda").int().view(4, 44)
    found = triton_decode_attention(q, k, v, table, lengths, 0.125)
    for i, n in enumerate(lengths.tolist()):
        query = q[i][:, None].double()
        keys, values = (x[table[i]].transpose(0, 1).flatten(1, 2)[:, :n].double() for x in (k, v))
        expected = scaled_dot_product_attention(query, keys, values, scale=0.125, enable_gqa=True)
        torch.testing.assert_close(found[i].double(), expected[:, 0], atol=2e-2, rtol=2e-2)


@pytest.mark.gpu
def test_kernels_on_a_gpu() -> None:
    found = list(check_decoding("cuda"))
    assert len(found) == 2
    assert all(finding.ok for finding in found), found
