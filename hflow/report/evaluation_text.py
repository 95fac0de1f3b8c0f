"""The output of `hflow eval`: one row for each number that a node gave the samples of a stream."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Column
from rich.text import Text

from hflow.report.formatting import plural
from hflow.report.plan_text.section import add_row, dim, number, table

if TYPE_CHECKING:
    from hflow.launch.evaluate_checkpoint import EvaluationReport


def render_evaluation(report: EvaluationReport) -> RenderableType:
    """Render what was evaluated, the scores, and the file that has them."""
    steps = "" if report.steps is None else f" after {plural(report.steps, 'step')}"
    heads = [
        Text(f"{name}: {path}{steps}", "bold", no_wrap=True, overflow="ignore")
        for name, path in report.models.items()
    ]
    has_refused = any(stream.num_refused for stream in report.streams)
    ks = sorted({k for stream in report.streams for field in stream.fields for k in field.pass_at})
    shown = table(
        Column("stream", no_wrap=True),
        number("prompts"),
        number("samples"),
        *([number("refused")] if has_refused else []),
        Column("score", no_wrap=True),
        number("mean"),
        *(number(f"pass@{k}") for k in ks),
    )
    for stream in report.streams:
        counts = [f"{stream.num_prompts:,}", f"{stream.num_samples:,}"]
        counts += [f"{stream.num_refused:,}"] if has_refused else []
        for field in stream.fields:
            error = "" if field.error is None else f" ± {field.error:.2g}"
            passed = (f"{field.pass_at[k]:.4g}" if k in field.pass_at else "" for k in ks)
            mean = f"{field.mean:.4g}{error}"
            add_row(shown, stream.stream, *counts, field.field, mean, *passed)
        if not stream.fields:
            add_row(shown, stream.stream, *counts, "none", "", *[""] * len(ks))
    note = (
        f"±: standard error over prompts; correct: a score of {report.threshold:g} or more"
        if ks
        else ("±: standard error over prompts")
    )
    return Group(
        *heads,
        Text(),
        shown,
        dim(note),
        *map(dim, _partial(report)),
        Text(f"results: {report.file}", no_wrap=True, overflow="ignore"),
    )


def _partial(report: EvaluationReport) -> Iterator[str]:
    """Yield a line for each score whose pass@k leaves out prompts, and for each stream without scores."""
    for stream in report.streams:
        if not stream.fields:
            reason = "all of its samples were refused" if stream.num_refused else "no node scored a sample"
            yield f"{stream.stream}: {reason}"
        for field in stream.fields:
            if not field.pass_at and stream.group_size > 1:
                yield f"{stream.stream}/{field.field}: no pass@k, as no prompt has as many scored samples"
            if field.pass_at and field.pass_at_prompts < field.num_prompts:
                yield (
                    f"{stream.stream}/{field.field}: pass@k over the {field.pass_at_prompts:,} of "
                    f"{field.num_prompts:,} prompts with {max(field.pass_at)} scored samples or more; "
                    "--pass-at with a smaller k counts more prompts"
                )
