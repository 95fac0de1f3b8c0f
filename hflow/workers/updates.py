"""`update_weights`: an update body on every block of weights that this rank holds of two models."""

from __future__ import annotations

import torch
from torch import Tensor

from hflow.backends.base import ModelBackend
from hflow.errors import RunError
from hflow.types.boxes import Block
from hflow.workers.base import NodeProgram


@torch.no_grad()
def update_weights(program: NodeProgram, target: ModelBackend, source: ModelBackend) -> None:
    """Replace each of the target's weights by what the body makes of it and the source's.

    Both replicas hold the same shards on a rank, so nothing is sent, and the result does not depend on how
    many ranks there are.

    Raises:
        RunError: when the models differ, or the body does not return a weight; nothing is changed then
            but, in the second case, the weights before it.
    """
    blocks, others = list(target.blocks()), list(source.blocks())
    _check_alike(program, blocks, others)
    parameter = {kind: name for name, kind in program.provided}
    for block, other in zip(blocks, others, strict=True):
        weight = block.values
        tensors = {parameter["target"]: weight, parameter["source"]: other.values}
        weight.copy_(_checked(program, block.tensor, weight, program.body(**tensors, **program.knobs)))


def _check_alike(program: NodeProgram, blocks: list[Block], others: list[Block]) -> None:
    target, source = program.models
    shapes, found = ({block.tensor: block.shape for block in held} for held in (blocks, others))
    for name in [*shapes, *found]:
        if shapes.get(name) != found.get(name):
            raise RunError(
                f"node {program.name!r}: model {target!r} has {name} {_shape(shapes.get(name))}, but "
                f"{source!r} has it {_shape(found.get(name))}; an update needs two models of one architecture"
            )
    assert [(one.tensor, one.box) for one in blocks] == [(one.tensor, one.box) for one in others], (
        "replicas of one layout hold different blocks"
    )


def _shape(shape: tuple[int, ...] | None) -> str:
    return "not at all" if shape is None else f"of shape {list(shape)}"


def _checked(program: NodeProgram, name: str, weight: Tensor, result: object) -> Tensor:
    if isinstance(result, Tensor) and result.shape == weight.shape:
        return result
    got = list(result.shape) if isinstance(result, Tensor) else type(result).__name__
    raise RunError(
        f"node {program.name!r}: for {name} the body must return a tensor of shape {list(weight.shape)}, "
        f"not {got}"
    )
