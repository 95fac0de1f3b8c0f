"""Names that other installed packages add: `tests/kits/extension` is one, as a directory on `sys.path`."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from runs import run

from hflow.base.errors import PlanError
from hflow.base.registry import Registry
from hflow.planner.plan.channels import CHANNELS, ChannelKind, channel_kind
from hflow.trackers.registry import TRACKERS

EXTENSION = Path(__file__).parents[1] / "kits" / "extension"
OWN = {"store": "hflow.weights.channels.store.descriptor:CHANNEL"}


@pytest.fixture
def extension(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(EXTENSION))
    for registry in (CHANNELS, TRACKERS):
        registry.__dict__.pop("_added", None)
    yield
    for registry in (CHANNELS, TRACKERS):
        registry.__dict__.pop("_added", None)
    channel_kind.cache_clear()


def channels(own: dict[str, str] = OWN) -> Registry:
    return Registry("weight channel", "hflow.channels", own)


def test_a_package_adds_a_channel_and_a_tracker_that_a_run_uses(extension: None, tmp_path: Path):
    options = ["cluster=cpu-1x2", "workers=inproc", "placement=actor=0 actor.gen=1", "steps=2", "batch=4"]
    summary = run(
        "recipes/grpo.py",
        tmp_path,
        *options,
        "models.actor.path=null",
        "models.actor.gen.transport=mailbox",
        f"report.trackers.file={tmp_path / 'steps'}",
    )
    from hflow_extension import SENT

    assert summary.steps == 2
    assert SENT
    assert (tmp_path / "steps").read_text() == "1\n2\n"


def test_all_names_are_listed_with_those_of_other_packages_last(extension: None):
    assert [*channels()] == ["store", "mailbox"]
    assert "mailbox" in channels()


def test_an_unknown_name_is_refused_with_the_nearest(extension: None):
    message = r"unknown weight channel 'mailbx'; did you mean 'mailbox'\? \(known: store, mailbox\)"
    with pytest.raises(PlanError, match=message):
        channels().load("mailbx")


def test_a_name_of_hflows_own_is_refused(extension: None):
    with pytest.raises(PlanError, match="packages hflow-rl and hflow-extension both have a weight channel"):
        list(channels({"mailbox": OWN["store"]}))


def test_a_name_of_two_packages_is_refused(extension: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    other = tmp_path / "other-1.0.dist-info"
    shutil.copytree(EXTENSION / "hflow_extension-1.0.dist-info", other)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(PlanError, match="Uninstall one of them") as error:
        list(channels())
    assert "hflow-extension" in str(error.value)
    assert "other" in str(error.value)


def test_what_cannot_be_imported_names_its_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    shutil.copytree(EXTENSION / "hflow_extension-1.0.dist-info", tmp_path / "hflow_extension-1.0.dist-info")
    entry_points = tmp_path / "hflow_extension-1.0.dist-info" / "entry_points.txt"
    entry_points.write_text("[hflow.channels]\nmailbox = an_absent_module:CHANNEL\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(PlanError, match="of the package hflow-extension cannot be imported"):
        channels().load("mailbox")


def test_what_is_no_descriptor_names_its_package(extension: None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("hflow_extension.CHANNEL", "a text")
    with pytest.raises(PlanError, match="of the package hflow-extension is no ChannelKind with that name"):
        channels().describe("mailbox", ChannelKind)
