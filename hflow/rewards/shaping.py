"""Rewards of an answer's length and structure, and rewards made of others."""

from __future__ import annotations

import inspect
import json
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from hflow.dsl import caller_location, checked_by, compute, use
from hflow.errors import RecipeError
from hflow.rewards.fences import find_block
from hflow.types import Metrics

if TYPE_CHECKING:
    from hflow.dsl.nodetype import Definition


def _check_limits(knobs: Mapping[str, Any], reads: Collection[str]) -> str | None:
    limit, buffer = knobs["limit"], knobs["buffer"]
    if limit is None or buffer is None:
        return (
            "knobs limit and buffer must be set. Set limit= to max_tokens of the generate node, and buffer= "
            "to the tokens before it that are punished"
        )
    if not 0 < buffer <= limit:
        return f"knob buffer is {buffer}; it must be from 1 to limit={limit}"
    return None


@compute(per="sample")
@checked_by(_check_limits)
def overlong(num_tokens: int, *, limit: int | None = None, buffer: int | None = None) -> float:
    """Return 0 for a short completion, -1 for one longer than `limit`, and a line between them.

    With length |y|: 0 if |y| <= limit - buffer; (limit - buffer - |y|) / buffer if it is between that and
    `limit`; -1 beyond.

    Args:
        num_tokens: tokens of the completion, |y|.
        limit: length from which the punishment is whole, L_max of the paper. It must be set.
        buffer: tokens before the limit over which it grows, L_cache of the paper. It must be set.

    Source: Yu et al. 2025, "DAPO: an open-source LLM reinforcement learning system at scale", equation 13.
    """
    assert limit is not None, "checked when the recipe was read"
    assert buffer is not None, "checked when the recipe was read"
    return max(-1.0, min(0.0, (limit - buffer - num_tokens) / buffer))


@compute(per="group", min_group=2)
def brevity(num_tokens: list[int], right: list[float]) -> list[float]:
    """Return from 0.5 for the shortest completion of a group to -0.5 for the longest.

    With L = 0.5 - (|y| - min) / (max - min): L for a right completion, min(0, L) for a wrong one, so that
    wrong ones gain nothing by being short; 0 for all if they have the same length.

    Args:
        num_tokens: tokens of each completion, |y|.
        right: above 0 for a right completion. `reads={"right": "math"}` takes another reward.

    Source: Kimi Team 2025, "Kimi k1.5: scaling reinforcement learning with LLMs", section 2.3.3.
    """
    shortest, longest = min(num_tokens), max(num_tokens)
    if shortest == longest:
        return [0.0] * len(num_tokens)
    gains = [0.5 - (length - shortest) / (longest - shortest) for length in num_tokens]
    return [gain if score > 0 else min(0.0, gain) for gain, score in zip(gains, right, strict=True)]


LANGUAGES = ("json",)


def _check_schema(knobs: Mapping[str, Any], reads: Collection[str]) -> str | None:
    text = knobs["shared_schema"]
    if (text is None) != ("schema" in reads):
        return (
            "it needs one schema. Declare a column schema=Json (or set reads={'schema': FIELD}), or set "
            "shared_schema= to the JSON text of a schema for all rows"
        )
    if text is None:
        return None
    try:
        _validator(json.loads(text))
    except ValueError as error:
        return f"knob shared_schema is no JSON schema: {error}. Correct it"
    return None


@compute(per="sample", timeout=10.0)
@checked_by(_check_schema)
def json_schema(
    completion: str, schema: dict[str, Any] | None = None, *, shared_schema: str | None = None
) -> float:
    """Return 1 if the completion is JSON that a schema accepts, otherwise 0.

    Args:
        completion: what the model wrote. Its last block of JSON between fences counts (`find_block`), or all
            of it if it has no block.
        schema: the row's JSON schema.
        shared_schema: JSON text of a schema for all rows, in place of the column.
    """
    validator = _validator(json.loads(shared_schema) if shared_schema is not None else schema)
    try:
        value = json.loads(find_block(completion, LANGUAGES), parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return 0.0
    return float(validator.is_valid(value))


def _refuse_constant(name: str) -> None:
    """Refuse what Python reads as a number, but JSON does not have."""
    raise ValueError(f"{name} is not JSON")


def _validator(schema: Any) -> Any:
    """Return the validator of a schema, of the draft that its `$schema` names.

    Raises:
        ValueError: if it is no schema.
    """
    from jsonschema.exceptions import SchemaError
    from jsonschema.validators import Draft202012Validator, validator_for

    kind: Any = validator_for(schema, default=Draft202012Validator)
    try:
        kind.check_schema(schema)
    except SchemaError as error:
        raise ValueError(error.message) from error
    return kind(schema)


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
