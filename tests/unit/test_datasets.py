"""Datasets: files and generators, checked against the recipe's columns; the order of rows."""

from __future__ import annotations

import datetime
import json
import math
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hflow.base.errors import DataError
from hflow.data.rows.datasets import DataSettings, check_columns, check_rows, open_dataset
from hflow.data.rows.row_order import RowOrder, WeightedOrder
from hflow.data.text.messages import check_learned, check_prompt
from hflow.episodes.endpoint.dialects.openai import ChatDialect
from hflow.episodes.endpoint.requests import RequestRefused
from hflow.types import Unit

COLUMNS = {"prompt": Unit.TEXT, "score": Unit.SEQUENCE, "ids": Unit.TOKEN, "meta": Unit.JSON}
ROWS = [
    {"meta": {"a": [1]}, "prompt": f"é{i}\n", "score": i / 2, "ids": [i, 2], "unused": None} for i in range(7)
]
DECLARED = [{name: row[name] for name in COLUMNS} for row in ROWS]


def jsonl(path: Path, lines: list[str]) -> str:
    file = path / "data.jsonl"
    file.write_text("\n".join(lines), encoding="utf-8")
    return str(file)


def test_jsonl_rows_are_the_declared_columns(tmp_path: Path) -> None:
    lines = [json.dumps(row, ensure_ascii=i % 2 == 0) for i, row in enumerate(ROWS)]
    source = open_dataset(DataSettings(jsonl(tmp_path, ["", *lines[:3], "", "", *lines[3:], ""])), COLUMNS)
    assert len(source) == 7
    assert [source.row(i) for i in (6, 0, 3, 1, 2, 5, 4)] == [DECLARED[i] for i in (6, 0, 3, 1, 2, 5, 4)]
    assert list(source.row(0)) == list(COLUMNS)


def test_a_part_of_a_file_is_refused(tmp_path: Path) -> None:
    settings = DataSettings(jsonl(tmp_path, [json.dumps(ROWS[0])]), split="train[:10%]", key="data.train")
    with pytest.raises(DataError, match=r"data.train.split is train\[:10%\], but .* is a file, all of which"):
        open_dataset(settings, COLUMNS)


def test_parquet_rows_are_the_declared_columns(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "data.parquet", row_group_size=3)
    source = open_dataset(DataSettings(str(tmp_path / "data.parquet")), COLUMNS)
    assert [source.row(i) for i in range(len(source))] == DECLARED


def test_limit_takes_the_first_rows(tmp_path: Path) -> None:
    path = jsonl(tmp_path, [json.dumps(row) for row in ROWS])
    assert len(open_dataset(DataSettings(path, limit=3), COLUMNS)) == 3
    assert len(open_dataset(DataSettings(path, limit=30), COLUMNS)) == 7


NO_CONVERSATIONS: list[tuple[Any, str]] = [
    ([], "chat must be a list with at least one message, but it is empty"),
    (["hello"], "chat[0] must be an object with role and content, but it is 'hello'"),
    ([{"role": "user"}], "chat[0].content must be text, and it is missing"),
    ([{"role": "user", "content": "x"}, {"role": "user", "content": 3}], "chat[1].content must be text"),
    ([{"role": "user", "content": [{"type": "image_url"}]}], "chat[0].content must be text and images, but"),
    ([{"from": "human", "value": "x"}], "chat[0] has the keys from and value of ShareGPT's format; write"),
    ([{"role": "human", "content": "x"}], "but it is 'human'; did you mean 'user'?"),
    ([{"role": "gpt", "content": "x"}], "but it is 'gpt'; did you mean 'assistant'?"),
    ([{"role": "User", "content": "x"}], "but it is 'User'; did you mean 'user'?"),
    ([{"role": "critic", "content": "x"}], "chat[0].role must be one of system, developer, user, assistant"),
    ([{"role": "user", "content": "\ud800"}], "half of a surrogate pair"),
    ([{"role": "assistant", "content": "x", "weight": 0}], "every message of the assistant is learned"),
    ([{"role": "assistant", "function_call": {"name": "f"}}], "chat[0].function_call is not supported"),
    ([{"role": "user", "content": "x", "tool_calls": [{"name": "f"}]}], "chat[0].tool_calls is not"),
    ([{"role": "assistant", "tool_calls": [3]}], "chat[0].tool_calls[0] must be a function call with"),
    ([{"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{"}]}], "is text, but not JSON"),
    ([{"role": "assistant", "tool_calls": [{"name": "f", "arguments": "[1]"}]}], "must be a JSON object"),
]


