"""Durations and the table of `hflow size` as text."""

import pytest
from rich.console import Console

from hflow.base.text import format_seconds
from hflow.launch.planning.size import SizedCluster, Sizes, Target
from hflow.launch.planning.what_if import Changed, WhatIf, what_if
from hflow.planner.diff import Effect, PlanDiff
from hflow.planner.diff.compare import Change
from hflow.planner.forecast.figures import PlanFigures
from hflow.report.text.figures import (
    SIZE_HEADINGS,
    broken,
    dollars_text,
    render_what_if,
    size_cells,
    size_lines,
)


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0, "0 s"),
        (12e-6, "12 µs"),
        (0.83, "830 ms"),
        (590, "590 s"),
        (600, "10 min"),
        (1380, "23 min"),
        (7199, "120 min"),
        (7200, "2 h"),
        (18720, "5.2 h"),
        (172_799, "48 h"),
        (172_800, "2 days"),
        (267_840, "3.1 days"),
        (1e8, "1157 days"),
    ],
)
def test_durations_have_the_unit_that_a_person_reads(seconds: float, expected: str) -> None:
    assert format_seconds(seconds) == expected


@pytest.mark.parametrize(("days", "expected"), [(23 / 1440, "23 min"), (36 / 1440, "36 min"), (None, "-")])
def test_runs_of_minutes_differ_in_the_table_of_sizes(days: float | None, expected: str) -> None:
    figures = PlanFigures("cpu-1x2", 2, 5.0, 100.0, days, 2**30, 2**33, None, None, None)
    cells = size_cells(SizedCluster("cpu-1x2", 2, figures, True))
    assert dict(zip(SIZE_HEADINGS, cells, strict=True))["whole run"] == expected


def test_figures_that_follow_from_a_lower_bound_are_marked() -> None:
    figures = PlanFigures("h100-1x8", 8, 5.0, 100.0, 1.5, 2**30, 2**33, 10.0, 0.1, 360.0, is_lower_bound=True)
    row = SizedCluster("h100-1x8", 8, figures, True, "actor@train=0-7:d8")
    cells = dict(zip(SIZE_HEADINGS, size_cells(row), strict=True))
    marked = {name: cell[:2] for name, cell in cells.items() if cell[0] in "\u2264\u2265"}
    assert marked == {
        "a step": "\u2265 ",
        "samples/s": "\u2264 ",
        "whole run": "\u2265 ",
        "$ of the run": "\u2265 ",
    }
    found = Sizes(Target(seconds=10.0), False, (row,), row, None, None)
    assert next(iter(size_lines(found))) == "h100-1x8 is the smallest of these that may reach 10 s a step:"


def test_what_follows_from_a_change_is_named_in_words() -> None:
    figures = PlanFigures("h100-1x8", 8, 30.0, 100.0, 1.0, 2**30, 2**33, 10.0, 0.001, 20.0)
    ahead = PlanFigures("h100-1x8", 8, 15.0, 200.0, 0.5, 2**30, 2**33, 10.0, 0.001, 20.0, is_lower_bound=True)
    diff = PlanDiff(
        "a",
        "b",
        (
            Change("setting", "seed", "1", "2", Effect.REFUSE),
            Change("setting", "models.actor.tokens_per_microbatch", "32768", "8192", Effect.SAME),
            Change("group", "all", "0-7", "0-3", Effect.SAME),
            Change("replica", "actor@train", "d8", "d4", Effect.RESHARD),
            Change("replica", "actor@train devices", "0-7", "0-3", Effect.SAME),
            Change("replica", "actor@train backend", "torch", "megatron", Effect.RESHARD),
            Change("engine", "actor@gen", "embedded", "vllm", Effect.SAME),
        ),
    )
    decided = ("models.actor.tokens_per_microbatch",)
    changed = Changed("cluster=h100-1x4 seed=2", figures, 1.0, diff, decided)
    console = Console(width=200)
    with console.capture() as capture:
        console.print(render_what_if(WhatIf(figures, (changed, Changed("a=1", ahead, 2.0, None)))))
    text = " ".join(capture.get().split())
    for line in (
        "devices of group all: 0-7 -> 0-3",
        "layout of actor@train: d8 -> d4",
        "and 2 more, which --json lists",
        "\u2265 15 s",
        "\u2264 2.00",
        "< 0.01",
        "waiting for late responses is left out",
    ):
        assert line in text
    assert "devices of actor@train" not in text, "the group says it"
    assert "seed: 1" not in text, "the change says it"
    with console.capture() as capture:
        console.print(render_what_if(WhatIf(figures, (changed,))))
    assert "late responses" not in capture.get()


def test_unknown_figures_have_a_reason():
    keys = ["models.actor.path=nowhere", "models.actor.architecture=null"]
    found = what_if("recipes/grpo.py", keys, ["seed=2", "model@models.actor=tiny-qwen2"])
    console = Console(width=200)
    with console.capture() as capture:
        console.print(render_what_if(found))
    lines = capture.get().splitlines()
    assert [line for line in lines if line.startswith("- ")] == [
        "- actor: there is no checkpoint in nowhere (models.actor.path), so its memory, weight routes and "
        "seconds, and the period of the plan, are not estimated"
    ]
    assert "1.00" not in capture.get(), "nothing is compared"


def test_a_long_change_is_not_broken_within_a_number() -> None:
    assert broken("batch=256") == "batch=256"
    long = "models.actor.tokens_per_microbatch=65536"
    assert broken(long) == "models.actor.tokens_per_\nmicrobatch=65536"
    weight = "nodes.actor_train.overlong_weight=0.25"
    assert broken(weight) == "nodes.actor_train.overlong_\nweight=0.25"
    assert broken("batch=256 schedule.max_staleness=1") == "batch=256 \nschedule.max_staleness=1"


def test_small_amounts_and_short_targets() -> None:
    amounts = [dollars_text(amount) for amount in (0.0, 0.004, 0.006, 1.5, 1234.0)]
    assert amounts == ["0.00", "< 0.01", "0.01", "1.50", "1,234"]
    assert [str(Target(days=days)) for days in (0.05, 1.0, 3.0)] == ["0.05 days (72 min)", "1 day", "3 days"]
