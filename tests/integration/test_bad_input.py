"""Bad input by generation: each case is one clear line and exit code 2, in bounded time and memory."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path
from random import Random

import pytest
from bad_input import MEMORY_BYTES, Case, problem, run_case, write
from bad_input_cases import KINDS, Good, cases, good_inputs, number_keys

from hflow.base.errors import ConfigError
from hflow.base.validation import from_mapping
from hflow.config import RunConfig
from hflow.config.schema import DataConfig, ModelConfig
from hflow.runtime.ledger import query

SEED = 14
NUM_CHANGES = 3
"""Random changes of each kind; `make bad-input N=500` makes more."""
EVERY = {"override": 48, "option": 30, "checkpoint": 30, "data": 24, "recipe": 20}
"""Kind, each case of which composes a configuration -> n: every n-th case runs here. Of others every sixth.
`make bad-input` runs all."""
LISTED = (
    "batch=1000000000",
    "cluster=cpu-1x99999999",
    "nodes.actor_train.epochs=1" + "0" * 30,
    "name=..",
    "out=''",
    "SystemExit",
    "its own BaseException",
    "configuration with an alias bomb",
    "configuration with deep lists",
    "a huge row",
    "deep lists",
    "a column twice",
    "plan: config.json with 1e9 layers",
    "torch: config.json with 1e9 layers",
    "torch: config.json with a bogus dtype",
    "torch: config.json with a bogus quantisation",
    "weights with its half",
    "an index of shards with tensors as a list",
    "twin --layout d99999999",
    "models.actor.architecture={1: 2}",
    "name=latest",
    "nodes.actor_gen.temperature=1e-300",
    "configuration with ten levels of interpolations",
    "configuration with ten levels of copied mappings",
    "configuration that is a loop of links",
    "a Cyrillic node",
    "a loop of links",
    "a prompt of millions of characters",
)
"""Cases that always run: each was a traceback, a hang, or accepted."""


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Good:
    return good_inputs(tmp_path_factory.mktemp("good") / "inputs")


@pytest.fixture(scope="module")
def all_cases(good: Good) -> list[Case]:
    return list(cases(good, Random(SEED), NUM_CHANGES))


def is_chosen(case: Case) -> bool:
    every = EVERY.get(case.kind, 6)
    return (
        not case.is_refused
        or case.name in LISTED
        or zlib.crc32(case.name.encode(errors="replace")) % every == 0
    )


@pytest.mark.parametrize("kind", [kind for kind, _, _ in KINDS])
def test_bad_input_is_refused_in_one_line(
    kind: str, all_cases: Sequence[Case], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(query, "QUERY_SECONDS", 1)
    chosen = [case for case in all_cases if case.kind == kind and is_chosen(case)]
    found = ((case, problem(case, run_case(case, tmp_path / str(i)))) for i, case in enumerate(chosen))
    assert [f"{case}: {wrong}" for case, wrong in found if wrong is not None] == []


def test_the_listed_cases_are_among_those_that_run(all_cases: Sequence[Case]):
    assert set(LISTED) <= {case.name for case in all_cases if is_chosen(case)}


NUMBERS = [
    *((f"{key}.kept" if key == "workload.shares" else key, whole) for key, whole in number_keys(RunConfig)),
    *((f"models.actor.{key}", whole) for key, whole in number_keys(ModelConfig)),
    *((f"data.train.{key}", whole) for key, whole in number_keys(DataConfig)),
]


@pytest.mark.parametrize(("key", "whole"), NUMBERS)
def test_no_key_takes_nan_or_infinity_or_text(key: str, whole: bool):
    values = [float("nan"), float("inf"), -float("inf"), "x", [[1]], {"a": 1}, True]
    for value in [*values, *((10**30, 1.5) if whole and key != "schedule.max_staleness" else ())]:
        nested = value
        for name in reversed(key.split(".")):
            nested = {name: nested}
        with pytest.raises(ConfigError, match=key.replace(".", r"\.")):
            from_mapping(RunConfig, {"name": "x", **nested})


@pytest.mark.first(2)
@pytest.mark.parametrize(
    "name", ["SystemExit", "configuration with an alias bomb", "a huge row", "a huge file"]
)
def test_a_process_ends_with_code_2_within_its_memory(name: str, all_cases: Sequence[Case], tmp_path: Path):
    """In a process of its own: nothing of Python's start-up or end adds to the line."""
    case = next(case for case in all_cases if case.name == name)
    for file, content in case.files.items():
        write(tmp_path / file, content)
    limit = MEMORY_BYTES * 4  # with the libraries' address space
    done = subprocess.run(
        [sys.executable, "-m", "hflow", *case.arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1


def test_a_deleted_working_directory_is_one_line(tmp_path: Path):
    gone = tmp_path / "gone"
    gone.mkdir()
    done = subprocess.run(
        ["sh", "-c", 'rmdir "$PWD" && exec "$0" -m hflow check grpo', sys.executable],
        cwd=gone,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr == "error: the working directory was deleted; change to another one\n"


def test_a_full_disk_is_one_line(good: Good, tmp_path: Path):
    with Path("/dev/full").open("w", encoding="utf-8") as full:
        done = subprocess.run(
            [sys.executable, "-m", "hflow", "samples", str(good.run)],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
            check=False,
        )
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "No space left on device; free some space" in done.stderr
