"""Log-probs, entropy and top-k of a vocabulary split over two ranks equal those of whole logits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import vocab_ranks as ranks
from ranks import start


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    path = tmp_path_factory.mktemp("vocab")
    start(ranks.run, (str(path),), 2)
    return [torch.load(Path(path) / f"{rank}.pt", weights_only=False) for rank in (0, 1)]


class Whole:
    """The same measures of whole logits, by torch's own log-softmax."""

    def __init__(self, rows, matrix, temperature, sets=()):
        logits = rows @ matrix.T / temperature
        for row, ids in enumerate(sets):
            if ids:
                left_out = torch.ones(len(matrix), dtype=torch.bool).index_fill(0, torch.tensor(ids), False)
                logits = logits.index_put((torch.tensor(row), left_out), torch.tensor(-torch.inf))
        self.logprobs = torch.log_softmax(logits, dim=-1)

    def measure(self, names, ids):
        assert names == ["entropy", "logprobs"]
        finite = self.logprobs.masked_fill(self.logprobs.isinf(), 0)
        return -(self.logprobs.exp() * finite).sum(-1), self.logprobs.gather(1, ids[:, None])[:, 0]

    def topk(self, k):
        return self.logprobs.topk(k, dim=-1)[::-1]

    def logprobs_of(self, ids):
        return self.logprobs.gather(1, ids)


@pytest.mark.parametrize("restricted", [False, True])
@pytest.mark.parametrize("size", ranks.CHUNKS)
@pytest.mark.parametrize("temperature", ranks.TEMPERATURES)
def test_equals_whole_logits(results, temperature, size, restricted):
    rows, matrix, drawn, others = ranks.inputs()
    rows.requires_grad_()
    matrix.requires_grad_()
    sets, others = (ranks.kept_sets(), drawn[:, None]) if restricted else ((), others)
    wanted, wanted_ids = ranks.measures(Whole(rows, matrix, temperature, sets), drawn, others)
    ranks.combine(wanted).backward()
    for rank in (0, 1):
        found, ids, rows_grad, part_grad = results[rank][temperature, size, restricted]
        assert torch.equal(ids, wanted_ids)
        for name, tensor in wanted.items():
            torch.testing.assert_close(found[name], tensor.detach(), atol=2e-5, rtol=1e-6)
        torch.testing.assert_close(rows_grad, rows.grad, atol=1e-4, rtol=1e-5)
        part = matrix.grad[rank * ranks.PART : (rank + 1) * ranks.PART]
        torch.testing.assert_close(part_grad[: len(part)], part, atol=1e-4, rtol=1e-5)
        assert not part_grad[len(part) :].any(), "padding has no gradient"


def test_by_hand(results):
    """Logits 0 and ln 3 are probabilities 1/4 and 3/4.

    The log-prob of token 0 is -ln 4 = -1.3863; its slopes are 1 - 1/4 and -3/4. The entropy is
    ln 4 / 4 + 3/4 ln 4/3 = 0.5623; with a mean logit of 3/4 ln 3 = 0.8240 its slopes are
    -1/4 (0 - 0.8240) = 0.2060 and -3/4 (1.0986 - 0.8240) = -0.2060.
    """
    assert results[0]["by hand"] == pytest.approx((-1.3863, 0.5623, 0.75, 0.2060), abs=1e-4)
    assert results[1]["by hand"] == pytest.approx((-1.3863, 0.5623, -0.75, -0.2060), abs=1e-4)


def test_a_micro_batch_may_have_no_rows(results):
    """A micro-batch without learned tokens has no rows."""
    n, k = 0, 3
    assert [tuple(shape) for shape in results[0]["nothing"]] == [(n,), (n,), (n, k), (n, k)]