@pytest.mark.parametrize(("chat", "message"), NO_CONVERSATIONS)
def test_datasets_and_the_endpoint_refuse_the_same_conversations(
    tmp_path: Path, chat: Any, message: str
) -> None:
    path = jsonl(tmp_path, [json.dumps({"chat": chat})])
    with pytest.raises(DataError) as refused:
        open_dataset(DataSettings(path), {"chat": Unit.MESSAGES})
    line = str(refused.value)
    assert line.startswith(f"{path} row 0: ")
    assert message in line
    if "surrogate" not in message:  # of which a request may have none at all
        with pytest.raises(RequestRefused) as answer:
            ChatDialect().parse({"model": "m", "messages": chat}, {})
        assert answer.value.message == line.removeprefix(f"{path} row 0: ").replace("chat", "messages", 1)


def test_a_text_is_no_conversation(tmp_path: Path) -> None:
    message = r"row 0: chat must be a list of messages, but it is 'hello'; .*or declare the column as Text"
    with pytest.raises(DataError, match=message):
        open_dataset(DataSettings(jsonl(tmp_path, ['{"chat": "hello"}'])), {"chat": Unit.MESSAGES})


CALLED = {"type": "function", "function": {"name": "f", "arguments": {"city": "Oslo", "near": None}}}
CONVERSATIONS: list[tuple[list[dict[str, Any]], list[dict[str, Any]]]] = [
    (
        [{"role": "developer", "content": "a"}, {"role": "user", "content": "b", "name": None}],
        [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}],
    ),
    (
        [{"role": "user", "content": [{"type": "text", "text": "1+"}, {"type": "text", "text": "1"}]}],
        [{"role": "user", "content": "1+1"}],
    ),
    (
        [
            {"role": "user", "content": "b"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {"id": "1", "function": {"name": "f", "arguments": '{"city": "Oslo", "near": null}'}},
                    {"name": "f", "arguments": {"city": "Oslo", "near": None}},
                    {"type": "function", "function": {"name": "g"}},
                ],
            },
            {"role": "tool", "content": "2", "tool_call_id": 1},
        ],
        [
            {"role": "user", "content": "b"},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [
                    {"id": "1", **CALLED},
                    CALLED,
                    {"type": "function", "function": {"name": "g", "arguments": {}}},
                ],
            },
            {"role": "tool", "content": "2", "tool_call_id": "1"},
        ],
    ),
]


@pytest.mark.parametrize(("chat", "normal"), CONVERSATIONS)
def test_datasets_and_the_endpoint_make_one_form(
    tmp_path: Path, chat: list[dict[str, Any]], normal: list[dict[str, Any]]
) -> None:
    source = open_dataset(
        DataSettings(jsonl(tmp_path, [json.dumps({"chat": chat})])), {"chat": Unit.MESSAGES}
    )
    assert source.row(0) == {"chat": normal}
    assert ChatDialect().parse({"model": "m", "messages": chat}, {}).prompt == tuple(normal)
    assert ChatDialect().parse({"model": "m", "messages": normal}, {}).prompt == tuple(normal)


CALLS = [
    {
        "chat": [
            {"role": "user", "content": "a"},
            {"role": "assistant", "tool_calls": [{"name": "f", "arguments": {"city": "Oslo"}}]},
        ],
        "tools": [
            {
                "type": "function",
                "function": {"name": "f", "parameters": {"properties": {"city": {"type": "string"}}}},
            },
            {
                "type": "function",
                "function": {"name": "g", "parameters": {"properties": {"n": {"enum": [1]}}}},
            },
        ],
    },
    {
        "chat": [
            {"role": "user", "content": "b"},
            {"role": "assistant", "tool_calls": [{"name": "g", "arguments": {"n": 1}}]},
            {"role": "tool", "content": "2", "tool_call_id": "1"},
        ],
        "tools": [{"type": "function", "function": {"name": "h"}}],
    },
]


