"""`combine`: the weighted sum of several rewards."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from hflow.base.errors import RecipeError
from hflow.dsl import caller_location, compute, use
from hflow.types import Metrics

if TYPE_CHECKING:
    from hflow.dsl.nodetype import Definition


def combine(**weights: float) -> Definition[..., tuple[float, Metrics]]:
    """Make the node `reward`, the weighted sum of fields: `combine(math=1.0, overlong=0.5)`.

    The weights are the knobs `math_weight` and `overlong_weight`. The mean of each field is a metric of the
    stream (`actor_gen/math`), and so is its weighted share of the reward (`actor_gen/reward.math`).

    Args:
        **weights: field -> its weight. The fields are those that other reward nodes return.

    Raises:
        RecipeError: if there are none, or a weight is no number.
    """
    if not weights:
        raise RecipeError(
            f"{caller_location()}: combine() has no rewards. Name fields, as in combine(math=1.0)"
        )
    for field, weight in weights.items():
        if isinstance(weight, bool) or not isinstance(weight, int | float):
            raise RecipeError(
                f"{caller_location()}: combine(): the weight of {field!r} is {weight!r}. Set it to a number"
            )
    fields = tuple(weights)

    def reward(**values: Any) -> tuple[float, Metrics]:
        shares = {field: values[f"{field}_weight"] * values[field] for field in fields}
        return sum(shares.values()), shares

    kinds = inspect.Parameter
    parameters = [
        *(kinds(field, kinds.POSITIONAL_OR_KEYWORD, annotation=float) for field in fields),
        *(
            kinds(f"{field}_weight", kinds.KEYWORD_ONLY, annotation=float, default=float(weight))
            for field, weight in weights.items()
        ),
    ]
    result = tuple[float, Metrics]
    reward.__annotations__ = {parameter.name: float for parameter in parameters} | {"return": result}
    setattr(reward, "__signature__", inspect.Signature(parameters, return_annotation=result))  # noqa: B010
    return use(compute(per="sample")(reward))
