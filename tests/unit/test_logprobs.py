"""Log-probs and entropy from hidden states and an output matrix: known answers, gradients, and memory."""

from __future__ import annotations

import math
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hflow.training.loop import logprobs
from hflow.training.loop.logprobs import MatrixLogits, OutputMatrix

ROWS, HIDDEN, VOCAB = 11, 6, 13


@pytest.fixture(params=[ROWS, 4], ids=["one chunk", "chunks of 4 rows"])
def rows_per_chunk(request, monkeypatch):
    """Let `ROWS` rows have logits at once, or four, of which one or two are in fp32."""
    monkeypatch.setattr(logprobs, "CHUNK_BYTES", 8 * VOCAB * request.param)
    monkeypatch.setattr(logprobs, "LOGITS_PER_TILE", VOCAB * (request.param // 2))
    return request.param


def inputs(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    rows = 3 * torch.randn(ROWS, HIDDEN, generator=generator)
    weight, bias = torch.randn(VOCAB, HIDDEN, generator=generator), torch.randn(VOCAB, generator=generator)
    ids = torch.randint(0, VOCAB, (ROWS,), generator=generator)
    return [x.to(dtype).requires_grad_() for x in (rows, weight, bias)], ids


def loss_of(logits, ids, names):
    """Return a number to which each entry of each result contributes with its own factor."""
    results = [*logits.measure(names, ids), logits.topk(3)[1], logits.logprobs_of(torch.stack([ids, ids], 1))]
    return torch.stack([(x * torch.linspace(-1, 2, x.numel()).view(x.shape)).sum() for x in results]).sum()


class Autograd:
    """The same results by torch's own log-softmax of all logits."""

    def __init__(self, rows, matrix, temperature):
        whole = (rows @ matrix.weight.T + matrix.bias).float() / temperature
        self.logprobs = torch.log_softmax(whole, dim=-1)

    def measure(self, names, ids):
        found = {
            "logprobs": self.logprobs_of(ids[:, None])[:, 0],
            "entropy": -(self.logprobs.exp() * self.logprobs).sum(-1),
        }
        return [found[name] for name in names]

    def topk(self, k):
        return self.logprobs.topk(k, dim=-1)[::-1]

    def logprobs_of(self, ids):
        return self.logprobs.gather(1, ids)


@pytest.mark.parametrize("names", [["logprobs"], ["entropy", "logprobs"]])
@pytest.mark.parametrize("temperature", [1.0, 0.3])
@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 1e-4), (torch.bfloat16, 0.1)])
def test_results_and_gradients_are_those_of_all_logits(rows_per_chunk, names, temperature, dtype, close):
    found, wanted = [], []
    for kind, values in ((MatrixLogits, found), (Autograd, wanted)):
        leaves, ids = inputs(dtype)
        loss = loss_of(kind(leaves[0], OutputMatrix(*leaves[1:]), temperature), ids, names)
        loss.backward()
        values.extend([loss.detach(), *(x.grad.float() for x in leaves)])
    for got, expected in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, expected, atol=close * float(expected.abs().max()), rtol=0)


def test_no_rows_give_gradients_of_zero():
    """Ranks that sum gradients need one of every weight, also of a micro-batch without learned tokens."""
    (rows, *of_matrix), _ = inputs()
    logits = MatrixLogits(rows[:0], OutputMatrix(*of_matrix), 1.0)
    logits.logprobs_of(torch.zeros(0, 2, dtype=torch.int64)).sum().backward()
    for weight in of_matrix:
        torch.testing.assert_close(weight.grad, torch.zeros_like(weight), atol=0, rtol=0)


def test_a_known_answer():
    """Logits 0 and ln 3 are probabilities 1/4 and 3/4, and at a temperature of 1/2 they are 1/10 and 9/10.

    Under it the log-prob of token 0 is -ln 10, its slopes in the logits are 2 (1 - 1/10) and -2 * 9/10. The
    entropy is ln 10 - 0.9 ln 9 = 0.3251. With l = 0 and ln 9 and a mean of 0.9 ln 9 = 1.9775, its slopes are
    2 * 1/10 * 1.9775 = 0.3955 and -2 * 9/10 (2.1972 - 1.9775) = -0.3955.
    """
    weight = torch.tensor([[0.0], [math.log(3)]], requires_grad=True)
    logits = MatrixLogits(torch.ones(1, 1), OutputMatrix(weight), temperature=0.5)
    for name, value, slopes in (
        ("logprobs", -math.log(10), [1.8, -1.8]),
        ("entropy", 0.3251, [0.3955, -0.3955]),
    ):
        (found,) = logits.measure([name], torch.tensor([0]))
        assert found.item() == pytest.approx(value, abs=1e-4)
        (slope,) = torch.autograd.grad(found.sum(), weight)
        assert slope[:, 0].tolist() == pytest.approx(slopes, abs=1e-4)


def test_a_frozen_matrix_has_no_gradient(rows_per_chunk):
    """Adapters train beside a frozen matrix."""
    (rows, weight, bias), ids = inputs(torch.float32)
    weight.requires_grad_(False)
    bias.requires_grad_(False)
    (found,) = MatrixLogits(rows, OutputMatrix(weight, bias), 1.0).measure(["logprobs"], ids)
    found.sum().backward()
    assert rows.grad.any()
    assert weight.grad is None


def test_a_second_backward_pass_is_an_error():
    """The logits of a single chunk have become their gradient by then."""
    (rows, weight, _), ids = inputs(torch.float32)
    (found,) = MatrixLogits(rows, OutputMatrix(weight), 1.0).measure(["logprobs"], ids)
    found.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        found.sum().backward()


def test_no_more_logits_exist_than_a_chunk_and_a_tile(monkeypatch):
    """Logits exist for 8 rows of 64 at a time, in bf16, and for 2 of these in fp32."""
    num, vocab = 64, 1000
    monkeypatch.setattr(logprobs, "CHUNK_BYTES", 2 * 8 * vocab)
    monkeypatch.setattr(logprobs, "LOGITS_PER_TILE", 2 * vocab)
    rows = torch.randn(num, 4, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(vocab, 4, dtype=torch.bfloat16, requires_grad=True)
    made = []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            made.extend((x.dtype, x.numel()) for x in tree_leaves(result) if isinstance(x, torch.Tensor))
            return result

    with Sizes():
        names = ["entropy", "logprobs"]
        entropy, found = MatrixLogits(rows, OutputMatrix(weight), 1.0).measure(names, torch.zeros(num).long())
        (found + entropy).sum().backward()
    assert max(size for dtype, size in made if dtype is torch.bfloat16) == 8 * vocab
    assert max(size for dtype, size in made if dtype is torch.float32) == 2 * vocab


def test_the_matrix_is_free_after_the_backward_pass():
    """The loss, and with it the graph, lives until that of the next micro-batch."""
    matrix = torch.randn(9, 4, requires_grad=True)
    cast = matrix.to(torch.bfloat16)
    rows, ids = torch.randn(3, 4, dtype=torch.bfloat16), torch.tensor([[1], [2], [3]])
    loss = MatrixLogits(rows, OutputMatrix(cast), 1.0).logprobs_of(ids).sum()
    memory = weakref.ref(cast)
    del cast
    loss.backward()
    assert memory() is None
