"""Compiled layers compute what layers compute: on one rank, in bf16, recomputed, and sharded by FSDP."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
import torch_kit as kit
import torch_ranks
from ranks import start
from torch._dynamo.utils import counters

from hflow.base.errors import BackendError

Results = tuple[dict[str, float], dict[str, torch.Tensor]]


def trained(**changes: object) -> Results:
    backend = kit.model(**changes)
    metrics = backend.train(kit.CALLS["token-mean"], kit.whole(kit.make_batch(kit.LENGTHS)), 5)
    return metrics, kit.weights(backend)


def assert_same(got: Results, wanted: Results, tolerance: float = 1e-5) -> None:
    assert got[0] == pytest.approx(wanted[0], rel=tolerance, abs=tolerance)
    for name, weight in wanted[1].items():
        torch.testing.assert_close(got[1][name], weight, atol=tolerance, rtol=tolerance)


@pytest.mark.long  # minutes of compilation
@pytest.mark.parametrize(
    ("changes", "tolerance"),
    [({}, 1e-5), ({"activation_checkpointing": True}, 1e-5), ({"dtype": "bf16"}, 2e-2)],
    ids=["whole", "recomputed", "bf16"],
)
def test_training_changes_by_rounding_only(changes: dict[str, object], tolerance: float) -> None:
    torch._dynamo.reset()  # code of another test would be used again
    num_graphs = counters["stats"]["unique_graphs"]
    compiled = trained(compile=True, **changes)
    assert counters["stats"]["unique_graphs"] > num_graphs
    assert_same(compiled, trained(**changes), tolerance)


@pytest.mark.long
def test_two_ranks_equal_one_process(tmp_path: Path) -> None:
    start(torch_ranks.run_compiled, (str(tmp_path),), 2)
    assert_same(torch.load(tmp_path / "compiled.pt", weights_only=False), trained())


def test_a_machine_without_a_compiler_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setenv("CXX", "c++-99")
    with pytest.raises(BackendError, match=r"models.actor.compile needs a C\+\+ compiler, .* no 'c\+\+-99'"):
        kit.model(compile=True)


def test_layers_that_cannot_be_compiled_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError("no space left for code")

    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=refuse))
    with pytest.raises(
        BackendError, match=r"models.actor.compile: .* could not be compiled .*=false"
    ) as error:
        trained(compile=True)
    assert "\n" not in str(error.value)


def test_layers_of_which_there_are_too_many_versions_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch would run them as they are."""
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    model = kit.model(compile=True)
    shard = kit.whole(kit.make_batch(kit.LENGTHS))
    with torch._dynamo.config.patch(recompile_limit=1):
        model.infer(kit.LOGPROBS, [kit.make_batch(kit.LENGTHS)])
        with pytest.raises(BackendError, match="recompile_limit"):
            model.train(kit.CALLS["token-mean"], shard, 5)
