"""What a long tail of responses costs a step, and what saves it: order, lead, or shared devices (simulated).

    python -m benchmarks.planner.tail_of_rollouts

GRPO with a model of 7B on eight H100, on the virtual clock of `hflow simulate`; the lengths are the same in
each row. Rows of `longest first` admit the samples of a batch in the order of their lengths: of the real
ones, or of those that a prediction gives whose logarithms have a correlation of 0.5 with the real ones.
Others let generation run ahead (`schedule.max_staleness`), so that the tail of a batch is generated while
the next one begins, across a weight sync. `apart` gives trainer and engines four devices each, where
devices of the trainer idle while it waits; else the engines have them meanwhile.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random

from hflow.launch.planning.compile import compile_recipe
from hflow.planner.plan.forecast import Pace
from hflow.planner.plan.rows import Plan
from hflow.runtime.simulation.simulate import DurationFunction, response_seconds, simulate_run
from hflow.runtime.simulation.simulate_plan import trained_part

RECIPE = Path(__file__).parents[2] / "recipes" / "grpo.py"
NUM_STEPS = 12
CORRELATION = 0.5
SETTINGS = (
    "cluster=h100-1x8",
    "model@models.actor=qwen2.5-7b",
    "models.actor.path=null",
    "models.actor.gen.engine=vllm",
    "models.actor.gen.max_model_len=20480",
    "nodes.actor_gen.max_tokens=16384",
    "workload.prompt=512",
    "workload.response_mean=3000",
    "workload.response_cv=1.0",
    "schedule.max_concurrent=null",
)
TOGETHER, APART = "placement='actor,actor.gen=all'", "placement='actor=0-3 actor.gen=4-7'"
CASES = (
    ("64 prompts", ("batch=64",)),
    ("256 prompts", ("batch=256",)),
    ("256 prompts, 32 sequences an engine", ("batch=256", "models.actor.gen.max_running=32")),
)
Order = Callable[[list[int], Callable[[int], float]], list[int]]


def as_drawn(samples: list[int], seconds: Callable[[int], float]) -> list[int]:
    """The order of the dataset."""
    return samples


def longest_first(samples: list[int], seconds: Callable[[int], float]) -> list[int]:
    """The order of real lengths."""
    return sorted(samples, key=seconds, reverse=True)


def predicted_first(samples: list[int], seconds: Callable[[int], float]) -> list[int]:
    """The order of predicted lengths."""
    logs = {sample: math.log(seconds(sample)) for sample in samples}
    mean = sum(logs.values()) / len(logs)
    spread = math.sqrt(sum((value - mean) ** 2 for value in logs.values()) / len(logs))
    noise = math.sqrt(1 / CORRELATION**2 - 1) * spread
    return sorted(samples, key=lambda s: logs[s] + noise * Random(f"noise/{s}").gauss(0, 1), reverse=True)


def ordered(seconds: DurationFunction, per_step: int, order: Order) -> DurationFunction:
    """Durations of samples that are admitted in another order within each step."""
    places: dict[int, int] = {}

    def of(sample: int) -> float:
        first = sample // per_step * per_step
        if first not in places:
            samples = list(range(first, first + per_step))
            places.update(zip(samples, order(samples, seconds), strict=True))
        return seconds(places[sample])

    return of


def step_seconds(plan: Plan, order: Order) -> float:
    """The simulated seconds of a step."""
    schedule = replace(trained_part(plan.schedule), num_steps=NUM_STEPS)
    stream, pace = schedule.streams[0], plan.forecast.pace
    assert isinstance(pace, Pace)
    workload = dict(plan.forecast.workload)[stream.name]
    drawn = response_seconds(workload, pace.seconds_per_token, 0, pace.seconds_per_sample)
    durations = {row.node: row.seconds for row in plan.forecast.times if row.node != stream.source}
    source = ordered(drawn, (stream.batch or 1) * stream.group_size, order)
    run = simulate_run(
        schedule,
        {**durations, stream.source: source},
        slots={stream.name: pace.slots},
        speeds={stream.name: pace.speed},
    )
    return run.timeline.period()


def planned(case: tuple[str, ...], eta: float, placement: str) -> Plan:
    """The plan of a case."""
    return compile_recipe(RECIPE, (*SETTINGS, *case, placement, f"schedule.max_staleness={eta}")).plan


def main() -> None:
    """Print the seconds of a step by policy."""
    for name, case in CASES:
        plan = planned(case, 0, TOGETHER)
        base = step_seconds(plan, as_drawn)
        training = sum(row.seconds for row in plan.forecast.times if row.node == "actor_train")
        assert plan.forecast.pace is not None
        print(f"{name}: {plan.forecast.pace.slots} slots, {training:.0f} s of training")
        rows = {
            "as drawn": base,
            "longest first, lengths known": step_seconds(plan, longest_first),
            "longest first, lengths predicted": step_seconds(plan, predicted_first),
        }
        for eta in (0.25, 0.5, 1, 2):
            rows[f"max_staleness={eta}"] = step_seconds(planned(case, eta, TOGETHER), as_drawn)
        rows["apart, max_staleness=2"] = step_seconds(planned(case, 2, APART), as_drawn)
        for row, seconds in rows.items():
            gain, rollouts = base / seconds, (base - training) / (seconds - training)
            of_rollouts = "" if row.startswith("apart") else f"   generation {rollouts:5.2f} x"
            print(f"  {row:34} {seconds:6.1f} s a step  {gain:5.2f} x{of_rollouts}")


if __name__ == "__main__":
    main()
