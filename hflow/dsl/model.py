"""`Model`: a set of weights, by name."""

from __future__ import annotations

from typing import Literal, get_args

from hflow.dsl.source_location import caller_location
from hflow.errors import RecipeError, nearest
from hflow.graph.ir import ModelSpec

Head = Literal["lm", "value", "score"]


class Model:
    """Weights that nodes read and write. Where they come from and run is the configuration's.

    Args:
        name: its key under `models` in the configuration.
        trainable: whether train and update nodes may write it.
        head: `lm` gives log-probs, `value` a value per token, `score` a scalar per sequence.
        init_from: a model whose initial weights it starts from.

    Raises:
        RecipeError: when the name is no identifier or the head is unknown.
    """

    def __init__(
        self, name: str, *, trainable: bool = False, head: Head = "lm", init_from: Model | None = None
    ) -> None:
        self.where = caller_location()
        if not isinstance(name, str) or not name.isidentifier():
            raise RecipeError(f"{self.where}: a model's name is an identifier such as 'actor', not {name!r}")
        if head not in get_args(Head):
            hint = nearest(str(head), get_args(Head)) or "; choose 'lm', 'value' or 'score'"
            raise RecipeError(f"{self.where}: Model({name!r}): there is no head {head!r}{hint}")
        if init_from is not None and not isinstance(init_from, Model):
            raise RecipeError(
                f"{self.where}: Model({name!r}): init_from takes a Model; a checkpoint's path is "
                f"models.{name}.path in the configuration"
            )
        self.name = name
        self.trainable = trainable
        self.head = head
        self.init_from = init_from

    def __repr__(self) -> str:
        return f"Model({self.name!r})"

    def spec(self) -> ModelSpec:
        """The model as a value."""
        origin = self.init_from.name if self.init_from else None
        return ModelSpec(self.name, self.head, self.trainable, origin, self.where)