def test_rows_of_parquet_are_those_of_json(tmp_path: Path) -> None:
    """Arrow gives each struct the keys of all others, which are null."""
    columns = {"chat": Unit.MESSAGES, "tools": Unit.JSON}
    written = open_dataset(DataSettings(jsonl(tmp_path, [json.dumps(row) for row in CALLS])), columns)
    pq.write_table(pa.Table.from_pylist(CALLS), tmp_path / "rows.parquet")
    datasets.Dataset.from_list(CALLS).save_to_disk(tmp_path / "saved")
    for path in ("rows.parquet", "saved"):
        source = open_dataset(DataSettings(str(tmp_path / path)), columns)
        assert [source.row(0), source.row(1)] == [written.row(0), written.row(1)]


def test_only_padding_is_dropped_of_arrow(tmp_path: Path) -> None:
    call = {"name": "f", "arguments": '{"city": null}'}
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    keys = pa.array([[("a", 1), ("b", None)]], pa.map_(pa.string(), pa.int64()))
    table = pa.table({"chat": [chat], "list": [[1, None]], "keys": keys, "none": [None]})
    pq.write_table(table, tmp_path / "rows.parquet")
    columns = {"chat": Unit.MESSAGES, "list": Unit.JSON, "keys": Unit.JSON, "none": Unit.JSON}
    row = open_dataset(DataSettings(str(tmp_path / "rows.parquet")), columns).row(0)
    assert row["chat"][1]["tool_calls"][0]["function"]["arguments"] == {"city": None}
    assert (row["list"], row["keys"], row["none"]) == ([1, None], {"a": 1, "b": None}, None)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_what_nodes_need_of_conversations(tmp_path: Path, kind: str) -> None:
    """The second row ends with the assistant, so it is no prompt; the first has nothing to learn."""
    asked = [{"role": "user", "content": "1+1"}]
    rows = [{"chat": asked}, {"chat": [*asked, {"role": "assistant", "content": "2"}]}]
    path = tmp_path / f"data.{kind}"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    settings, columns = DataSettings(str(path)), {"chat": Unit.MESSAGES}
    source = open_dataset(settings, columns, {"chat": check_prompt})
    with pytest.raises(DataError, match=rf"data.{kind} row 1: chat: the last message is the assistant's"):
        check_rows(settings, source)
    with pytest.raises(DataError, match=rf"data.{kind} row 0: chat: no message is the assistant's"):
        check_columns(settings, columns, {"chat": check_learned})
    check_rows(settings, open_dataset(settings, columns))


def test_files_of_a_list_and_of_a_pattern_follow_each_other(tmp_path: Path) -> None:
    for name, rows in {"b.jsonl": ROWS[:2], "a.jsonl": ROWS[2:3], "c.txt": []}.items():
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    pq.write_table(pa.Table.from_pylist(ROWS[3:5]), tmp_path / "c.parquet")
    pattern = open_dataset(DataSettings(str(tmp_path / "*.jsonl")), COLUMNS)
    assert [pattern.row(i) for i in range(len(pattern))] == [DECLARED[i] for i in (2, 0, 1)]
    (tmp_path / "d.jsonl").write_text("{}\n")
    with pytest.raises(DataError, match=r"d.jsonl row 0: no columns 'prompt', 'score'"):
        open_dataset(DataSettings(str(tmp_path / "*.jsonl")), COLUMNS)
    (tmp_path / "d.jsonl").unlink()
    paths = (str(tmp_path / "c.parquet"), str(tmp_path / "*.jsonl"))
    both = open_dataset(DataSettings(paths, limit=4), COLUMNS)
    assert [both.row(i) for i in range(len(both))] == [DECLARED[i] for i in (3, 4, 2, 0)]


