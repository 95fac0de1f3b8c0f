"""`Model`: one set of weights, as a recipe declares it."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from typing import Literal, get_args

from hflow.base.errors import RecipeError, nearest
from hflow.base.validation import is_name
from hflow.graph.errors import SourceLocation, caller_location
from hflow.shapes.model_shape import LEFT_OUT_BY_DEFAULT

Head = Literal["lm", "value", "score"]
"""The output layer of a model."""


@dataclass(frozen=True, repr=False)
class Model:
    """Weights that nodes read and write: `actor = Model("actor", trainable=True)`.

    The configuration says where the weights come from and on which devices they are.

    Args:
        name: the model's key under `models` in the configuration.
        head: `lm` returns log-probs, `value` one value per token, `score` one number per sequence.
        trainable: whether `train` and `update` nodes may write the model. Default: frozen.
        vision: whether it sees images: a vision-language model. Its samples have images, if their prompts or
            tools have.
        init_from: the model whose initial weights this one starts from. A checkpoint's path is
            `models.NAME.path` in the configuration.

    Raises:
        RecipeError: if the name is not an identifier, the head is unknown or `init_from` is not a `Model`.
    """

    name: str
    _: KW_ONLY
    head: Head = "lm"
    trainable: bool = False
    vision: bool = field(default=False, metadata=LEFT_OUT_BY_DEFAULT)
    init_from: Model | None = None
    where: SourceLocation = field(default_factory=caller_location)
    """The line that declares the model."""

    def __post_init__(self) -> None:
        if not is_name(self.name):
            raise RecipeError(
                f"{self.where}: Model({self.name!r}): the name must be an identifier of ASCII letters, such "
                "as 'actor'"
            )
        if self.head not in get_args(Head):
            hint = nearest(str(self.head), get_args(Head)) or "; choose 'lm', 'value' or 'score'"
            raise RecipeError(f"{self.where}: Model({self.name!r}): there is no head {self.head!r}{hint}")
        if self.init_from is not None and not isinstance(self.init_from, Model):
            raise RecipeError(
                f"{self.where}: Model({self.name!r}): init_from must be a Model; set a checkpoint's path "
                f"with models.{self.name}.path in the configuration"
            )

    def __repr__(self) -> str:
        return f"Model({self.name!r})"
