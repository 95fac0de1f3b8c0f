"""The context in which modules multiply in FP8, with the arguments of `quantization.py`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from transformer_engine.common.recipe import Recipe


class FP8GlobalStateManager:
    """The recipe of the innermost context."""

    recipes: ClassVar[list[Recipe | None]] = [None]

    @classmethod
    def is_fp8_enabled(cls) -> bool:
        return cls.recipes[-1] is not None

    @classmethod
    def get_fp8_recipe(cls) -> Recipe:
        return cls.recipes[-1]


@contextmanager
def fp8_autocast(
    enabled: bool = True,
    calibrating: bool = False,
    fp8_recipe: Recipe | None = None,
    fp8_group: Any = None,
    _graph: bool = False,
) -> Iterator[None]:
    assert not calibrating
    assert not _graph
    assert fp8_group is None, "no recipe here sums over ranks, but for the modules themselves"
    assert not enabled or fp8_recipe is not None
    FP8GlobalStateManager.recipes.append(fp8_recipe if enabled else None)
    try:
        yield
    finally:
        FP8GlobalStateManager.recipes.pop()


def is_fp8_available(return_reason: bool = False) -> Any:
    return (True, "") if return_reason else True


def is_fp8_block_scaling_available(return_reason: bool = False) -> Any:
    return (True, "") if return_reason else True


def is_mxfp8_available(return_reason: bool = False) -> Any:
    return (True, "") if return_reason else True
