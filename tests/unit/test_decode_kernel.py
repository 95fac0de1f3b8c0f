"""hflow's Triton kernel without a GPU: Triton's interpreter runs it, and its compiler translates it."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")

INTERPRETED = """
import os
os.environ["TRITON_INTERPRET"] = "1"
import torch
import triton.runtime.interpreter as interpreter
from hflow.models.decode_kernel import triton_decode_attention
from torch.nn.functional import scaled_dot_product_attention

patch = interpreter._patch_lang_tensor

def patch_for_numpy(tensor, scope):
    patch(tensor, scope)
    # Triton 3.6 calls int() with an array of one number, which numpy 2.5 refuses.
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

interpreter._patch_lang_tensor = patch_for_numpy
torch.manual_seed(0)
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
    found = triton_decode_attention(q, k, v, table, lengths, 0.2)
    for i, n in enumerate(lengths.tolist()):
        query = q[i][:, None].float()
        keys, values = (x[table[i]].transpose(0, 1).flatten(1, 2)[:, :n].float() for x in (k, v))
        expected = scaled_dot_product_attention(query, keys, values, scale=0.2, enable_gqa=True)
        tolerance = 1e-5 if dtype is torch.float32 else 2e-3
        torch.testing.assert_close(found[i].float(), expected[:, 0], atol=tolerance, rtol=0)
"""

COMPILED = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from hflow.models.decode_kernel import _attend

constants = dict(num_shared=7, num_rows=16, head_dim=64, num_columns=64, num_tokens=64, page_tokens=16)
for capability in (80, 90, 100):
    for dtype in ("bf16", "fp32"):
        types = {name: "i32" for name in _attend.arg_names}
        types |= dict.fromkeys(constants, "constexpr") | dict.fromkeys(("q", "k", "v", "out"), "*" + dtype)
        types |= {"lengths": "*i32", "table": "*i32", "scaling": "fp32"}
        kernel = compile(ASTSource(_attend, types, constants), target=GPUTarget("cuda", capability, 32))
        assert kernel.asm["cubin"] and kernel.metadata.shared < 96 * 1024
"""


@pytest.mark.parametrize("script", [INTERPRETED, COMPILED], ids=["interpreted", "compiled"])
def test_decode_kernel(script: str) -> None:
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
def test_decode_kernel_in_bf16_on_a_gpu() -> None:
    from hflow.models.decode_kernel import triton_decode_attention

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
