"""What commands name: runs, their checkpoints, and models."""

import re
from pathlib import Path

import pytest

from hflow.base.errors import ConfigError
from hflow.launch.results.ledger import why
from hflow.launch.targets import resolve

RUN = "runs/ppo/20260131-142500"


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run with a checkpoint of two models, and a model of no run."""
    monkeypatch.chdir(tmp_path)
    for name in ("actor", "critic"):
        (tmp_path / RUN / "checkpoints" / "step-2" / name).mkdir(parents=True)
        (tmp_path / RUN / "checkpoints" / "step-2" / name / "config.json").write_text("{}")
    (tmp_path / RUN / "checkpoints" / "latest").symlink_to("step-2")
    (tmp_path / RUN / "plan.json").write_text("{}")
    (tmp_path / "runs" / "ppo" / "latest").symlink_to("20260131-142500")
    (tmp_path / "models" / "tiny").mkdir(parents=True)
    (tmp_path / "models" / "tiny" / "config.json").write_text("{}")
    return tmp_path.resolve()


@pytest.mark.parametrize("target", ["ppo", "runs/ppo", "runs/ppo/latest", RUN])
def test_a_run(target: str, directory: Path) -> None:
    found = resolve(target)
    assert (found.kind, found.steps, sorted(found.models)) == ("run", 2, ["actor", "critic"])
    assert found.require_run().path.resolve() == directory / RUN
    assert found.checkpoint == directory / RUN / "checkpoints" / "step-2"


@pytest.mark.parametrize(
    ("target", "kind", "models"),
    [
        (f"{RUN}/checkpoints/step-2", "checkpoint", ["actor", "critic"]),
        ("runs/ppo/latest/checkpoints/latest", "checkpoint", ["actor", "critic"]),
        (f"{RUN}/checkpoints/step-2/actor", "model", ["actor"]),
    ],
)
def test_a_part_of_a_run(target: str, kind: str, models: list[str], directory: Path) -> None:
    found = resolve(target)
    assert (found.kind, found.steps, sorted(found.models)) == (kind, 2, models)
    assert found.run is not None
    assert found.run.path == directory / RUN
    with pytest.raises(ConfigError, match=f"is a {kind} of a run; name the run, {directory / RUN}"):
        found.require_run()


@pytest.mark.parametrize("target", ["models/tiny", "models"])
def test_models_of_no_run(target: str, directory: Path) -> None:
    found = resolve(target)
    assert (found.run, found.checkpoint, found.steps) == (None, None, None)
    assert found.choose_model(None) == directory / "models" / "tiny"
    with pytest.raises(ConfigError, match=r"has no plan\.json, so it is not a run's directory"):
        found.require_run()


@pytest.mark.usefixtures("directory")
def test_mistakes() -> None:
    with pytest.raises(ConfigError, match=r"there is no run 'pppo'; give .*; did you mean 'ppo'"):
        resolve("pppo").require_run()
    with pytest.raises(ConfigError, match="there is no checkpoint or run 'pppo'; give a directory with"):
        resolve("pppo").require_models()
    with pytest.raises(ConfigError, match=re.escape("step-9; there are step-2")):
        resolve(f"{RUN}/checkpoints/step-9")
    with pytest.raises(ConfigError, match="'ppo' has actor, critic; choose one with --model NAME"):
        resolve("ppo").choose_model(None)
    with pytest.raises(ConfigError, match="'ppo' has no model 'actr'; did you mean 'actor'"):
        resolve("ppo").choose_model("actr")
    with pytest.raises(ConfigError, match=r"has no ledger\.sqlite; name another run"):
        why("ppo", "1")


def test_a_shipped_checkpoint_is_a_model() -> None:
    found = resolve("hflow:addition")
    assert (found.kind, found.run, [*found.models]) == ("model", None, ["addition"])
    with pytest.raises(ConfigError, match="the checkpoints that come with hflow are hflow:addition"):
        resolve("hflow:additions")
