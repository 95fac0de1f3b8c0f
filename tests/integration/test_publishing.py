"""New weights on their way to engines with devices of their own, in runs in this process."""

from __future__ import annotations

import dataclasses
import json
import sqlite3
import threading
from pathlib import Path
from typing import Any

import pytest
from runs import ROOT, run, steps_of, weights_of

from hflow.base.errors import RunError
from hflow.engines.embedded.engine import EmbeddedEngine
from hflow.engines.interface import EngineSetup
from hflow.launch.planning.compile import compile_recipe
from hflow.launch.running.run_recipe import RunEnvironment, run_compiled
from hflow.planner.models.descriptors import factories
from hflow.runtime.records.run_summary import RunSummary
from hflow.training.fsdp.backend import TorchModel
from hflow.weights.buckets import Bucket
from hflow.weights.channels.disk.channel import DiskChannel
from hflow.weights.channels.memory.channel import MemoryChannel
from hflow.weights.loading import LoadedWeights

RECIPE = "recipes/grpo_async.py"
GRPO = ["workers=inproc", "models.actor.path=null", "batch=4", "nodes.eval_gen.every=3"]
GRPO += ["data.heldout.limit=4", "models.actor.optim.warmup_steps=0", "models.actor.optim.weight_decay=0.1"]
DISK = "models.actor.gen.transport=disk"


def commits(summary: RunSummary) -> list[tuple[str, int, str]]:
    database = sqlite3.connect(summary.directory / "ledger.sqlite")
    try:
        return database.execute("SELECT replica, version, digest FROM commits ORDER BY seq").fetchall()
    finally:
        database.close()


def test_weights_published_by_disk_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every version has one digest, another than the others; the files are gone at the end."""
    taken: list[Path] = []
    receive = DiskChannel.receive

    def noted(self: DiskChannel, handle: Any, receiver: int) -> Bucket:
        taken.append(Path(handle.path))
        return receive(self, handle, receiver)

    monkeypatch.setattr(DiskChannel, "receive", noted)
    options = [*GRPO, "steps=3", "schedule.max_staleness=0"]
    store = run(RECIPE, tmp_path / "store", *options)
    assert not taken
    disk = run(RECIPE, tmp_path / "disk", *options, DISK)
    assert {path.parent for path in taken} == {disk.directory.resolve() / "weights"}
    assert not (disk.directory / "weights").exists()
    assert commits(store) == commits(disk)
    assert [(name, version) for name, version, _ in commits(disk)] == [("actor@gen", v) for v in range(4)]
    assert len({digest for _, _, digest in commits(disk)}) == 4
    ours, theirs = weights_of(disk), weights_of(store)
    assert all(ours[name].equal(theirs[name]) for name in ours.keys() | theirs.keys())
    losses = [[row["actor_train/loss"] for row in steps_of(summary)] for summary in (store, disk)]
    assert losses[0] == losses[1]


@pytest.mark.long
def test_changes_make_the_same_versions(tmp_path: Path) -> None:
    """Every version after the first is sent as changes, in fewer bytes, and has the same digest."""
    options = [*GRPO, "steps=3", "schedule.max_staleness=0", "models.actor.dtype=bf16"]
    options += ["models.actor.optim.lr=1e-3"]
    whole = run(RECIPE, tmp_path / "whole", *options)
    changes = run(RECIPE, tmp_path / "changes", *options, "models.actor.gen.delta=true")
    assert commits(whole) == commits(changes)
    assert len({digest for _, _, digest in commits(changes)}) == 4
    spans = json.loads((changes.directory / "trace.json").read_text())["traceEvents"]
    published = [span["args"] for span in spans if span["name"] == "publish actor@gen"]
    assert [args.get("changes_since") for args in published] == [None, 0, 1, 2]
    assert published[0]["bytes"] > 2 * published[1]["bytes"] > 0


def flipped(bucket: Bucket) -> Bucket:
    payload = bucket.payload.clone()
    payload[1] ^= 4
    return dataclasses.replace(bucket, payload=payload)


@pytest.mark.first(1)
@pytest.mark.parametrize("transport", ["store", "disk"])
def test_corrupted_weights_stop_the_run(
    transport: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind: Any = DiskChannel if transport == "disk" else MemoryChannel
    receive = kind.receive
    monkeypatch.setattr(kind, "receive", lambda self, *args: flipped(receive(self, *args)))
    refused = r"of 'model.embed_tokens.weight' was received with checksum \w{16}, but was sent with \w{16}"
    with pytest.raises(RunError, match=refused):
        run(RECIPE, tmp_path, *GRPO, "steps=2", f"models.actor.gen.transport={transport}")
    (directory,) = (path for path in (tmp_path / "grpo_async").iterdir() if not path.is_symlink())
    assert not (directory / "weights").exists()


def test_the_trainer_continues_while_the_engine_loads(tmp_path: Path) -> None:
    """The engine has loaded version 1 only when the step that starts from it has been trained."""
    trained = threading.Event()

    class Trainer(TorchModel):
        def train(self, call: Any, shards: Any, step: int) -> dict[str, float]:
            metrics = super().train(call, shards, step)
            if step == 1:
                trained.set()
            return metrics

    class Engine(EmbeddedEngine):
        def load_weights(self, incoming: Any, version: int) -> LoadedWeights:
            assert version != 1 or trained.wait(120), "step 1 waits until version 1 is loaded"
            return super().load_weights(incoming, version)

    def build_engine(setup: EngineSetup) -> Engine:
        assert setup.tokenizer is not None
        return Engine(setup.settings, setup.options, setup.module, setup.tokenizer.decode)

    compiled = compile_recipe(
        ROOT / RECIPE, [f"out={tmp_path}", *GRPO, "steps=5", "schedule.max_staleness=2"]
    )
    means = RunEnvironment(
        factories={**factories(), "torch": Trainer, "embedded": build_engine}, is_quiet=True
    )
    summary = run_compiled(compiled, False, means)
    assert summary.steps == 5
    versions = [version for _, version, _ in commits(summary)]
    assert versions == sorted(set(versions))
    assert 1 in versions
