"""Workers that only generate are killed or stopped: they alone are replaced, and training continues."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import threading
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import ray

from hflow.launch.planning.compile import compile_recipe
from hflow.launch.running import attempts, run_recipe
from hflow.launch.running.worker_setup import make_workers
from hflow.runtime.ledger import audit
from hflow.runtime.records.run_summary import RunSummary
from hflow.runtime.saving.run_directory import RunDirectory, read_metrics
from hflow.workers.ray.ray_workers import RayWorkers

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]

RECIPE = Path(__file__).parents[2] / "recipes" / "grpo_async.py"
STEPS, BATCH, GROUP_SIZE = 12, 4, 8
FAULTS = ((2, 1, signal.SIGKILL), (6, 2, signal.SIGSTOP))
"""Completed steps, and what the worker of an engine is sent then. Worker 0 trains."""
KILLED = ((2, 1, signal.SIGKILL), (6, 2, signal.SIGKILL))
"""Of an engine with a rank on both devices, whose process belongs to the first."""
WITH_TWO_TRAINERS = ((2, 2, signal.SIGKILL), (6, 3, signal.SIGSTOP))
"""The same, where engines relay buckets to each other. Workers 0 and 1 train."""
GEN = "models.actor.gen"
FEW_CHANGES = (f"{GEN}.delta=true", "models.actor.dtype=bf16", "models.actor.optim.lr=1e-5")
TWO_RANKS = ("placement=actor=0 actor.gen=1-2:t2", f"{GEN}.engine=vllm")
CASES = {
    "as-planned": (),
    "store": (f"{GEN}.transport=store",),
    "store-delta": (f"{GEN}.transport=store", *FEW_CHANGES),
    "disk": (f"{GEN}.transport=disk",),
    "disk-delta": (f"{GEN}.transport=disk", *FEW_CHANGES),
    "shared": (f"{GEN}.transport=shared",),
    "shared-delta": (f"{GEN}.transport=shared", *FEW_CHANGES),
    "collective": (f"{GEN}.transport=collective",),
    "collective-of-two-trainers": (
        f"{GEN}.transport=collective",
        *("cluster=cpu-1x4", "placement=actor=0-1:d2 actor.gen=2-3"),
    ),
    "collective-delta": (f"{GEN}.transport=collective", *FEW_CHANGES),
    "vllm-t2-shared": (f"{GEN}.transport=shared", *TWO_RANKS),
    "vllm-t2-collective-delta": (f"{GEN}.transport=collective", *FEW_CHANGES, *TWO_RANKS),
}
"""Every transport that an engine on devices of its own can have. `ipc` needs the trainer's device."""
TRANSPORTS = [
    pytest.param(name, marks=() if name == "as-planned" else pytest.mark.long, id=name) for name in CASES
]


@dataclass
class Struck:
    """The run, and the process of each worker before and after each fault."""

    case: str
    faults: tuple[tuple[int, int, signal.Signals], ...]
    summary: RunSummary | None = None
    processes: list[list[int]] = field(default_factory=list)
    variables: list[str | None] = field(default_factory=list)
    """Of the environment that the configuration sets, in each worker at the end."""


@pytest.fixture(scope="module", params=TRANSPORTS)
def struck(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, no_ray: None) -> Struck:
    out = tmp_path_factory.mktemp("replaced")
    started: list[RayWorkers] = []
    faults = KILLED if "t2" in request.param else FAULTS
    faults = WITH_TWO_TRAINERS if "two-trainers" in request.param else faults
    workers = range(faults[-1][1] + 1)
    found = Struck(request.param, faults)

    def ask(worker: int, question: Callable[[Any], Any]) -> Any:
        return ray.get(started[0]._actors[worker].__ray_call__.remote(question))

    def pid(worker: int) -> int:
        process: int = ask(worker, lambda _: os.getpid())
        return process

    def strike() -> None:
        for step, worker, number in found.faults:
            while num_steps(out) < step:
                time.sleep(0.05)
            found.processes.append([pid(worker) for worker in workers])
            os.kill(found.processes[-1][worker], number)
            while num_steps(out) < step + 4:  # more than it could train without new weights for the engines
                time.sleep(0.05)
        found.processes.append([pid(worker) for worker in workers])
        found.variables = [ask(worker, lambda _: os.environ.get("HFLOW_TEST")) for worker in workers]

    def make(*arguments: object) -> RayWorkers:
        made = make_workers(*arguments)  # type: ignore[arg-type]
        assert isinstance(made, RayWorkers)
        started.append(made)
        return made

    overrides = [
        *("models.actor.path=null", "models.actor.optim.lr=1e-3", "nodes.eval_gen.after=1000"),
        *("cluster=cpu-1x3", "placement=actor=0 actor.gen=1-2", "save_minutes=0", "faults.hang_seconds=8"),
        "env.HFLOW_TEST=set",
        *CASES[found.case],
        *(f"steps={STEPS}", f"batch={BATCH}", f"out={out}"),
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attempts, "make_workers", make)
        threading.Thread(target=strike, daemon=True).start()
        found.summary = run_recipe.run_compiled(compile_recipe(RECIPE, overrides), False)
    assert len(started) == 1, "all workers were started again"
    return found


