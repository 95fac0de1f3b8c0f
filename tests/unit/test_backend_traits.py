"""What the planner believes of training backends is what they do."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch_kit as kit
from test_prefixes import apart, shared_batch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from hflow.backends.interface import RankPosition
from hflow.data.batch import Batch
from hflow.data.shared_prefix import share_prefixes
from hflow.launch.registry import FACTORIES
from hflow.planner.backend_traits import TRAITS
from hflow.planner.model_shape import FAMILIES

TRAINED = [name for name, facts in TRAITS.items() if facts.kind == "train"]


def rows_computed(backend: str, batch: Batch) -> int:
    """Rows that go through each layer in a forward."""
    model = FACTORIES[backend](dataclasses.replace(kit.SETTINGS, trainable=False), RankPosition())
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


@pytest.mark.parametrize("backend", TRAINED)
def test_prompts_that_a_group_shares_are_computed_once(backend: str) -> None:
    batch = shared_batch()
    sharing = share_prefixes(batch)
    assert sharing is not None
    distinct = len(sharing.token_of_row) if TRAITS[backend].shares_prompts else batch.num_tokens
    assert rows_computed(backend, batch) == distinct
    assert rows_computed(backend, apart(batch)) == batch.num_tokens


def test_megatron_builds_the_families_that_it_is_planned_for() -> None:
    from hflow.backends.megatron.model_dims import FAMILIES as BUILT

    assert set(BUILT) == set(FAMILIES) == set(TRAITS["megatron"].families or ())
