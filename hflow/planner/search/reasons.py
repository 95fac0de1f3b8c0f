"""Why a candidate is slower than the plan that was chosen, in a few words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from hflow.planner.hardware import GIB
from hflow.planner.ir import PUBLISH_PREFIX
from hflow.planner.placement.replicas import placement_name
from hflow.planner.search.evaluate import Choice, Evaluator

SMALL = 0.02
"""Share of a step below which a part is not named."""


def reason(evaluator: Evaluator, choice: Choice, best: Choice, seconds: Mapping[Choice, float]) -> str:
    """Return how the replicas are divided, how much slower that is, and what the step waits for."""
    waits = waiting(evaluator, choice)
    if choice is best:
        return f"{division(choice)}: shortest, {waits}"
    if not seconds[best]:
        return division(choice)
    slower = seconds[choice] / seconds[best] - 1
    return f"{division(choice)}: " + f"{slower:+.0%}".replace("%", " %") + f", {waits}"


def division(choice: Choice) -> str:
    """Return which replicas share devices."""
    blocks = [[placement_name(name) for name in block] for block in choice.partition.blocks]
    if len(blocks) == 1:
        return "all colocated"
    if all(len(block) == 1 for block in blocks):
        return "all apart"
    return " | ".join("+".join(block) for block in blocks)


def waiting(evaluator: Evaluator, choice: Choice) -> str:
    """Return what the slowest cycle of a choice consists of."""
    source = evaluator.table.events.stream.source
    parts = {name: choice.seconds.get(name, 0.0) for name in choice.cycle}
    large = {name: value for name, value in parts.items() if value > SMALL * choice.period}
    others = [name for name in large if name != source]
    longest = max(others, key=lambda name: large[name], default="")
    if source in large and longest:
        return f"generation waits for {_words(longest)}"
    if source in large:
        return "generation never waits"
    if len(others) == 1:
        return f"{_words(longest)} never waits"
    if not longest:
        return "idle"
    return f"{_words(longest)} takes {large[longest] / choice.period:.0%} of the step".replace("%", " %")


def layout_reasons(evaluator: Evaluator, choice: Choice) -> Iterator[tuple[str, str]]:
    """Yield each replica whose layout was chosen among several, with the reason for it."""
    problem, blocks = evaluator.problem, choice.partition.blocks
    for option in choice.options:
        if option.name in problem.layouts or not problem.traits(option.name).is_model_parallel:
            continue
        if option.replica.model not in problem.request.shapes:
            yield option.name, "data ranks alone, as its sizes are unknown"
            continue
        devices = evaluator.costed(option.name, blocks, choice.devices)
        table = evaluator.table.options(option.name, devices, with_too_large=True)
        simpler = [other for other in table if other.cuts < option.cuts]
        if not simpler:
            faster = any(other.cuts > option.cuts for other in table)
            yield option.name, "data ranks alone are fastest" if faster else "data ranks alone fit"
            continue
        other = min(simpler, key=lambda other: (-other.cuts, other.total))
        fit = evaluator.fullest(choice, other)
        if fit.total > problem.memory_limit:
            yield (
                option.name,
                f"with {other.layout} {fit.phase} would need {fit.total / GIB:.1f} GiB of "
                f"{problem.cluster.memory_bytes / GIB:.1f}",
            )
        else:
            yield (
                option.name,
                f"{1 - option.total / other.total:.0%} faster than {other.layout}".replace("%", " %"),
            )


def _words(name: str) -> str:
    """Return the name of a node, or what happens to an engine's weights."""
    if name.startswith(PUBLISH_PREFIX):
        return f"publishing the weights of {name.removeprefix(PUBLISH_PREFIX)}"
    return f"new weights of {name}" if "@" in name else name
