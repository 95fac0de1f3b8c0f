"""Seeds of requests, for engines whose generator has a state."""

from __future__ import annotations

import torch

from hflow.models.seeds import request_seed

SEEDS = (0, 1, 2, -1, 2**63, 2**64 - 1)
LENGTHS = range(4096)


def test_a_request_has_the_same_seed_in_every_run():
    """A resumed run continues samples that an earlier process began."""
    assert request_seed(0, 0) == 0x28A5449D2A976215
    assert request_seed(2**64 - 1, 100_000) == 0x2C7D3FF4540EF1D8
    assert request_seed(-1, 7) == 0x5DE4A4425CEEDA09


def test_no_two_requests_share_a_seed():
    seeds = {request_seed(seed, length) for seed in (*SEEDS, *range(3, 60)) for length in LENGTHS}
    assert len(seeds) == (len(SEEDS) + 57) * len(LENGTHS)
    assert min(seeds) >= 0
    assert max(seeds) < 2**63


def test_seeds_of_neighbours_draw_unrelated_numbers():
    """Of samples with neighbouring seeds, and of a sample that is interrupted one token later."""
    generator = torch.Generator()

    def first(seed: int, length: int) -> float:
        return float(torch.rand((), generator=generator.manual_seed(request_seed(seed, length))))

    numbers = torch.tensor([[first(seed, length) for length in range(200)] for seed in range(30)])
    for a, b in ((numbers[1:], numbers[:-1]), (numbers[:, 1:], numbers[:, :-1])):
        correlation = torch.corrcoef(torch.stack((a.flatten(), b.flatten())))[0, 1]
        assert abs(float(correlation)) < 0.05  # 4 standard deviations of independent numbers
