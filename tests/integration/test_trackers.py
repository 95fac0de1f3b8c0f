"""Trackers and observers: what reaches them, over a resume, and that a failing one does not end a run."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
from runs import TINY, run, steps_of

from hflow.base.errors import ConfigError, PlanError, RecipeError
from hflow.config.schema import ReportConfig
from hflow.launch.planning.read_recipe import read_recipe
from hflow.launch.running.observer_thread import ObserverThread
from hflow.launch.running.run_recipe import resume
from hflow.launch.running.trackers import check_trackers
from hflow.observer import RunInfo
from hflow.runtime.records.run_summary import RunSummary
from hflow.trackers.mlflow import MlflowTracker

RECIPE = '''"""SFT with an observer of one's own."""

from hflow import Dataset, Model, Observer, Recipe, Text, nodes, use

train = Dataset("train", prompt=Text, answer=Text)
actor = Model("actor", trainable=True)
CALLS = []


class Listed(Observer):
    def start(self, run):
        CALLS.append(("start", run.name, run.is_resumed, run.config["seed"]))

    def on_step(self, step, values):
        CALLS.append(("step", step, values["actor_train/loss"]))

    def on_end(self, reason):
        CALLS.append(("end", reason))


class Broken(Observer):
    def on_step(self, step, values):
        raise OSError("the disk is full, " + "SECRET")


