"""Megatron's outputs, gradients and weights equal those of transformers, in every layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import megatron_kit as kit
import pytest
import ranks
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from hflow.models.expert_tensors import stacked_views
from hflow.shapes.layout import Layout, RankOrder
from hflow.shapes.model_shape import is_in_fp32


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ranks")
    for case in kit.CASES.values():
        kit.write_checkpoint(case, path)
    ranks.start(kit.run, (str(path),), 4)
    return path


def load(directory: Path, name: str, rank: int) -> dict[str, Any]:
    return torch.load(directory / f"{name}.{rank}.pt")


@pytest.mark.parametrize("name", kit.CASES)
def test_outputs(directory, name):
    case, wanted = kit.CASES[name], kit.expected(name)
    outputs = torch.load(directory / f"{name}.outputs.pt")
    for got, output in zip(outputs, wanted.outputs, strict=True):
        if case.head == "lm":
            assert (got[:, kit.VOCAB :] < -1e29).all()
            got = got[:, : kit.VOCAB]
        torch.testing.assert_close(got, output, atol=1e-5 if case.dtype == torch.float32 else 0.05, rtol=0)


@pytest.mark.parametrize("name", kit.CASES)
def test_gradients(directory, name):
    """On every rank, to a part of each tensor's largest entry."""
    case, wanted = kit.CASES[name], kit.expected(name)
    part = 1e-5 if case.dtype == torch.float32 else 0.1
    for rank in range(case.layout[1] * case.layout[2]):
        gradients = load(directory, name, rank)["gradients"]
        assert gradients.keys() == wanted.gradients.keys()
        for tensor, gradient in wanted.gradients.items():
            atol = part * gradient.abs().max()
            torch.testing.assert_close(gradients[tensor], gradient, atol=atol, rtol=0)


@pytest.mark.parametrize("name", kit.CASES)
def test_exported_weights_equal_the_loaded_ones(directory, name):
    case, wanted = kit.CASES[name], kit.expected(name)
    for rank in range(case.layout[1] * case.layout[2]):
        pairs = load(directory, name, rank)["weights"]
        weights = dict(pairs)
        assert len(weights) == len(pairs)
        assert weights.keys() == wanted.weights.keys()
        for tensor, x in weights.items():
            assert x.dtype == (torch.float32 if is_in_fp32(tensor) else case.dtype)
            assert torch.equal(x, wanted.weights[tensor].to(x.dtype))


@pytest.mark.parametrize("name", kit.CASES)
def test_ranks_hold_blocks_of_the_weights(directory, name):
    """No two blocks of a rank overlap, and the blocks of all ranks together cover the model."""
    case, wanted = kit.CASES[name], kit.expected(name)
    missing = {tensor: torch.ones(x.shape, dtype=torch.bool) for tensor, x in wanted.weights.items()}
    for rank in range(case.layout[1] * case.layout[2]):
        mine = {tensor: torch.zeros(x.shape, dtype=torch.int) for tensor, x in wanted.weights.items()}
        for tensor, box, values in load(directory, name, rank)["blocks"]:
            at = tuple(slice(*edges) for edges in box)
            assert torch.equal(values, wanted.weights[tensor][at].to(values.dtype))
            mine[tensor][at] += 1
            missing[tensor][at] = False
        assert max(int(count.max()) for count in mine.values()) == 1
    assert not any(left.any() for left in missing.values())


@pytest.mark.parametrize("name", kit.CASES)
def test_megatron_counts_every_weight_once_in_norms(directory, name):
    """Copies are marked: of tied matrices, of key-value heads, and of what tensor ranks have whole."""
    case, wanted = kit.CASES[name], kit.expected(name)
    norm = torch.cat([gradient.flatten().double() for gradient in wanted.gradients.values()]).norm().float()
    part = 1e-5 if case.dtype == torch.float32 else 0.02
    for rank in range(case.layout[1] * case.layout[2]):
        torch.testing.assert_close(load(directory, name, rank)["norm"], norm, rtol=part, atol=0)


