"""The CUDA kernels: variable-length attention in half precision, padding in fp32."""

import numpy as np
import pytest
import torch
import torch_kit as kit

from hflow.models.packed_attention import PackedLayout, packed_attention

pytestmark = pytest.mark.gpu
LENGTHS = np.array([5, 130, 3, 64, 1])


def attend(device: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and the gradient of K for random inputs with grouped queries."""
    generator = torch.Generator().manual_seed(0)
    total = int(LENGTHS.sum())
    query, key, value = (torch.randn(1, heads, total, 32, generator=generator) for heads in (4, 2, 2))
    key = key.to(device, dtype).requires_grad_()
    layout = PackedLayout.of(LENGTHS, device, dtype)
    out, _ = packed_attention(
        torch.nn.Identity(), query.to(device, dtype), key, value.to(device, dtype), None, packed_layout=layout
    )
    out.float().square().sum().backward()
    assert key.grad is not None
    return out.detach().float().cpu(), key.grad.float().cpu()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 5e-2)])
def test_attention_equals_the_cpu(dtype, tolerance):
    for got, wanted in zip(attend("cuda", dtype), attend("cpu", torch.float32), strict=True):
        assert (got - wanted).norm() <= tolerance * wanted.norm()


@pytest.mark.parametrize(("dtype", "tolerance"), [("fp32", 1e-4), ("bf16", 5e-2)])
def test_a_step_equals_the_cpu(dtype, tolerance):
    batch = kit.make_batch(kit.LENGTHS)
    here, there = kit.model(), kit.model(device="cuda", dtype=dtype, tokens_per_microbatch=13)
    first, other = (b.infer(kit.LOGPROBS, [batch])[0].columns["result"].values for b in (here, there))
    np.testing.assert_allclose(other, first, atol=tolerance)
    wanted = here.train(kit.CALLS["token-mean"], kit.whole(batch), 0)
    got = there.train(kit.CALLS["token-mean"], kit.whole(batch), 0)
    assert got["loss"] == pytest.approx(wanted["loss"], abs=tolerance)
