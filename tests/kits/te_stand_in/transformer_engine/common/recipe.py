"""Recipes, with the format that megatron passes."""

from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

import torch


class Format(Enum):
    """The largest value, and the dtype, of inputs and weights, then of gradients."""

    E4M3 = (torch.float8_e4m3fn, torch.float8_e4m3fn)
    HYBRID = (torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass
class Recipe:
    """What the modules need: how many neighbours have a scale in common, and the multiples of sizes."""

    fp8_format: Format = Format.E4M3
    fp8_dpa: bool = False

    columns: ClassVar[int | None] = None
    """Values of a row with one scale; None: the whole tensor has one."""
    of_weights: ClassVar[int] = 1
    """Rows of a weight with one scale."""
    multiple: ClassVar[int] = 16
    """Rows of a product, and the sizes of its weight."""
    gathered_multiple: ClassVar[int] = 1
    """Rows of a rank that tensor ranks gather."""


class DelayedScaling(Recipe):
    """A name that megatron derives from."""


class Float8CurrentScaling(Recipe):
    """One scale for a tensor."""


class Float8BlockScaling(Recipe):
    """A scale for 128 values, and for 128 x 128 of a weight."""

    columns, of_weights, gathered_multiple = 128, 128, 128


class MXFP8BlockScaling(Recipe):
    """A scale, a power of 2, for 32 values."""

    columns, multiple, gathered_multiple = 32, 32, 32
