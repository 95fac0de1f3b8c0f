"""Arguments out of batches and columns out of results, with the messages that users see."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from hflow.base.errors import RunError
from hflow.data.batches.batch import Batch, Column
from hflow.data.batches.batch_arguments import bind_batch, sequences_of, unpack_batch
from hflow.data.batches.row_arguments import bind_rows, unpack_rows
from hflow.graph.ir import Read
from hflow.types import Output, Unit


@dataclass
class Body:
    reads: tuple[Read, ...] = ()
    returns: tuple[tuple[str, str], ...] = ()
    provided: tuple[tuple[str, str], ...] = ()
    metrics: bool = False
    knobs: dict[str, Any] = field(default_factory=dict)


def read(parameter: str, unit: Unit, field: str = "", stream: str = "gen") -> Read:
    return Read(parameter, field or parameter, stream, "gen", unit, unit, "tensor")


def batch(read_only: bool = False) -> Batch:
    """Two sequences of group 9 and one of group 4; the first token of each is prompt."""
    columns = {
        "loss_mask": Column(Unit.TOKEN, np.array([0, 1, 0, 1, 1, 0], dtype=bool)),
        "input_ids": Column(Unit.TOKEN, np.arange(6, dtype=np.int32)),
        "logprobs": Column(Unit.TOKEN, np.array([9, -1, 9, -2, -3, 9], dtype=np.float32)),
        "topk": Column(Unit.TOKEN, np.ones((6, 2), dtype=np.float32)),
        "reward": Column(Unit.SEQUENCE, np.array([1.0, 2.0, 3.0])),
        "level": Column(Unit.GROUP, np.array([7.0, 7.0, 5.0])),
        "completion": Column(Unit.TEXT, ["a", "b", "c"]),
        "rm/score": Column(Unit.SEQUENCE, np.array([0.1, 0.2, 0.3], dtype=np.float32)),
    }
    for column in columns.values():
        if read_only and isinstance(column.values, np.ndarray):
            column.values.flags.writeable = False
    return Batch(np.array([3, 4, 8]), np.array([9, 9, 4]), np.array([2, 3, 1]), columns)


def bound(*reads: Read, **options: Any) -> dict[str, Any]:
    here = batch(options.pop("read_only", False))
    return bind_batch(Body(reads, **options), here, sequences_of(here))


def test_sequences_count_groups_by_id():
    seqs = sequences_of(batch())
    assert seqs.offsets.tolist() == [0, 2, 5, 6]
    assert seqs.group.tolist() == [1, 1, 0]
    assert seqs.num_groups == 2


@pytest.mark.parametrize("read_only", [False, True])
def test_tensors_have_fixed_types_and_masked_floats(read_only):
    got = bound(
        read("input_ids", Unit.TOKEN), read("x", Unit.TOKEN, "logprobs"), read("topk", Unit.TOKEN),
        read("reward", Unit.SEQUENCE), read_only=read_only,
    )  # fmt: skip
    assert got["input_ids"].dtype == torch.int64
    assert got["input_ids"].tolist() == [0, 1, 2, 3, 4, 5]
    assert got["x"].tolist() == [0, -1, 0, -2, -3, 0]
    assert got["topk"][:, 0].tolist() == [0, 1, 0, 1, 1, 0]
    assert got["reward"].dtype == torch.float32


def test_widening():
    got = bound(
        read("reward", Unit.TOKEN), read("level", Unit.GROUP), read("wide", Unit.SEQUENCE, "level"),
        read("wider", Unit.TOKEN, "level"),
    )  # fmt: skip
    assert got["reward"].tolist() == [0, 1, 0, 2, 2, 0]
    assert got["level"].tolist() == [5, 7]
    assert got["wide"].tolist() == [7, 7, 5]
    assert got["wider"].tolist() == [0, 7, 0, 7, 7, 0]


def test_texts_knobs_and_provided_arguments_are_bound():
    here = batch()
    seqs, output = sequences_of(here), Output()
    body = Body(
        (read("completion", Unit.TEXT),),
        provided=(("out", "output"), ("s", "sequences")),
        knobs={"clip": 0.2},
    )
    got = bind_batch(body, here, seqs, output)
    assert got == {"completion": ["a", "b", "c"], "out": output, "s": seqs, "clip": 0.2}


def test_fields_of_other_streams_and_made_fields():
    here = batch()
    body = Body((read("score", Unit.SEQUENCE, stream="rm"), read("prox", Unit.TOKEN, "prox_logprobs")))
    made = torch.zeros(6)
    got = bind_batch(body, here, sequences_of(here), computed={"prox_logprobs": made})
    assert got["score"].tolist() == pytest.approx([0.1, 0.2, 0.3])
    assert got["prox"] is made


def test_a_missing_field_is_named():
    with pytest.raises(RunError, match=r"lacks 'rewards'.*did you mean 'reward'"):
        bound(read("rewards", Unit.SEQUENCE))


def unpacked(result: Any, *returns: tuple[str, str], metrics: bool = False):
    here = batch()
    return unpack_batch("score", Body(returns=returns, metrics=metrics), result, here, sequences_of(here))


def test_unpack_columns():
    columns, metrics = unpacked(
        (torch.zeros(6, dtype=torch.bfloat16), torch.tensor([5, 7]), {"kl": 1.0}),
        ("a", "token"), ("b", "group"), metrics=True,
    )  # fmt: skip
    assert columns["a"].values.dtype == np.float32
    assert columns["b"].values.tolist() == [7, 7, 5]
    assert metrics == {"kl": 1.0}


def test_unpacking_a_wrong_result_is_an_error():
    with pytest.raises(RunError, match="'score' returned 1 results, but declares 2: a, metrics"):
        unpacked(torch.zeros(6), ("a", "token"), metrics=True)
    with pytest.raises(RunError, match=r"'score': 'a' is per sequence.*start with 3.*returned \[6\]"):
        unpacked(torch.zeros(6), ("a", "sequence"))
    with pytest.raises(RunError, match="'a' must be a tensor, the body returned list"):
        unpacked([1.0, 2.0, 3.0], ("a", "sequence"))
    jagged = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(4)], layout=torch.jagged)
    for wrong, kind in ((torch.zeros(6, dtype=torch.complex64), "complex"), (jagged, "sparse or jagged")):
        with pytest.raises(RunError, match=f"must be a dense tensor of real numbers, not {kind}"):
            unpacked(wrong, ("a", "token"))
    with pytest.raises(RunError, match="last result is a Tensor, not a dict"):
        unpacked((torch.zeros(6), torch.zeros(6)), ("a", "token"), metrics=True)


def test_rows_of_a_sample():
    one = batch().take([1])
    reads = (
        read("completion", Unit.TEXT), read("logprobs", Unit.TOKEN), read("level", Unit.SEQUENCE),
        read("reward", Unit.TOKEN), read("input_ids", Unit.TOKEN),
    )  # fmt: skip
    (got,) = bind_rows(Body(reads, knobs={"k": 1}), one, [1], "sample")
    assert got == {
        "completion": "b",
        "logprobs": [0, -2, -3],
        "level": 7.0,
        "reward": [0, 2, 2],
        "input_ids": [2, 3, 4],
        "k": 1,
    }


def test_calls_bound_together_get_the_same_arguments_as_alone():
    reads = (read("completion", Unit.TEXT), read("logprobs", Unit.TOKEN), read("reward", Unit.TOKEN))
    whole = batch()
    together = bind_rows(Body(reads, knobs={"k": 1}), whole, [1] * len(whole), "sample")
    rows = [whole.take([i]) for i in range(len(whole))]
    assert together == [bind_rows(Body(reads, knobs={"k": 1}), row, [1], "sample")[0] for row in rows]
    first, second = bind_rows(Body(reads), whole, [2, 1], "group")
    assert first["completion"] == ["a", "b"]
    assert [first["logprobs"], second["logprobs"]] == [
        [arguments["logprobs"] for arguments in together[:2]],
        [together[2]["logprobs"]],
    ]


def test_rows_of_a_group():
    group = batch().take([0, 1])
    reads = (read("reward", Unit.SEQUENCE), read("level", Unit.GROUP), read("completion", Unit.TEXT))
    (got,) = bind_rows(Body(reads), group, [2], "group")
    assert got == {"reward": [1.0, 2.0], "level": 7.0, "completion": ["a", "b"]}


def test_unpack_rows_of_a_sample():
    returns = (("a", "sequence"), ("b", "token"), ("c", "text"), ("d", "json"))
    columns = unpack_rows(returns, [(True, [1, 2, 3], "x", {"y": 1})], [1], "sample")
    assert columns["a"].values.dtype == bool
    assert columns["b"].values.tolist() == [1, 2, 3]
    assert (columns["c"].values, columns["d"].values) == (["x"], [{"y": 1}])


def test_results_of_several_calls_become_one_column():
    returns = (("keep", "group"), ("a", "sequence"))
    columns = unpack_rows(returns, [(False, [0.7, 1]), (True, [3])], [2, 1], "group")
    assert columns["keep"].values.tolist() == [False, False, True]
    assert columns["a"].values.tolist() == [0.7, 1.0, 3.0]
