"""What ranks with the stand-in for Transformer Engine compute. Imports no megatron.

The stand-in (`te_stand_in`) computes on CPUs what megatron's wrappers of Transformer Engine expect of it. It
tests hflow's and megatron's code around it, and none of its kernels.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import megatron_kit as kit
import megatron_twins as twins
import shard_cases
import torch_kit

from hflow.shapes.architectures import read_shape
from hflow.shapes.model_shape import torch_only

STAND_IN = Path(__file__).parent / "te_stand_in"
"""To be in `sys.path` before megatron is imported."""
TE: dict[str, Any] = {"kernels": "transformer_engine"}


def with_te(case: kit.Case) -> kit.Case:
    """Return a case with other kernels, if they compute all of its layers."""
    if torch_only(read_shape(case.architecture)):
        return case
    return dataclasses.replace(case, settings=case.settings | TE)


def twin(node: str, **options: Any) -> twins.Twin:
    return twins.Twin(node, **options | {"settings": options.get("settings", {}) | TE})


ROUNDS: list[dict[tuple[int, ...], twins.Twin]] = [
    {
        twins.FIRST: twin("ppo", tensor=2, settings=twins.SP),
        twins.SECOND: twin("ppo", pipe=2, settings=twins.RECOMPUTED, budget=20),
    },
    {
        twins.FIRST: twin("ppo", data=2, settings={"offload": "all"}, budget=20),
        twins.SECOND: twin("sft", tensor=2, settings=twins.NO_SP, budget=1000),
    },
    {
        twins.FIRST: twin("experts", data=2, expert=2, settings={"offload": "all"}, budget=20),
        twins.SECOND: twin("experts", tensor=2),
    },
    {
        twins.FIRST: twin("ppo", context=2, budget=20),
        twins.SECOND: twin("experts", data=2, expert=2, budget=1),
    },
    {twins.ALL: twin("ppo", tensor=4, settings=twins.SP)},
    {twins.ALL: twin("replayed experts", data=2, tensor=2, expert=2)},
    {twins.ALL: twin("critic", data=2, tensor=2, settings=twins.SP)},
]
"""What trains, one round after the other. Every second round adds gradients of weights in the products."""
TWINS = {one.name: one for turn in ROUNDS for one in turn.values()}

FP8_MODELS: dict[str, dict[str, Any]] = {
    "fp8": {
        **torch_kit.ARCHITECTURE,
        "hidden_size": 128,
        "intermediate_size": 256,
        "head_dim": 32,
        "tie_word_embeddings": False,
    },
    "mixed fp8": {
        **torch_kit.MIXED,
        "hidden_size": 128,
        "intermediate_size": 256,
        "moe_intermediate_size": 64,
        "head_dim": 32,
        "tie_word_embeddings": False,
        "initializer_range": 0.02,
    },
}
"""Node -> its model, which two tensor ranks divide into multiples of 32."""
twins.NODES.update(dict.fromkeys(FP8_MODELS, twins.NODES["sft"]))


def fp8(recipe: str, node: str = "fp8", **options: Any) -> twins.Twin:
    return twin(node, **options | {"settings": options.get("settings", {}) | {"fp8": recipe}})


FP8_ROUNDS: list[dict[tuple[int, ...], twins.Twin]] = [
    {
        twins.FIRST: fp8("blockwise", tensor=2, settings=twins.SP, budget=20),
        twins.SECOND: fp8("mxfp8", pipe=2, settings=twins.RECOMPUTED, budget=20),
    },
    {
        twins.FIRST: fp8("tensorwise", context=2, budget=20),
        twins.SECOND: fp8("tensorwise", tensor=2, settings=twins.NO_SP),
    },
    {
        twins.FIRST: fp8("tensorwise", "mixed fp8", data=2, expert=2, budget=1),
        twins.SECOND: fp8("mxfp8", "mixed fp8", tensor=2, budget=20),
    },
    {twins.ALL: fp8("mxfp8", tensor=2, pipe=2, settings=twins.SP, budget=20)},
]
FP8_TWINS = {one.name: one for turn in FP8_ROUNDS for one in turn.values()}


def side(backend: str, ranks: tuple[int, ...], **options: Any) -> shard_cases.Side:
    return shard_cases.Side(backend, twins.Twin(**options), ranks)


SIDES = {
    "torch": side("torch", twins.FIRST, node="experts", data=2),
    "kernels of torch": side("megatron", twins.SECOND, node="experts", tensor=2),
    "te d2e2": side("megatron", twins.FIRST, node="experts", data=2, expert=2, settings=TE),
    "te d2t2": side("megatron", twins.ALL, node="experts", data=2, tensor=2, settings=TE),
}
PAIRS = [
    ("torch", "te d2e2"),
    ("te d2e2", "kernels of torch"),
    ("kernels of torch", "te d2t2"),
    ("te d2t2", "torch"),
]
"""Who writes a sharded checkpoint, and who reads it."""


def run(rank: int, directory: str) -> None:
    """Run a fresh rank, which imports megatron with the stand-in."""
    sys.path.insert(0, str(STAND_IN))
    import te_ranks

    te_ranks.run(rank, Path(directory))
