"""The planner's traits of training backends agree with the backends."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch_kit as kit
from test_shared_prefix import apart, shared_batch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from hflow.base.errors import PlanError
from hflow.data.batches.batch import Batch
from hflow.data.batches.shared_prefix import share_prefixes
from hflow.models.settings import RankPosition
from hflow.planner.models.descriptors import descriptor, training_backend
from hflow.planner.plan.traits import BACKENDS, ENGINES, traits


def rows_computed(backend: str, batch: Batch) -> int:
    """Rows that go through each layer in a forward."""
    model = training_backend(backend).factory(
        dataclasses.replace(kit.SETTINGS, trainable=False), RankPosition()
    )
    hidden, rows = kit.ARCHITECTURE["hidden_size"], list[int]()

    def note(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if type(module).__name__.endswith("MLP"):
            rows.append(inputs[0].numel() // hidden)

    hook = register_module_forward_pre_hook(note)
    try:
        model.infer(kit.LOGPROBS, [batch])
    finally:
        hook.remove()
    assert len(rows) == kit.ARCHITECTURE["num_hidden_layers"]
    assert len(set(rows)) == 1
    return rows[0]


@pytest.mark.parametrize("backend", [*BACKENDS])
def test_prompts_that_a_group_shares_are_computed_once(backend: str) -> None:
    batch = shared_batch()
    sharing = share_prefixes(batch)
    assert sharing is not None
    distinct = len(sharing.token_of_row) if traits(backend).shares_prompts else batch.num_tokens
    assert rows_computed(backend, batch) == distinct
    assert rows_computed(backend, apart(batch)) == batch.num_tokens


@pytest.mark.parametrize("name", [*BACKENDS, *ENGINES])
def test_every_name_in_the_registry_has_a_descriptor(name: str) -> None:
    assert descriptor(name).name == name


def test_backends_and_engines_have_different_names() -> None:
    """A replica has one `backend`, which is the name of either."""
    assert not set(BACKENDS) & set(ENGINES)


def test_an_unknown_backend() -> None:
    with pytest.raises(PlanError, match="unknown backend 'megatorn'; did you mean 'megatron'"):
        traits("megatorn")