def test_a_column_with_another_name(tmp_path: Path) -> None:
    path, columns = jsonl(tmp_path, ['{"question": "q", "answer": "a"}']), {"prompt": Unit.TEXT}
    renamed = DataSettings(path, map={"prompt": "question"}, key="data.train")
    assert open_dataset(renamed, columns).row(0) == {"prompt": "q"}
    both = {"prompt": Unit.TEXT, "answer": Unit.TEXT}
    assert open_dataset(renamed, both).row(0) == {"prompt": "q", "answer": "a"}


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({}, r"no column 'prompt' .*'question', 'answer'\); set data.train.map.prompt to the column that"),
        (
            {"prompt": "qestion"},
            r"no column 'qestion' .* did you mean 'question'\? Set data.train.map.prompt",
        ),
        ({"promt": "question"}, r"data.train.map.promt: the recipe declares no column 'promt'; did you mean"),
    ],
)
def test_a_missing_column_says_how_to_map_it(tmp_path: Path, names: dict[str, str], message: str) -> None:
    settings = DataSettings(
        jsonl(tmp_path, ['{"question": "q", "answer": "a"}']), map=names, key="data.train"
    )
    with pytest.raises(DataError, match=message):
        open_dataset(settings, {"prompt": Unit.TEXT})


def test_several_sources_are_numbered_one_after_the_other(tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_text('{"q": "b"}\n')
    first = DataSettings(jsonl(tmp_path, ['{"prompt": "a"}', '{"prompt": "aa"}']))
    second = DataSettings(str(tmp_path / "b.jsonl"), map={"prompt": "q"})
    rows = open_dataset(DataSettings(sources=(first, second)), {"prompt": Unit.TEXT})
    assert [rows.row(i)["prompt"] for i in range(len(rows))] == ["a", "aa", "b"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"promt": "x"}', r"data.jsonl row 1: no column 'prompt' .*did you mean 'promt'"),
        (
            '{"prompt": 3}',
            r"data.jsonl row 1: column 'prompt' is 3, but the recipe declares a string; write it as a",
        ),
        ('{"prompt": null}', r"row 1: column 'prompt' is None"),
        ("[1, 2]", r"row 1 is a list"),
        ('{"prompt": "x"', r"row 1 is not JSON \(the line ends before the value does\); write one JSON"),
        ('{"prompt": "x}', r"the line ends before the value does"),
        ('{"prompt" "x"}', r"row 1 is not JSON \(Expecting ':' delimiter at character 10\)"),
        ('{"prompt": NaN}', r"row 1 is not JSON: NaN is not a JSON number; correct the row"),
        ('{"prompt": 1e999}', r"row 1 is not JSON: 1e999 is larger than the largest float; correct the row"),
        (
            '{"prompt": "a", "prompt": "b"}',
            r"row 1 is not JSON: key 'prompt' is there twice; correct the row",
        ),
        ('{"prompt": "\\ud800"}', r"row 1: column 'prompt' has half of a surrogate pair"),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, line: str, message: str) -> None:
    source = open_dataset(DataSettings(jsonl(tmp_path, ['{"prompt": "ok"}', line])), {"prompt": Unit.TEXT})
    with pytest.raises(DataError, match=message):
        source.row(1)


@pytest.mark.parametrize("content", [json.dumps([{"prompt": "a"}], indent=1), '{\n "prompt": "a"\n}\n'])
def test_a_json_document_over_several_lines(tmp_path: Path, content: str) -> None:
    settings = DataSettings(jsonl(tmp_path, [content]))
    for read in (check_columns, open_dataset):
        with pytest.raises(DataError, match=r"row 0 is not JSON \(the line ends before .*`jq -c '.\[\]'`"):
            read(settings, {"prompt": Unit.TEXT})


