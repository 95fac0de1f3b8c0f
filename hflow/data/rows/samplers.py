"""Ready-made samplers of rows: `data.NAME.sampler=difficulty_pools`.

A sampler chooses the next row of the trained dataset from the results of earlier groups. `order` is the order
without it: `order.num_rows`, and `order.row(position)` epoch after epoch.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any, Protocol

from hflow.base.errors import ConfigError, nearest
from hflow.base.registry import Registry
from hflow.types import State
from hflow.types.group_result import SAMPLER_PARAMETERS, GroupResult

Sampler = Callable[..., tuple[int, str]]


class Order(Protocol):
    """The rows of a dataset, epoch after epoch."""

    @property
    def num_rows(self) -> int:
        """Rows of the dataset."""
        ...

    def row(self, position: int) -> int:
        """Return the row at a position."""
        ...


def skip_settled(
    state: State,
    finished: Sequence[GroupResult],
    position: int,
    order: Order,
    *,
    rest: int = 3,
    spread: float = 0.0,
) -> tuple[int, str]:
    """Skip rows that are always right or always wrong, and try them again after some epochs.

    Args:
        state: where the order is read next, and until which epoch rows rest.
        finished: groups that have ended.
        position: rows drawn before.
        order: the dataset's rows.
        rest: epochs in which a row is skipped, after a group whose rewards were all equal.
        spread: rewards within this range are equal.
    """
    place, resting = state.setdefault("place", 0), state.setdefault("resting", {})
    for group in finished:
        if group.spread is not None and group.spread <= spread:
            resting[str(group.row)] = max(place - 1, 0) // order.num_rows + rest
        elif group.spread is not None:
            resting.pop(str(group.row), None)
    while True:  # a row rests until an epoch that comes
        row, epoch = order.row(place), place // order.num_rows
        until = resting.get(str(row), -1)
        place += 1
        if epoch > until:
            state["place"] = place
            again = f", again after {rest} epochs without it" if until >= 0 else ""
            return row, f"epoch {epoch + 1}{again}"


def difficulty_pools(
    state: State,
    finished: Sequence[GroupResult],
    position: int,
    order: Order,
    *,
    easy: float = 0.8,
    hard: float = 0.2,
    easy_share: float = 0.1,
    hard_share: float = 0.1,
) -> tuple[int, str]:
    """Draw easy and hard rows, by the mean reward of their last group, less often than all others.

    Rows without a result, and those between, are read in the dataset's order. An empty pool gives its share
    to them, and they theirs to a pool if none is left.

    Args:
        state: the last mean reward of each row, and the pools, in the order in which rows entered.
        finished: groups that have ended.
        position: rows drawn before; it seeds the choice of the pool.
        order: the dataset's rows.
        easy: mean reward from which a row is easy.
        hard: mean reward up to which a row is hard.
        easy_share: share of the draws that are of easy rows.
        hard_share: share of the draws that are of hard rows.
    """
    rates, place = state.setdefault("rates", {}), state.setdefault("place", 0)
    pools = {name: state.setdefault(name, {}) for name in ("easy", "hard")}

    def pool_of(key: str) -> str | None:
        rate = rates.get(key)
        return None if rate is None else "easy" if rate >= easy else "hard" if rate <= hard else None

    for group in finished:
        key = str(group.row)
        if group.mean is not None:
            rates[key] = group.mean
        for pool in pools.values():
            pool.pop(key, None)
        if (name := pool_of(key)) is not None:
            pools[name][key] = True

    def draw(name: str) -> tuple[int, str]:
        key = next(iter(pools[name]))
        del pools[name][key]
        return int(key), f"{name} pool, mean reward {rates[key]:.3g}"

    chance = Random(f"pools/{position}").random()
    wanted = "easy" if chance < easy_share else "hard" if chance < easy_share + hard_share else None
    if wanted is not None and pools[wanted]:
        return draw(wanted)
    for later in range(place, place + order.num_rows):
        row = order.row(later)
        if pool_of(str(row)) is None:
            state["place"] = later + 1
            rate = rates.get(str(row))
            return row, "no result yet" if rate is None else f"medium, mean reward {rate:.3g}"
    for name in ("hard", "easy"):
        if pools[name]:
            return draw(name)
    state["place"] = place + 1
    return order.row(place), "every row is in flight"


_BOUNDS: dict[Sampler, dict[str, tuple[float, float]]] = {
    skip_settled: {"rest": (1, math.inf), "spread": (0, math.inf)},
    difficulty_pools: {"easy_share": (0, 1), "hard_share": (0, 1)},
}
"""The smallest and the largest value of arguments, of those that have such."""
SAMPLERS = Registry(
    "sampler of rows",
    "hflow.samplers",
    {
        "skip_settled": "hflow.data.rows.samplers:skip_settled",
        "difficulty_pools": "hflow.data.rows.samplers:difficulty_pools",
    },
)
"""Name -> a function as those of `@sampler`."""


def find_sampler(name: str, arguments: Mapping[str, Any], known: Mapping[str, Sampler], key: str) -> Sampler:
    """Return a function of `SAMPLERS` or of the recipe with its keyword arguments.

    Raises:
        ConfigError: for an unknown name, and arguments that do not fit.
    """
    if name in known and name in SAMPLERS:
        raise ConfigError(f"hflow has a sampler {name!r} of its own; rename the function with @sampler")
    if name not in known and name not in SAMPLERS:
        own = f"the recipe's @sampler: {', '.join(known) or 'none'}"
        raise ConfigError(
            f"{key}.sampler: there is no sampler {name!r} (known: {', '.join(SAMPLERS)}; {own})"
            f"{nearest(name, [*SAMPLERS, *known])}"
        )
    function: Sampler = known[name] if name in known else SAMPLERS.load(name)
    try:
        bound = inspect.signature(function).bind(*SAMPLER_PARAMETERS, **arguments)
    except TypeError as error:
        raise ConfigError(f"{key}.sampler_arguments do not fit {name}: {error}") from error
    bound.apply_defaults()
    for argument, (smallest, largest) in _BOUNDS.get(function, {}).items():
        value = bound.arguments[argument]
        if not smallest <= value <= largest:
            raise ConfigError(
                f"{key}.sampler_arguments: {argument} of {name} is {value}; it must be {smallest} or more"
                + (f", and at most {largest}" if largest < math.inf else "")
            )
    return function
