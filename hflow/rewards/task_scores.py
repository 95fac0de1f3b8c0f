"""The scorers of the package `reasoning-gym`, for rows of `data.NAME.generator=reasoning-gym:TASK`."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from functools import lru_cache
from typing import Any

from hflow.dsl import checked_by, compute, missing_extra


def _needs_package(knobs: Mapping[str, Any], reads: Collection[str]) -> str | None:
    return missing_extra("reasoning-gym", "reasoning_gym")


@compute(per="sample", timeout=30.0)
@checked_by(_needs_package)
def reasoning_gym(completion: str, entry: dict[str, Any], *, tag: str = "answer") -> float:
    """Return the score that the task of a row gives the completion's answer: 1 if it is right.

    The answer is the text in the last `<answer>...</answer>` of the completion, without whitespace at its
    ends; a completion without one gets 0. Many tasks score in between, for an answer that is partly right, or
    that has the right one in it. An answer that the task's scorer cannot read gets 0.

    Args:
        completion: what the model wrote.
        entry: the column `entry` of the generator `reasoning-gym`.
        tag: name of the tags around the answer. If it is empty, the whole completion is the answer.
    """
    from reasoning_gym.utils import extract_answer

    task, number = _task(entry), entry["number"]
    known = task[number]
    if known["question"] != entry["question"]:
        raise ValueError(f"the installed reasoning-gym asks another question {number} of {entry['task']!r}")
    answer = extract_answer(completion, tag) if tag else completion.strip()
    if answer is None:
        return 0.0
    try:
        return float(task.score_answer(answer, known))
    except Exception:  # noqa: BLE001 - some scorers raise for what they cannot read
        task.score_answer(known["answer"], known)  # a scorer that cannot read this either is broken
        return 0.0


def _task(entry: Mapping[str, Any]) -> Any:
    if not {"task", "number", "arguments", "question"} <= entry.keys():
        raise ValueError(
            "the column 'entry' is not that of a row of reasoning-gym; "
            "set data.NAME.generator=reasoning-gym:TASK"
        )
    return _make_task(entry["task"], json.dumps(entry["arguments"], sort_keys=True))


@lru_cache(maxsize=64)
def _make_task(name: str, arguments: str) -> Any:
    import reasoning_gym as package

    return package.create_dataset(name, **json.loads(arguments))
