"""Batches as TensorDicts: what a body receives, that nothing is copied, and what it may return."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import numpy as np
import pytest
import tensordict
import torch
from torch import Tensor

from hflow import (
    Dataset,
    Model,
    PerGroup,
    PerSequence,
    PerToken,
    Recipe,
    TensorDict,
    Text,
    compute,
    nodes,
    use,
)
from hflow.base.errors import BackendError, RecipeError, RunError
from hflow.data.batches.batch import Batch, Column
from hflow.data.batches.batch_arguments import bind_batch, sequences_of, unpack_batch
from hflow.graph.build import build_graph
from hflow.graph.ir import Graph, Node, Read
from hflow.launch.running.preflight import check_packages
from hflow.types import Unit

UNITS = {"x": Unit.TOKEN, "reward": Unit.SEQUENCE, "loss_mask": Unit.TOKEN}
RETURNS = (("y", "token"), ("z", "sequence"), ("g", "group"))


class Call:
    """What a node needs to be called."""

    reads = tuple(
        Read(f"batch.{name}", name, "gen", "gen", unit, unit, "tensor") for name, unit in UNITS.items()
    )
    reads += (Read("batch.wide", "reward", "gen", "gen", Unit.SEQUENCE, Unit.TOKEN, "tensor"),)
    provided = (("batch", "tensordict"),)
    returns = RETURNS
    metrics = False
    knobs: ClassVar[dict[str, Any]] = {"scale": 2.0}


@pytest.fixture
def batch() -> Batch:
    """Three samples of 2, 3 and 1 tokens in two groups."""
    columns = {
        "x": Column(Unit.TOKEN, np.arange(6, dtype=np.float32)),
        "reward": Column(Unit.SEQUENCE, np.array([1.0, 2.0, 3.0], np.float32)),
        "loss_mask": Column(Unit.TOKEN, np.array([False, True, False, True, True, True])),
    }
    groups, lengths = np.array([7, 7, 9]), np.array([2, 3, 1])
    return Batch(np.array([4, 5, 6]), groups, lengths, columns)


def made(batch: Batch) -> tuple[Any, Any]:
    seqs = sequences_of(batch)
    return bind_batch(Call(), batch, seqs), seqs


def test_a_body_receives_jagged_tensors_that_share_memory_with_the_batch(batch: Batch) -> None:
    arguments, _ = made(batch)
    assert arguments.keys() == {"batch", "scale"}
    entries = arguments["batch"]
    assert isinstance(entries, tensordict.TensorDict)
    assert entries.batch_size == (3,)
    assert [row.tolist() for row in entries["x"].unbind()] == [[0, 1], [2, 3, 4], [5]]
    assert entries["x"].values().data_ptr() == batch.columns["x"].values.ctypes.data
    assert entries["reward"].data_ptr() == batch.columns["reward"].values.ctypes.data
    assert entries["wide"].values().tolist() == [1, 1, 2, 2, 2, 3]  # read per token
    assert (entries["x"] + entries["wide"]).values().tolist() == [1, 2, 4, 5, 6, 8]


def test_a_returned_tensordict_is_packed_again(batch: Batch) -> None:
    arguments, seqs = made(batch)
    entries = arguments["batch"]
    result = tensordict.TensorDict(
        {"y": entries["x"] * 2, "z": entries["reward"] + 1, "g": torch.tensor([5.0, 5.0, 8.0])},
        batch_size=[3],
    )
    columns, _ = unpack_batch("adv", Call(), result, batch, seqs)
    assert {name: column.values.tolist() for name, column in columns.items()} == {
        "y": [0, 2, 4, 6, 8, 10],
        "z": [2, 3, 4],
        "g": [5, 5, 8],
    }


def jagged(values: Tensor, *offsets: int) -> Tensor:
    return torch.nested.nested_tensor_from_jagged(values, offsets=torch.tensor(offsets))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"y": None}, "lacks 'y'; it has z, g"),
        ({"y": jagged(torch.zeros(6), 0, 1, 5, 6)}, "must be jagged with the lengths of the batch"),
        ({"g": torch.tensor([1.0, 2.0, 3.0])}, "'g' is per group, but differs within a group"),
    ],
)
def test_a_wrong_tensordict_is_refused(batch: Batch, changes: dict[str, Any], message: str) -> None:
    arguments, seqs = made(batch)
    entries = {"y": arguments["batch"]["x"], "z": torch.zeros(3), "g": torch.zeros(3), **changes}
    result = tensordict.TensorDict({k: v for k, v in entries.items() if v is not None}, batch_size=[3])
    with pytest.raises(RunError, match=message):
        unpack_batch("adv", Call(), result, batch, seqs)


actor = Model("actor", trainable=True)


@compute(per="sample", returns="reward")
def score(completion: str) -> float:
    return 1.0


@compute()
def take_all(batch: TensorDict) -> Annotated[TensorDict, {"first": PerToken}]:
    return batch


@compute()
def take_some(
    batch: Annotated[tensordict.TensorDict, {"first": PerToken, "reward": PerGroup}],
) -> PerSequence:
    return batch["reward"]


def graph_of(*listed: Any) -> Graph:
    data = Dataset(prompt=Text, size=PerSequence)
    return build_graph(Recipe("r", data, [use(nodes.actor_gen, actor), score, *listed]).spec())


def fields(node: Node) -> set[str]:
    return {read.field for read in node.reads}


def test_a_tensordict_alone_reads_all_numbers_that_exist_before_the_node() -> None:
    @compute()
    def some(first: PerToken) -> PerSequence:
        return first

    graph = graph_of(take_all, some)
    numbers = {"input_ids", "loss_mask", "behav_logprobs", "versions", "num_tokens", "num_turns", "group"}
    assert fields(graph.node("take_all")) == {*numbers, "size", "reward"}  # not `some`, which comes after it


def test_a_tensordict_with_an_annotation_reads_what_it_names() -> None:
    @compute()
    def named(
        batch: Annotated[tensordict.TensorDict, {"first": PerToken, "reward": PerSequence}],
    ) -> PerSequence:
        return batch["reward"]

    graph = graph_of(take_all, named, use(named, name="other", reads={"batch.reward": "size"}))
    assert fields(graph.node("named")) == {"first", "reward"}
    assert fields(graph.node("other")) == {"first", "size"}
    with pytest.raises(RecipeError, match="'reward' is read as PerGroup, but score produces PerSequence"):
        graph_of(take_all, take_some)


def test_what_a_tensordict_cannot_be_is_refused() -> None:
    def unnamed(batch: TensorDict) -> TensorDict:
        return batch

    def of_texts(batch: Annotated[TensorDict, {"prompt": Text}]) -> PerSequence:
        return batch["prompt"]

    def of_sample(batch: TensorDict) -> float:
        return 1.0

    with pytest.raises(RecipeError, match="its annotation must name its fields"):
        compute()(unnamed)
    with pytest.raises(RecipeError, match="'prompt' of a TensorDict is Text, but must be"):
        compute()(of_texts)
    with pytest.raises(RecipeError, match="TensorDict is not provided here"):
        compute(per="sample")(of_sample)


def test_a_run_without_the_library_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    check_packages(graph_of(take_all))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(BackendError, match=r"take_all .* pip install 'hflow-rl\[tensordict\]'"):
        check_packages(graph_of(take_all))
    check_packages(graph_of())
