"""The texts of samples: their parts and roles, their files, and what is printed of them."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console, RenderableType

from hflow.base.errors import ConfigError
from hflow.data.text.tokenizer import TextTokenizer, TokenizerSettings
from hflow.report.text.samples import render_samples_with_text, render_texts, sample_markdown
from hflow.runtime.records.sample_text_files import (
    MOST_READ,
    drop_samples_after,
    keep_samples,
    read_around,
    read_newest,
    read_samples,
    read_some,
    write_samples,
)
from hflow.workers.storage.sample_texts import MAX_CHARACTERS, MAX_TOKENS, split_turns

TOKENIZER = TextTokenizer(TokenizerSettings(alphabet="abcdefgh"))


def messages(*roles: str) -> list[dict[str, str]]:
    return [{"role": role, "content": ""} for role in roles]


@pytest.mark.parametrize(
    ("parts", "roles", "expected"),
    [
        # A prompt and its completion.
        ("aB", ["user", "assistant"], [("user", "a"), ("assistant", "b")]),
        ("aB", ["system", "user", "assistant"], [("system, user", "a"), ("assistant", "b")]),
        # A tool between two completions, and text of the template behind the last one.
        (
            "aBcDe",
            ["user", "assistant", "tool", "user", "assistant"],
            [("user", "a"), ("assistant", "b"), ("tool, user", "c"), ("assistant", "d"), ("", "e")],
        ),
        # An answer in the prompt is an example.
        (
            "aB",
            ["user", "assistant", "user", "assistant"],
            [("user, assistant, user", "a"), ("assistant", "b")],
        ),
        # Two completions without text between them.
        ("aB", ["user", "assistant", "assistant"], [("user", "a"), ("assistant, assistant", "b")]),
        # Nothing is known of the roles.
        ("aB", [], [("", "a"), ("assistant", "b")]),
        ("A", ["assistant"], [("assistant", "a")]),
    ],
)
def test_parts_have_the_roles_of_their_messages(
    parts: str, roles: list[str], expected: list[tuple[str, str]]
) -> None:
    """Capital letters are trained, three tokens each."""
    text = "".join(3 * part for part in parts)
    turns = list(
        split_turns(TOKENIZER.encode(text.lower()), [c.isupper() for c in text], messages(*roles), TOKENIZER)
    )
    assert [(turn.role, turn.text) for turn in turns] == [(role, 3 * part) for role, part in expected]
    assert [turn.is_trained for turn in turns] == [part.isupper() for part in parts]


def test_special_tokens_are_shown_and_long_texts_shortened() -> None:
    prompt, answer = TOKENIZER.encode_prompt("ab"), [*TOKENIZER.encode("c" * 3 * MAX_CHARACTERS), 2]
    mask = [False] * len(prompt) + [True] * len(answer)
    first, second = split_turns([*prompt, *answer], mask, messages("user", "assistant"), TOKENIZER)
    assert first.text == "<bos>ab"
    assert second.text.endswith("c<eos>")
    assert MAX_CHARACTERS - 10 < len(second.text) <= MAX_CHARACTERS


def test_generated_tokens_are_listed_with_log_prob_and_version() -> None:
    ids, mask = TOKENIZER.encode("abcab"), [False, False, True, True, True]
    drawn = [(0.0, -1), (0.0, -1), (-0.123456, 3), (-1.0, 3), (-2.0, 4)]
    prompt, answer = split_turns(ids, mask, messages("user", "assistant"), TOKENIZER, drawn)
    assert prompt.tokens == ()
    assert answer.tokens == (("c", -0.1235, 3), ("a", -1.0, 3), ("b", -2.0, 4))
    written = [(0.0, -1)] * 5
    assert [turn.tokens for turn in split_turns(ids, mask, [], TOKENIZER, written)] == [(), ()]
    long = TOKENIZER.encode("a" * (MAX_TOKENS + 1))
    (turn,) = split_turns(long, [True] * len(long), [], TOKENIZER, [(-1.0, 0)] * len(long))
    assert turn.tokens == ()


def row(stream: str, sample: int, step: int = 0, root: str | None = None) -> dict[str, Any]:
    turns = [
        {"role": "user", "text": "1+1=", "trained": False},
        {"role": "assistant", "text": f"é{sample}<eos>", "trained": True},
    ]
    return {
        "root": root or stream,
        "stream": stream,
        "id": sample,
        "step": step,
        "turns": turns,
        "values": {"reward": 0.5},
    }


def test_rows_of_a_step_are_replaced_not_added(tmp_path: Path) -> None:
    directory = tmp_path / "samples"
    write_samples(directory, 2, [row("train", 1), row("train", 2)])
    write_samples(directory, 2, [row("eval", 7)])
    write_samples(directory, 10, [row("train", 9)])
    write_samples(directory, 2, [row("train", 3)])
    assert [(r["stream"], r["id"]) for r in read_samples(directory)] == [
        ("eval", 7),
        ("train", 3),
        ("train", 9),
    ]
    write_samples(directory, 2, [{**row("train", 4), "refused_by": "score"}])
    write_samples(directory, 2, [row("train", 3)])
    write_samples(directory, 2, [{**row("train", 5), "refused_by": "score"}])
    assert [r["id"] for r in read_samples(directory)] == [7, 3, 5, 9], "refused ones replace refused ones"
    assert [json.loads(line)["id"] for line in (directory / "step-10.jsonl").read_text().splitlines()] == [9]
    drop_samples_after(directory, 2)
    assert [r["id"] for r in read_samples(directory)] == [7, 3, 5]
    keep_samples(directory, lambda samples: {("train", 3), ("eval", 7)} & samples)
    assert [r["id"] for r in read_samples(directory)] == [7, 3]
    (directory / "step-2.jsonl").write_text('{"id": 1}\n')
    with pytest.raises(ConfigError, match=r"step-2.jsonl is damaged: .*; delete it"):
        read_samples(directory)
    assert read_samples(tmp_path / "none") == []


def test_a_hundred_steps_are_joined_when_the_run_is_a_hundred_steps_further(tmp_path: Path) -> None:
    directory = tmp_path / "samples"

    def write(number: int, sample: int) -> None:
        write_samples(directory, number, [row("train", sample, step=number)])

    def ids() -> list[int]:
        return [row["id"] for row in read_samples(directory)]

    for number in range(301):
        write(number, number)
    assert ids() == [*range(301)]
    names = {path.name for path in directory.iterdir()}
    assert names == {
        "steps-0-99.jsonl.gz",
        "steps-100-199.jsonl.gz",
        *(f"step-{n}.jsonl" for n in range(200, 301)),
    }
    assert [row["id"] for row in read_around(directory, 150)] == [149, 150, 151]
    assert [row["id"] for row in read_around(directory, None)] == [*range(200, 301)]
    assert [row["id"] for row in read_newest(directory, 2)] == [299, 300]
    assert read_some(directory) == read_samples(directory)

    write(50, 1050)  # an evaluation that took long
    write(50, 2050)
    write_samples(directory, 50, [row("eval", 7, step=50)])
    assert ids() == [*range(50), 2050, 7, *range(51, 301)]
    write(400, 400)
    assert ids() == [*range(50), 2050, 7, *range(51, 301), 400]
    assert not (directory / "step-50.jsonl").exists()

    drop_samples_after(directory, 150)
    assert ids() == [*range(50), 2050, 7, *range(51, 151)]
    keep_samples(directory, lambda samples: {key for key in samples if key[1] % 2})
    assert ids() == [*range(1, 50, 2), 7, *range(51, 151, 2)]
    (directory / "steps-0-99.jsonl.gz").write_bytes(b"x")
    with pytest.raises(ConfigError, match=r"steps-0-99.jsonl.gz is damaged: .*; delete it"):
        read_around(directory, 50)


def test_of_a_long_run_hundreds_at_equal_distances_are_read(tmp_path: Path) -> None:
    for number in range(0, 2 * MOST_READ + 1, 100):
        write_samples(tmp_path, number, [row("train", number, step=number)])
    found = [row["id"] for row in read_some(tmp_path)]
    assert found == [*range(100, 2 * MOST_READ + 1, 300)]


def printed(what: RenderableType) -> str:
    file = io.StringIO()
    Console(width=100, file=file).print(what)
    return "".join(f"{line.rstrip()}\n" for line in file.getvalue().splitlines())


def test_what_is_not_trained_is_marked() -> None:
    assert printed(render_texts([row("train", 1)])).split("\n")[:4] == [
        "  user (not trained)",
        "      1+1=",
        "  assistant",
        "      é1<eos>",
    ]
    both = printed(render_texts([row("alice", 1), row("bob", 1, root="alice")]))
    assert both.index("  alice\n") < both.index("  bob\n")
    assert printed(render_texts([])) == (
        "its text was not kept: report.samples=N keeps the text of N of each batch, and of N that nodes\n"
        "refused in each step\n"
    )


def test_a_refused_sample_names_its_node_and_reason() -> None:
    sample = {"stream": "train", "id": 1, "end": "refused", "step": 2, "reward": None, "node": "score"}
    failed = {**sample, "reason": "failed", "message": "ValueError: no number"}
    filtered = {**sample, "reason": "keep", "message": None, "reward": -1.0}
    for values, headline in (
        (failed, "train/1: refused by score (failed) at step 2: ValueError: no number"),
        (filtered, "train/1: refused by score (keep) at step 2, reward -1"),
    ):
        text = printed(render_samples_with_text([values], {("train", 1): [row("train", 1)]}, 1, 1))
        assert text.splitlines()[0] == headline


def test_samples_are_printed_with_how_many_have_no_text() -> None:
    sample = {"stream": "train", "id": 1, "end": "trained", "step": 0, "reward": 0.0}
    text = printed(render_samples_with_text([sample], {("train", 1): [row("train", 1)]}, 3, 1200))
    assert text.startswith("train/1: trained at step 0, reward 0\n  user (not trained)\n")
    counted = "3 samples with text, of 1,200 samples in all; report.samples=N keeps"
    assert f"the first 1 of {counted}" in " ".join(text.split())
    texts = {("train", 1): [row("train", 1)]}
    text = printed(render_samples_with_text([sample], texts, 3, 1200, is_exact=False))
    assert f"the first 1 of at least {counted}" in " ".join(text.split())


def test_markdown_for_tensorboard() -> None:
    assert sample_markdown(row("train", 1)) == (
        "train/1: reward 0.5\n\n**user (not trained)**\n\n    1+1=\n\n**assistant**\n\n    é1<eos>"
    )
