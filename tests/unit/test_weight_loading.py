"""Loading of incoming weights: what an engine's rank holds afterwards is compared with what arrived."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import pytest
import torch
import torch_kit
from memory_kit import peak
from torch import Tensor

from hflow.base.errors import RunError
from hflow.engines.embedded.module import build_module, changing_tensors, load_in_place
from hflow.planner.weights.weight_slices import WeightSlice
from hflow.types.tensor_slices import Box, slices_within, whole_box
from hflow.weights.buckets import SliceValues
from hflow.weights.checksum import weights_checksum
from hflow.weights.incoming import IncomingWeights
from hflow.weights.loading import HeldBoxes, LoadedWeights, load_verified

LARGE = torch_kit.ARCHITECTURE | {"vocab_size": 4096, "hidden_size": 256}
SHAPES = {"w": (6, 4), "b": (6,), "scale": (), "none": (0, 3)}


def sent(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {name: torch.randn(shape).to(dtype) for name, shape in SHAPES.items()}


class Rank:
    """Holds boxes of tensors, as the tensor rank of an engine."""

    def __init__(self, boxes: dict[str, list[Box]], dtype: torch.dtype) -> None:
        self.views = {
            name: [
                (box, torch.zeros([stop - start for start, stop in box], dtype=dtype)) for box in boxes[name]
            ]
            for name in boxes
        }

    def held(self, name: str) -> HeldBoxes:
        return self.views.get(name, [])

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            for box, view in self.views.get(name, []):
                view.copy_(tensor[slices_within(box, whole_box(tuple(tensor.shape)))])


def incoming(weights: dict[str, Tensor], cuts: dict[str, list[Box]] | None = None) -> IncomingWeights:
    """What arrives: whole tensors, or boxes of them."""

    def local() -> Iterator[SliceValues]:
        for place, (name, x) in enumerate(weights.items()):
            shape = tuple(x.shape)
            for box in (cuts or {}).get(name, [whole_box(shape)]):
                yield SliceValues.of(
                    WeightSlice(name, shape, box, place), x[slices_within(box, whole_box(shape))]
                )

    return IncomingWeights(None, local=local)


WHOLE = {name: [whole_box(shape)] for name, shape in SHAPES.items()}
ROWS: dict[str, list[Box]] = {"w": [((0, 3), (0, 4))], "b": [((1, 2),), ((4, 6),)], "scale": [()]}


@pytest.mark.parametrize("boxes", [WHOLE, ROWS], ids=["whole", "rows"])
@pytest.mark.parametrize("held", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cuts", [{}, {"w": [((0, 2), (0, 4)), ((2, 6), (0, 3)), ((2, 6), (3, 4))]}])
def test_a_rank_that_holds_what_arrived_is_accepted(
    boxes: dict[str, list[Box]], held: torch.dtype, cuts: dict[str, list[Box]]
) -> None:
    weights, rank = sent(), Rank(boxes, held)
    loaded = load_verified(incoming(weights, cuts), rank.load, rank.held)
    checksum = weights_checksum(weights)
    assert loaded == LoadedWeights((0,), (checksum,), (checksum,))
    assert LoadedWeights.of_ranks([loaded, loaded]).checksums == (checksum, checksum)
    for name, views in rank.views.items():
        for box, view in views:
            assert torch.equal(view, weights[name][slices_within(box, whole_box(SHAPES[name]))].to(held))


@pytest.mark.parametrize("name", ["w", "b", "scale"])
def test_one_other_entry_in_the_engine_is_an_error_that_names_the_tensor(name: str) -> None:
    rank = Rank(ROWS, torch.bfloat16)

    def load(weights: Iterable[tuple[str, Tensor]]) -> None:
        rank.load(weights)
        rank.views[name][-1][1].view(torch.int16).view(-1)[-1] ^= 1

    with pytest.raises(RunError, match=rf"does not hold \[.*\] of '{name}' as received"):
        load_verified(incoming(sent(torch.bfloat16)), load, rank.held)


def test_a_tensor_that_is_not_loaded_is_an_error() -> None:
    rank = Rank(WHOLE, torch.float32)

    def load(weights: Iterable[tuple[str, Tensor]]) -> None:
        rank.load((name, x) for name, x in weights if name != "b")

    with pytest.raises(RunError, match=r"does not hold \[0:6\] of 'b' as received"):
        load_verified(incoming(sent()), load, rank.held)


@pytest.mark.parametrize(("cut", "message"), [((3, 6), "0 of the 12"), ((2, 6), "4 of the 12")])
def test_a_box_that_did_not_arrive_is_an_error(cut: tuple[int, int], message: str) -> None:
    rank = Rank(ROWS, torch.float32)
    arriving = incoming(sent(), {"w": [(cut, (0, 4))]})
    with pytest.raises(RunError, match=rf"incomplete weights: {message} entries of 'w' in \[0:3, 0:4\]"):
        load_verified(arriving, rank.load, rank.held)


def test_another_shape_is_left_to_the_loader() -> None:
    rank = Rank({"b": [((0, 8),)]}, torch.float32)

    def refuse(weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}")

    with pytest.raises(ValueError, match=r"b has shape \(6,\)"):
        load_verified(incoming({"b": sent()["b"]}), refuse, rank.held)
    ignore: Callable[[Iterable[object]], object] = list
    with pytest.raises(RunError, match="of 'b' as received"):
        load_verified(incoming({"b": sent()["b"]}), ignore, rank.held)


def test_slices_are_assembled_in_the_tensors_of_a_rank_that_holds_them_whole() -> None:
    rows = {"w": [((0, 512), (0, 256)), ((512, 1024), (0, 256))]}
    weights, rank = {"w": torch.randn(1024, 256)}, Rank({"w": [whole_box((1024, 256))]}, torch.float32)
    arrived, expected = incoming(weights, rows), weights_checksum(weights)
    places = []

    def load(tensors: Iterable[tuple[str, Tensor]]) -> None:
        places.extend(tensor.data_ptr() for _, tensor in tensors)

    assert load_verified(arrived, load, rank.held).checksums == (expected,)
    ((_, view),) = rank.views["w"]
    assert places == [view.data_ptr()]
    assert torch.equal(view, weights["w"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_engine_has_no_second_copy_of_a_tensor_while_it_loads(dtype: torch.dtype) -> None:
    settings = replace(torch_kit.SETTINGS, dtype="fp32" if dtype == torch.float32 else "bf16")
    module = build_module(replace(settings, architecture=LARGE), None)
    tensors, shape = changing_tensors(module), (4096, 256)
    weights = {name: torch.randn(x.shape).to(dtype) for name, x in module.named_parameters()}
    halves = {"model.embed_tokens.weight": [((0, 2048), (0, 256)), ((2048, 4096), (0, 256))]}
    assert weights["model.embed_tokens.weight"].shape == shape

    def held(name: str) -> HeldBoxes:
        return [(whole_box(tuple(tensors[name].shape)), tensors[name])]

    def load() -> None:
        load_verified(incoming(weights, halves), lambda pairs: load_in_place(module, pairs), held)

    load()  # what checksums allocate once
    whole = weights["model.embed_tokens.weight"].nbytes
    assert peak(load) < whole
    assert all(torch.equal(tensors[name], x) for name, x in weights.items())