def num_steps(out: Path) -> int:
    """Return the completed steps of the run in a directory."""
    files = list(out.glob("*/2*/metrics.jsonl"))
    return sum("time/step_seconds" in row for row in read_metrics(files[0])) if files else 0


def test_only_the_worker_that_failed_gets_another_process(struck: Struck) -> None:
    for before, after, (_, struck_worker, _) in zip(
        struck.processes[:-1], struck.processes[1:], struck.faults, strict=True
    ):
        changed = [i for i, (old, new) in enumerate(zip(before, after, strict=True)) if old != new]
        assert changed == [struck_worker]


def test_every_worker_has_the_configured_environment(struck: Struck) -> None:
    assert struck.variables == ["set"] * len(struck.processes[0])


def test_nothing_is_lost(struck: Struck) -> None:
    assert struck.summary is not None
    assert audit(struck.summary.directory / "ledger.sqlite") == []
    assert struck.summary.sample_ends["trained"] == STEPS * BATCH * GROUP_SIZE
    assert struck.summary.steps == STEPS


def test_the_copies_are_removed_and_the_texts_are_kept(struck: Struck) -> None:
    assert struck.summary is not None
    run = RunDirectory(struck.summary.directory)
    assert not run.sample_log.exists()
    assert {int(path.stem.removeprefix("step-")) for path in run.samples.iterdir()} == {*range(1, STEPS + 1)}


def test_one_line_says_what_happened(struck: Struck) -> None:
    assert struck.summary is not None
    died, stopped = (line for line in struck.summary.warnings if line.startswith("worker "))
    first, second = (worker for _, worker, _ in struck.faults)
    assert died.startswith(f"worker {first} died while ")
    assert died.endswith("actor@gen is started again while the run continues (1 of 3)")
    is_stopped = struck.faults is not KILLED
    assert stopped.startswith(
        f"worker {second} {'has not answered for 8 s' if is_stopped else 'died'} while "
    )
    assert stopped.endswith("actor@gen is started again while the run continues (2 of 3)")


def test_the_engines_hold_the_weights_that_were_sent(struck: Struck) -> None:
    """Each version was committed by its checksum, which all engines of one rank have in common."""
    assert struck.summary is not None
    with closing(sqlite3.connect(struck.summary.directory / "ledger.sqlite")) as ledger:
        committed = ledger.execute("SELECT version, digest FROM commits ORDER BY seq").fetchall()
    versions = [version for version, _ in committed]
    assert versions == sorted(versions)
    assert max(versions) >= STEPS - 2
    if "t2" not in struck.case:
        assert {len(checksum) for _, checksum in committed} == {16}


def test_a_new_engine_is_sent_whole_weights(struck: Struck) -> None:
    """Changes are sent only to engines that have the version before."""
    assert struck.summary is not None
    trace = json.loads((struck.summary.directory / "trace.json").read_text())
    spans = sorted((s for s in trace["traceEvents"] if s.get("ph") == "X"), key=lambda span: span["ts"])
    published = [span for span in spans if span["name"] == "publish actor@gen"]
    replaced = [span for span in spans if span["name"] == "replace actor@gen"]
    assert len(replaced) == len(struck.faults)
    assert ("delta" in struck.case) == any(
        span["args"].get("changes_since") is not None for span in published
    )
    for fault in replaced:
        first = next(span for span in published if span["ts"] > fault["ts"])
        assert first["args"].get("changes_since") is None
