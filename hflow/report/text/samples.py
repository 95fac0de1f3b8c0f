"""The texts of samples: prompts and completions by role, with what is not trained marked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from hflow.base.terminal import safe_text
from hflow.base.text import pluralize
from hflow.report.text.pictures import Picture

NOT_TRAINED = "not trained"
KEY = "report.samples"
"""The key of the configuration that says how many texts are kept."""
KEPT = "the text of N of each batch, and of N that nodes refused in each step"
"""Which texts are kept. A sample that was dropped or never trained is in no batch, and no node refused it."""


def render_texts(rows: Sequence[Mapping[str, Any]]) -> RenderableType:
    """Render the texts of one sample, a row for each trajectory: a headline and the indented turns."""
    if not rows:
        return Text(f"its text was not kept: {KEY}=N keeps {KEPT}", style="dim")
    return Group(*(part for row in rows for part in _turns(row, with_stream=len(rows) > 1)))


def render_samples_with_text(
    samples: Sequence[Mapping[str, Any]],
    texts: Mapping[tuple[str, int], Sequence[Mapping[str, Any]]],
    num_with_text: int,
    total: int,
    *,
    is_exact: bool = True,
) -> RenderableType:
    """Render samples with their texts by (stream, id), and how many the query found, with text and in all.

    Without `is_exact`, more may have a text.
    """
    parts: list[RenderableType] = []
    for sample in samples:
        parts += [_headline(sample), render_texts(texts[sample["stream"], sample["id"]]), Text()]
    some = "" if is_exact and len(samples) == num_with_text else f"the first {len(samples)} of "
    some += "" if is_exact else "at least "
    told = (
        f"{some}{pluralize(num_with_text, 'sample')} with text, of {pluralize(total, 'sample')} in all; "
        f"{KEY}=N keeps {KEPT}"
    )
    return Group(*parts, Text(told, style="dim"))


def sample_markdown(row: Mapping[str, Any]) -> str:
    """Return the text of a sample as Markdown, for TensorBoard."""
    numbers = ", ".join(f"{name} {value:.4g}" for name, value in row["values"].items())
    turns = (f"**{_label(turn)}**\n\n{_indented(turn['text'])}" for turn in row["turns"])
    return "\n\n".join([f"{row['stream']}/{row['id']}: {numbers}", *turns])


def _turns(row: Mapping[str, Any], *, with_stream: bool) -> Iterator[RenderableType]:
    if with_stream:
        yield Text(f"  {row['stream']}", style="bold")
    for turn in row["turns"]:
        style = "" if turn["trained"] else "dim"
        yield Text(f"  {_label(turn)}", style="bold" if turn["trained"] else "bold dim")
        yield Padding(Text(safe_text(turn["text"]).rstrip("\n"), style=style), (0, 0, 0, 6), expand=False)
        for url in turn.get("images", ()):
            yield Padding(Picture(url), (0, 0, 0, 6), expand=False)


def _label(turn: Mapping[str, Any]) -> str:
    role = turn["role"] or "template"
    return role if turn["trained"] else f"{role} ({NOT_TRAINED})"


def _headline(sample: Mapping[str, Any]) -> Text:
    end = sample["end"] or "no end yet"
    at = (
        ""
        if sample["step"] is None
        else f" at {'version' if end == 'evaluated' else 'step'} {sample['step']}"
    )
    reward = "" if sample["reward"] is None else f", reward {sample['reward']:.4g}"
    by = f" by {sample['node']} ({sample['reason']})" if end == "refused" else ""
    message = f": {sample['message']}" if end == "refused" and sample["message"] else ""
    return Text.assemble((f"{sample['stream']}/{sample['id']}", "bold"), f": {end}{by}{at}{reward}{message}")


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines() or [""])