def test_files_of_other_programs(tmp_path: Path) -> None:
    """A byte order mark and lines of spaces are no rows, and another encoding is named."""
    path, row = tmp_path / "data.jsonl", json.dumps({"prompt": "é"}, ensure_ascii=False)
    text = f"\n   \n\t \r\n {row}\r\n    \n{row}\n  "
    settings, columns = DataSettings(str(path)), {"prompt": Unit.TEXT}
    for content in (text, text.lstrip(), " " + text):
        path.write_bytes(content.encode("utf-8-sig"))
        check_columns(settings, columns)
        source = open_dataset(settings, columns)
        assert [source.row(i) for i in range(len(source))] == [{"prompt": "é"}] * 2
    for encoding in ("latin-1", "utf-16"):
        path.write_bytes(row.encode(encoding))
        for read in (check_columns, open_dataset):
            with pytest.raises(DataError, match=r"row 0 is not UTF-8 .*; save the file as UTF-8"):
                read(settings, columns)


def test_numbers_of_parquet_that_are_none(tmp_path: Path) -> None:
    values = {
        "score": (
            Unit.SEQUENCE,
            math.nan,
            "has NaN, which is no JSON value .libraries write it where a value",
        ),
        "size": (Unit.SEQUENCE, -math.inf, "has -inf, which is no JSON value"),
        "ids": (Unit.TOKEN, [1.0, math.nan], "has NaN"),
        "prompt": (Unit.TEXT, math.nan, "has NaN"),
        "meta": (Unit.JSON, {"a": [math.nan]}, "has NaN"),
        "day": (Unit.JSON, datetime.date(2026, 1, 1), "has a value of type date, which JSON does not have"),
        "bytes": (Unit.TEXT, b"x", "has a value of type bytes"),
    }
    path = tmp_path / "data.parquet"
    pq.write_table(pa.Table.from_pylist([{name: value for name, (_, value, _) in values.items()}]), path)
    for name, (unit, _, message) in values.items():
        for read in (check_columns, open_dataset):
            with pytest.raises(DataError, match=rf"data.parquet row 0: column '{name}' {message}"):
                read(DataSettings(str(path)), {name: unit})


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_column_inside_another_one(tmp_path: Path, kind: str) -> None:
    rows = [{"answer": {"text": "a"}, "answer.text": "b"}, {"answer": {"text": "c"}}]
    path, columns = tmp_path / f"data.{kind}", {"prompt": Unit.TEXT}
    settings = DataSettings(str(path), map={"prompt": "answer.text"}, key="data.train")

    def write(rows: list[dict[str, Any]]) -> None:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        if kind == "parquet":
            pq.write_table(pa.Table.from_pylist(rows), path)

    write(rows[:1])
    check_columns(settings, columns)
    assert open_dataset(settings, columns).row(0) == {"prompt": "b"}
    write(rows[1:])
    message = (
        r"data.train.map.prompt is 'answer.text', but rows are mapped by whole columns, such as 'answer'"
    )
    with pytest.raises(DataError, match=message):
        open_dataset(settings, columns)


def test_parquet_is_read_in_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{**row, "chat": [{"role": "user", "content": f"{i}"}] * (i + 1)} for i, row in enumerate(ROWS)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "data.parquet", row_group_size=5)
    columns = {**COLUMNS, "chat": Unit.MESSAGES}
    for num_rows in (1, 2, 3, 100):
        monkeypatch.setattr("hflow.data.rows.parquet._BATCH_ROWS", (num_rows,))
        source = open_dataset(DataSettings(str(tmp_path / "data.parquet")), columns)
        found = [source.row(i) for i in range(len(source))]
        assert found == [{name: row[name] for name in columns} for row in rows]


@pytest.mark.long  # it reads 2.2 GB, of a file of 50 KB
def test_nested_parquet_of_more_than_2_gib(tmp_path: Path) -> None:
    num_rows, text = 2100, "x" * (1 << 20)
    content = pa.DictionaryArray.from_arrays(pa.array([0] * num_rows, pa.int32()), pa.array([text]))
    message = pa.StructArray.from_arrays([pa.array(["user"] * num_rows), content], ["role", "content"])
    chat = pa.ListArray.from_arrays(pa.array(range(num_rows + 1), pa.int32()), message)
    path = tmp_path / "data.parquet"
    pq.write_table(pa.table({"chat": chat}), path, row_group_size=num_rows, store_schema=False)
    with pytest.raises(pa.ArrowNotImplementedError, match="chunked array outputs"):
        pq.read_table(path)
    source = open_dataset(DataSettings(str(path)), {"chat": Unit.MESSAGES})
    assert len(source) == num_rows
    assert source.row(num_rows - 1) == {"chat": [{"role": "user", "content": text}]}