recipe = Recipe(
    "tracked",
    train,
    [use(nodes.sft_view, actor), use(nodes.sft_train, actor, name="actor_train")],
    observers=[Listed(), Broken()],
)
'''
ASKED = [
    *(setting for setting in TINY if "actor_gen" not in setting),
    *("workers=inproc", "cluster=cpu-1x1", "batch=4", "models.actor.architecture.hidden_size=32"),
]
RETRIES = "MLFLOW_HTTP_REQUEST_MAX_RETRIES"
SECRET = "not-for-the-tracker-0123"


Tracked = tuple[RunSummary, Path, list[Any]]


@pytest.fixture(scope="module")
def tracked(tmp_path_factory: pytest.TempPathFactory) -> Tracked:
    """A run of two steps, and of two more after a resume, with both trackers; and its observer's calls."""
    directory = tmp_path_factory.mktemp("tracked")
    recipe = directory / "tracked.py"
    recipe.write_text(RECIPE.replace("SECRET", SECRET))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "offline")
        patch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # a database takes seconds to make
        patch.setenv("SERVICE_API_KEY", SECRET)
        trackers = ["report.wandb=team/project", f"report.mlflow=file://{directory / 'mlruns'}"]
        summary = run(recipe, directory / "runs", *ASKED, *trackers, "steps=2")
        calls = list(sys.modules["hflow_recipe_tracked"].CALLS)
        again = resume(str(summary.directory), ["steps=4"], False)
        calls += sys.modules["hflow_recipe_tracked"].CALLS
    return again, directory, calls


def losses(summary: RunSummary) -> list[float]:
    return [row["actor_train/loss"] for row in steps_of(summary)]


def test_an_observer_receives_both_parts_of_a_run(tracked: Tracked) -> None:
    summary, _, calls = tracked
    steps = [("step", step + 1, loss) for step, loss in enumerate(losses(summary))]
    starts = [("start", "tracked", False, 0), ("start", "tracked", True, 0)]
    assert calls == [starts[0], *steps[:2], ("end", "done"), starts[1], *steps[2:], ("end", "done")]


def test_an_observer_that_fails_is_warned_of_and_does_not_end_the_run(tracked: Tracked) -> None:
    summary, _, _ = tracked
    assert summary.reason == "done"
    assert [w for w in summary.warnings if "Broken" in w] == [
        "Broken failed and is off: OSError: the disk is full, $SERVICE_API_KEY"
    ]


def test_mlflow_continues_one_run(tracked: Tracked, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow import MlflowClient

    summary, directory, _ = tracked
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    client = MlflowClient(tracking_uri=f"file://{directory / 'mlruns'}")
    experiment = client.get_experiment_by_name("tracked")
    assert experiment is not None
    (found,) = client.search_runs([experiment.experiment_id])
    history = client.get_metric_history(found.info.run_id, "actor_train/loss")
    assert [(metric.step, metric.value) for metric in history] == list(enumerate(losses(summary), 1))
    assert (found.info.status, found.data.params["batch"]) == ("FINISHED", "4")
    assert found.data.params["steps"] == "2", "MLflow's parameters cannot change"
    changed = {key: value for key, value in found.data.tags.items() if key.startswith("resumed.")}
    assert changed == {"resumed.steps": "4"}


def test_mlflow_logs_to_a_local_database(tmp_path: Path) -> None:
    from mlflow import MlflowClient

    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    check_trackers(ReportConfig(mlflow=uri))
    tracker = MlflowTracker(uri)
    tracker.start(RunInfo("local", tmp_path, 1, {"batch": 4}, False))
    tracker.on_step(1, {"actor_train/loss": 0.5})
    tracker.on_end("done")
    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("local")
    assert experiment is not None
    (found,) = client.search_runs([experiment.experiment_id])
    assert (found.info.status, found.data.metrics) == ("FINISHED", {"actor_train/loss": 0.5})


def test_wandb_continues_one_run(tracked: Tracked) -> None:
    summary, _, _ = tracked
    parts = sorted((summary.directory / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(parts) == 2
    assert len({part.name for part in parts}) == 1
    for part in parts:
        assert b"actor_train/loss" in part.read_bytes()


def test_no_secret_reaches_a_tracker(tracked: Tracked) -> None:
    summary, directory, _ = tracked
    roots = [summary.directory / "wandb", directory / "mlruns"]
    files = [file for root in roots for file in root.rglob("*") if file.is_file()]
    assert files
    assert [file for file in files if SECRET.encode() in file.read_bytes()] == []


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    file = tmp_path / "tracked.py"
    file.write_text(RECIPE)
    return file


@pytest.mark.parametrize("tracker", ["wandb", "mlflow"])
def test_a_missing_tracker_is_named_when_the_recipe_is_read(
    recipe: Path, tracker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hflow.dsl.bodies.find_spec", lambda package: None)
    message = rf"report.{tracker} is set, but it needs {tracker}: pip install 'hflow-rl\[{tracker}\]'"
    with pytest.raises(ConfigError, match=message):
        read_recipe(recipe, [*ASKED, f"report.{tracker}=x"])


def test_a_missing_database_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hflow.dsl.bodies.find_spec", lambda package: package == "mlflow" or None)
    check_trackers(ReportConfig(mlflow="http://host:5000"))
    with pytest.raises(ConfigError, match=r"needs sqlalchemy, alembic: pip install 'hflow-rl\[mlflow\]'"):
        check_trackers(ReportConfig(mlflow="sqlite:///mlflow.db"))


def test_a_tracker_is_named_once() -> None:
    with pytest.raises(ConfigError, match=r"report.trackers.wandb has no effect. Set report.wandb"):
        check_trackers(ReportConfig(trackers={"wandb": "project"}))
    with pytest.raises(PlanError, match=r"unknown tracker 'wandbb'; did you mean 'wandb'"):
        check_trackers(ReportConfig(trackers={"wandbb": "project"}))


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        (
            "http://127.0.0.1:PORT",
            "nothing answers there; start the server, correct the address, or remove the key",
        ),
        ("http://a..b:1", "nothing answers there; start the server, correct the address, or remove the key"),
        ("http://host:70000", "Port out of range 0-65535; write http://HOST:PORT"),
    ],
)
def test_an_mlflow_server_that_does_not_answer_is_refused(
    recipe: Path, tmp_path: Path, uri: str, message: str
) -> None:
    with socket.socket() as unused:  # bound, but it does not listen
        unused.bind(("127.0.0.1", 0))
        uri = uri.replace("PORT", str(unused.getsockname()[1]))
        with pytest.raises(ConfigError) as refusal:
            run(recipe, tmp_path / "runs", *ASKED, f"report.mlflow={uri}", "steps=1")
    assert str(refusal.value) == f"report.mlflow={uri}: {message}"
    assert list((tmp_path / "runs").iterdir()) == []


@pytest.mark.parametrize(("asked", "expected"), [(None, "3"), ("9", "9")])
def test_an_error_of_mlflow_names_the_key_and_retries_are_few(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: str | None, expected: str
) -> None:
    monkeypatch.setenv(RETRIES, "")  # restored after the test
    monkeypatch.delenv(RETRIES)
    if asked is not None:
        monkeypatch.setenv(RETRIES, asked)
    observers = ObserverThread([MlflowTracker(f"odd://{'x' * 1000}")])
    with pytest.raises(ConfigError) as refusal:
        observers.start(RunInfo("odd", tmp_path, 1, {}, False))
    assert str(refusal.value).startswith("report.mlflow cannot start: ")
    assert len(str(refusal.value)) < 400
    assert os.environ[RETRIES] == expected


def test_a_password_in_the_address_of_a_tracker_is_refused(recipe: Path) -> None:
    with pytest.raises(ConfigError, match=r"report.mlflow is a secret") as caught:
        read_recipe(recipe, [*ASKED, "report.mlflow='https://me:hunter22@host'"])
    assert "hunter22" not in str(caught.value)


def test_what_is_no_observer_is_refused(recipe: Path) -> None:
    recipe.write_text(RECIPE.replace("Broken()]", "Broken]"))
    with pytest.raises(RecipeError, match=r"is not an observer. Pass an instance"):
        read_recipe(recipe, ASKED)


def test_wandb_without_a_login_is_refused_and_the_latest_run_stays(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    runs = tmp_path / "runs" / "tracked"
    (runs / "earlier").mkdir(parents=True)
    (runs / "latest").symlink_to("earlier")
    with pytest.raises(ConfigError, match=r"there is no login; run `wandb login`"):
        run(recipe, tmp_path / "runs", *ASKED, "report.wandb=project", "steps=1")
    assert {path.name for path in runs.iterdir()} == {"earlier", "latest"}
    assert (runs / "latest").resolve() == runs / "earlier"
    with pytest.raises(ConfigError, match=r"there is no login"):
        run(recipe, tmp_path / "other", *ASKED, "report.wandb=project", "steps=1")
    assert list((tmp_path / "other").iterdir()) == []
