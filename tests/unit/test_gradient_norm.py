"""The norm of a gradient in many tensors: the plain formula."""

from __future__ import annotations

import pytest
import torch

from hflow.training.gradient_norm import total_norm

CPU = torch.device("cpu")


def test_the_norm_of_many_tensors_is_that_of_all_their_entries() -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(size, generator=generator) for size in (3, 1, 40, 7)]
    assert total_norm(tensors, CPU, None) == pytest.approx(torch.cat(tensors).norm().item())
    assert total_norm([*tensors, *tensors], CPU, None, 2) == pytest.approx(torch.cat(tensors).norm().item())


def test_no_gradient_has_the_norm_0_and_an_infinite_one_shows() -> None:
    assert total_norm([], CPU, None) == 0
    assert total_norm([torch.ones(2), torch.tensor([float("inf")])], CPU, None) == float("inf")