@pytest.mark.parametrize(
    ("unit", "value"),
    [
        (Unit.SEQUENCE, '"1"'),
        (Unit.SEQUENCE, "[1]"),
        (Unit.TOKEN, "1"),
        (Unit.TOKEN, '["a"]'),
        (Unit.TEXT, "{}"),
    ],
)
def test_a_value_of_another_type_is_refused_when_the_file_is_opened(
    tmp_path: Path, unit: Unit, value: str
) -> None:
    with pytest.raises(DataError, match=r"row 0: column 'x' .* the recipe declares a"):
        open_dataset(DataSettings(jsonl(tmp_path, [f'{{"x": {value}}}'])), {"x": unit})


def test_a_parquet_file_without_the_column_is_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"question": ["x"]}), tmp_path / "d.parquet")
    with pytest.raises(DataError, match=r"d.parquet: no column 'questions' .*did you mean 'question'"):
        open_dataset(DataSettings(str(tmp_path / "d.parquet")), {"questions": Unit.TEXT})
    (tmp_path / "e.parquet").write_text("not parquet")
    with pytest.raises(DataError, match="cannot be read as Parquet"):
        open_dataset(DataSettings(str(tmp_path / "e.parquet")), {"questions": Unit.TEXT})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (DataSettings(), "either a path or a generator"),
        (DataSettings("a.jsonl", "addition"), "either a path or a generator"),
        (DataSettings("none.jsonl"), "no data file none.jsonl"),
        (DataSettings("none/*.jsonl", key="data.train"), r"no file matches none/.*; set data.train.path"),
        (DataSettings("hf:a/b/c/d"), "names no dataset; write hf:OWNER/NAME, or hf:OWNER/NAME/CONFIG"),
        (DataSettings(generator="addition", split="test"), r"choose one of \['heldout', 'train'\]"),
    ],
)
def test_wrong_settings_say_what_to_change(settings: DataSettings, message: str) -> None:
    with pytest.raises(DataError, match=message):
        open_dataset(settings, {"prompt": Unit.TEXT})


def test_other_formats_and_empty_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "d.csv").write_text("x")
    with pytest.raises(DataError, match=r"none of the formats .* .jsonl, .parquet"):
        open_dataset(DataSettings(str(tmp_path / "d.csv")), {})
    with pytest.raises(DataError, match="has no rows"):
        open_dataset(DataSettings(jsonl(tmp_path, ["", ""])), {})


def test_additions_are_all_pairs_and_500_are_held_out() -> None:
    columns = {"prompt": Unit.TEXT, "answer": Unit.TEXT}
    train = open_dataset(DataSettings(generator="addition"), columns)
    heldout = open_dataset(DataSettings(generator="addition", split="heldout"), columns)
    rows = [source.row(i) for source in (train, heldout) for i in range(len(source))]
    assert (len(train), len(heldout)) == (9500, 500)
    assert {row["prompt"] for row in rows} == {f"{a:02d}+{b:02d}=" for a in range(100) for b in range(100)}
    assert all(int(row["prompt"][:2]) + int(row["prompt"][3:5]) == int(row["answer"]) for row in rows)
    assert {len(row["answer"]) for row in rows} == {3}
    with pytest.raises(DataError, match=r"no column 'solution'"):
        open_dataset(DataSettings(generator="addition"), {"solution": Unit.TEXT})


def test_additions_as_conversations_are_the_same_sums() -> None:
    chats = open_dataset(
        DataSettings(generator="addition-chat"), {"prompt": Unit.MESSAGES, "answer": Unit.TEXT}
    )
    texts = open_dataset(DataSettings(generator="addition"), {"prompt": Unit.TEXT, "answer": Unit.TEXT})
    for i in (0, 17, 9499):
        (message,) = chats.row(i)["prompt"]
        assert message == {"role": "user", "content": texts.row(i)["prompt"].removesuffix("=")}
        assert chats.row(i)["answer"] == texts.row(i)["answer"]


