"""Compares the Triton kernels of the embedded engine with what torch computes on the CPU in fp32."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from hflow.engines.embedded.dense_decoder import Norm, gated, rotated
from hflow.engines.embedded.sampling import SamplingRows, draw
from hflow.engines.interface import SamplingParams
from hflow.models import decode_kernels as kernels
from hflow.models.attention_kernels import CAUSAL, Reach, StoredHeads, decode_attention
from hflow.models.seeds import uniforms

HIDDEN, INTERMEDIATE, NUM_QUERIES, NUM_KEYS, HEAD_SIZE, VOCAB = 896, 4864, 14, 2, 64, 151_936
"""Sizes of Qwen2.5-0.5B."""
LENGTHS = (1, 64, 65, 150, 17)
"""Cached tokens of the sequences."""
PAGE_TOKENS, WINDOW = 16, 40


def decode_errors(device: str, dtype: torch.dtype) -> Iterator[tuple[str, float]]:
    """Yield kernels, with the largest difference of what they compute, relative to the largest value.

    The difference of draws is that of their log-probs, and infinite where another token is drawn.

    Raises:
        RuntimeError: what Triton and torch raise where a kernel does not run.
    """
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    num, eps = len(LENGTHS), torch.tensor(1e-6)
    x, weight = random(num, HIDDEN), random(HIDDEN)
    found = kernels.rms_norm(x.to(device), weight.to(device), eps.to(device))
    yield "norm", _error(found, Norm(weight.float(), eps)(x.float()))

    joined = random(num, 2 * INTERMEDIATE)
    yield "gate", _error(kernels.gate(joined.to(device, copy=True)), gated(joined.float()))

    heads, angles = random(num, NUM_QUERIES + 2 * NUM_KEYS, HEAD_SIZE), random(num, 1, HEAD_SIZE // 2).float()
    cos = torch.cat((angles.cos(),) * 2, dim=-1).to(dtype)
    sin = torch.cat((-angles.sin(), angles.sin()), dim=-1).to(dtype)
    keys, values = random(2, 30, NUM_KEYS, PAGE_TOKENS, HEAD_SIZE)
    table = torch.randperm(30, generator=generator)[: 3 * num].view(num, 3).repeat(1, 4).int()
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    ends = lengths - 1
    blocks = table.gather(1, (ends // PAGE_TOKENS).long()[:, None])[:, 0].long()
    offsets = (ends % PAGE_TOKENS).long()
    rotated_heads = heads.to(device, copy=True)
    where = StoredHeads(*(tensor.to(device, copy=True) for tensor in (keys, values, blocks, offsets)))
    q_norm, k_norm = random(2, HEAD_SIZE)
    norms = q_norm.to(device), k_norm.to(device), eps.to(device)
    kernels.rotate_heads(rotated_heads, NUM_KEYS, cos.to(device), sin.to(device), norms, where)
    sizes = (NUM_QUERIES, NUM_KEYS, NUM_KEYS)
    *normed, new_values = heads.float().split(sizes, dim=1)
    normed = [Norm(norm.float(), eps)(part) for norm, part in zip((q_norm, k_norm), normed, strict=True)]
    queries, new_keys = rotated(torch.cat(normed, dim=1), cos.float(), sin.float()).split(sizes[:2], dim=1)
    stored_keys, stored_values = keys.float(), values.float()
    stored_keys[blocks, :, offsets], stored_values[blocks, :, offsets] = new_keys, new_values
    found = rotated_heads[:, :NUM_QUERIES]
    pairs = (found, queries), (where.keys, stored_keys), (where.values, stored_values)
    yield "rotary embedding and store", max(_error(*pair) for pair in pairs)

    sinks = random(NUM_QUERIES)
    for name, window in (("attention", None), ("attention with sinks in a window", WINDOW)):
        reach = CAUSAL if window is None else Reach(window, sinks.to(device))
        attended = kernels.triton_decode_attention(
            found, where.keys, where.values, table.to(device), lengths.to(device), 0.125, reach
        )
        reach = CAUSAL if window is None else Reach(window, sinks.float())
        exact = decode_attention(queries, stored_keys, stored_values, table, lengths, 0.125, reach)
        yield name, _error(attended, exact)

    logits, positions = 3 * random(num, VOCAB), np.arange(num)
    params = [SamplingParams(seed=i, temperature=(1.0, 0.0, 0.7)[i % 3]) for i in range(num)]
    rows = SamplingRows.of(params, VOCAB, torch.device("cpu"))
    exact = draw(logits, rows, positions).values
    uniform = torch.from_numpy(uniforms(rows.words, positions)).to(device)
    assert rows.temperature is not None
    assert rows.greedy is not None
    drawn = kernels.draw_tokens(
        logits.to(device), uniform, rows.temperature.to(device), rows.greedy.to(device)
    ).cpu()
    yield "draw", _error(drawn[1], exact[1]) if torch.equal(drawn[0], exact[0]) else math.inf


def _error(found: Tensor, exact: Tensor) -> float:
    return float((found.cpu().double() - exact).abs().max() / exact.abs().max())