@pytest.mark.parametrize("name", kit.CASES)
def test_saved_models_load_in_transformers(directory, name):
    """In files of 20 kB at most; the embedding alone has 300 x 32 x 4 = 38,400 bytes."""
    case, path = kit.CASES[name], directory / "saved" / name
    wanted = kit.expected(name).weights
    kind = AutoModelForSequenceClassification if case.head == "score" else AutoModelForCausalLM
    loaded, report = kind.from_pretrained(path, dtype=torch.float32, output_loading_info=True)
    spare = {"lm_head.weight"} if case.head == "value" else set()
    assert set(report["missing_keys"]) <= spare
    assert not report["unexpected_keys"]
    assert not report["mismatched_keys"]
    stored = stacked_views(case.architecture["model_type"], loaded.state_dict().items())
    found = dict(stored) | saved_head(case, path)
    assert all(torch.equal(found[tensor], x.float()) for tensor, x in wanted.items())
    files = sorted(path.glob("model-*.safetensors"))
    index = json.loads((path / "model.safetensors.index.json").read_text())
    assert sorted(set(index["weight_map"].values())) == [file.name for file in files]
    assert len(files) > 1
    assert loaded.config.architectures == [type(loaded).__name__]


D, T, P, C = range(4)
AXES_OF_GROUPS = {
    "tp": {T},
    "dp": {D},
    "pp": {P},
    "cp": {C},
    "mp": {T, P},
    "dp_cp": {D, C},
    "tp_cp": {T, C},
    "tp_dp_cp": {T, D, C},
    "same_data": {T, P, C},
    "intra_dist_opt": {D, T, P, C},
}
"""The axes in which the ranks of a group differ."""


@pytest.mark.parametrize("rank", kit.ALL)
def test_coordinates_and_groups_are_the_plans(directory, rank):
    """A group has the ranks whose coordinates in other axes are equal."""
    order = RankOrder.TRAIN
    for sizes, found in zip(kit.GRIDS, torch.load(directory / f"{rank}.pt"), strict=True):
        layout = Layout(*sizes)
        mine = layout.coords(order, rank)
        assert found["at"] == mine
        for name, free in AXES_OF_GROUPS.items():
            kept = [axis for axis in range(4) if axis not in free]
            assert found[name] == [
                other
                for other in kit.ALL
                if all(layout.coords(order, other)[axis] == mine[axis] for axis in kept)
            ], name
        ends = sorted({found["pp"][0], found["pp"][-1]})
        assert found["embd"] == (ends if rank in ends else None)


def test_all_ranks_make_the_same_number_of_groups(directory):
    """Stages between the ends of a pipeline make an unused group instead, as new groups depend on the
    number."""
    grids = zip(*(torch.load(directory / f"{rank}.pt") for rank in kit.ALL), strict=True)
    assert [len({found["num_groups"] for found in ranks}) for ranks in grids] == [1] * len(kit.GRIDS)


def saved_head(case: kit.Case, path: Path) -> dict[str, torch.Tensor]:
    """The value head that was saved beside its backbone."""
    if case.head != "value":
        return {}
    return {f"value_head.{n}": x for n, x in load_file(path / "value_head.safetensors").items()}


@pytest.mark.parametrize(
    ("saved", "name"),
    [("actor", "qwen2 t2"), ("critic", "value t2"), ("actor again", "qwen2 t2")],
)
def test_two_layouts_in_one_process(directory, saved, name):
    """The actor has layout t2 and the critic p2, on the same two ranks."""
    outputs = torch.load(directory / f"{saved}.pt")
    for got, output in zip(outputs, kit.expected(name).outputs, strict=True):
        got = got[:, : kit.VOCAB] if name == "qwen2 t2" else got
        torch.testing.assert_close(got, output, atol=1e-5, rtol=0)


def test_packed_sequences_are_independent(directory):
    """Other tokens in the second sequence of each micro-batch change its outputs only."""
    before, after = (torch.load(directory / f"{name}.pt") for name in ("actor", "other tokens"))
    for pack, one, other in zip(kit.packs(), before, after, strict=True):
        for i, (x, y) in enumerate(zip(one.split(pack.lengths), other.split(pack.lengths), strict=True)):
            assert torch.equal(x, y) is (i != 1)