def test_pairs_of_additions_differ_in_one_digit() -> None:
    columns = {"prompt": Unit.TEXT, "chosen": Unit.TEXT, "rejected": Unit.TEXT}
    right = {"prompt": Unit.TEXT, "answer": Unit.TEXT}
    for split in ("train", "heldout"):
        pairs = open_dataset(DataSettings(generator="addition-pairs", split=split), columns)
        answers = open_dataset(DataSettings(generator="addition", split=split), right)
        assert len(pairs) == len(answers)
        places = set()
        for i in range(len(pairs)):
            pair = pairs.row(i)
            assert {"prompt": pair["prompt"], "answer": pair["chosen"]} == answers.row(i)
            wrong = [place for place in range(3) if pair["chosen"][place] != pair["rejected"][place]]
            assert (len(wrong), len(pair["rejected"])) == (1, 3)
            places.update(wrong)
        assert places == {0, 1, 2}


@given(st.integers(1, 50), st.integers(0, 2**31), st.integers(0, 4))
def test_every_epoch_is_a_permutation(num_rows: int, seed: int, epoch: int) -> None:
    order = RowOrder(num_rows, seed)
    rows = [order.row(epoch * num_rows + i) for i in range(num_rows)]
    assert sorted(rows) == list(range(num_rows))
    assert rows == [RowOrder(num_rows, seed).row(epoch * num_rows + i) for i in range(num_rows)]


def test_epochs_and_seeds_differ_and_order_can_be_kept() -> None:
    order = RowOrder(100, 3)
    first, second = [order.row(i) for i in range(100)], [order.row(i) for i in range(100, 200)]
    assert first != second
    assert first != [RowOrder(100, 4).row(i) for i in range(100)]
    assert [RowOrder(100, 3, shuffle=False).row(i) for i in (0, 99, 100, 205)] == [0, 99, 0, 5]


SOURCES = st.lists(st.tuples(st.integers(1, 30), st.floats(0.05, 5)), min_size=1, max_size=5)


@given(SOURCES, st.integers(0, 2**31), st.integers(0, 200_000), st.integers(1, 400))
def test_sources_have_their_shares_in_every_stretch(
    sources: list[tuple[int, float]], seed: int, start: int, length: int
) -> None:
    sizes, weights = zip(*sources, strict=True)
    order = WeightedOrder(sizes, weights, seed)
    ends = np.cumsum(sizes)
    rows = [order.row(position) for position in range(start, start + length)]
    counts = np.bincount(np.searchsorted(ends, rows, side="right"), minlength=len(sizes))
    shares = np.asarray(weights) / sum(weights)
    assert np.abs(counts - shares * length).max() <= 6
    assert rows[-1] == WeightedOrder(sizes, weights, seed).row(start + length - 1)  # needs no history


def test_each_source_has_epochs_of_its_own() -> None:
    order = WeightedOrder([3, 5], [1, 3], seed=7)
    rows = np.array([order.row(position) for position in range(800)])
    for first, size in ((0, 3), (3, 5)):
        own = rows[(rows >= first) & (rows < first + size)]
        epochs = own[: len(own) // size * size].reshape(-1, size)
        assert len(epochs) > 50
        assert all(sorted(epoch) == list(range(first, first + size)) for epoch in epochs.tolist())
        assert len({tuple(epoch) for epoch in epochs.tolist()}) > 1
    in_order = [WeightedOrder([3, 5], [1, 3], seed=7, shuffle=False).row(p) for p in range(20)]
    assert [row for row in in_order if row < 3][:4] == [0, 1, 2, 0]


def test_ten_million_rows_are_no_trouble() -> None:
    order = RowOrder(10_000_000, 1)
    rows = [order.row(position) for position in range(1000)]
    assert len(set(rows)) == 1000
    assert max(rows) > 9_000_000
