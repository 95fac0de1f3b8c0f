"""Models of the Hugging Face Hub, fetched by the real client from a local server."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub.constants
import pytest
from command_line import CommandLine
from hub_server import HubServer, Repository, hub_server
from safetensors.numpy import load_file, save_file

from hflow.base.errors import ConfigError
from hflow.base.shipped import shipped_directory
from hflow.launch.checkpoints.served import find_checkpoint
from hflow.models import hub as hub_module
from hflow.models.hub import (
    HubModel,
    fetch_description,
    fetch_model,
    has_weights,
    hub_model,
    local_directory,
    pinned_path,
)

KEY = "models.actor.path"
CHECKPOINT = shipped_directory("configs") / "checkpoints" / "addition"
NAME = "acme/addition"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """Give a server with one model, and an empty cache."""
    with hub_server() as server:
        server.add(NAME, CHECKPOINT)
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", server.endpoint)
        monkeypatch.setattr(
            huggingface_hub.constants,
            "HUGGINGFACE_CO_URL_TEMPLATE",
            server.endpoint + "/{repo_id}/resolve/{revision}/{filename}",
        )
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        monkeypatch.delenv("HF_TOKEN", raising=False)
        monkeypatch.chdir(tmp_path)
        hub_module._fetched_description.cache_clear()
        yield server
        hub_module._fetched_description.cache_clear()


def test_what_names_a_model_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    assert hub_model("Qwen/Qwen3-0.6B") == HubModel("Qwen/Qwen3-0.6B", None)
    assert hub_model("Qwen/Qwen3-0.6B@v1.0") == HubModel("Qwen/Qwen3-0.6B", "v1.0")
    assert hub_model("runs/actor") is None  # as the directory runs is here
    for path in (None, "Qwen3-0.6B", "./Qwen/Qwen3", "/models/Qwen3", "a/b/c", "../a/b", "~/models", "a/b@"):
        assert hub_model(path) is None, path


def test_a_plan_fetches_the_description_and_pins_the_commit(hub: HubServer) -> None:
    pinned = pinned_path(NAME, KEY)
    commit = hub.models[NAME].branches["main"]
    assert pinned == f"{NAME}@{commit}"
    assert (
        local_directory(pinned).joinpath("tokenizer.json").read_bytes()
        == (CHECKPOINT / "tokenizer.json").read_bytes()
    )
    assert "model.safetensors" not in hub.downloads()
    assert not has_weights(pinned)
    assert pinned_path(pinned, KEY) == pinned


def test_weights_are_fetched_once(hub: HubServer) -> None:
    pinned = pinned_path(NAME, KEY)
    directory = fetch_model(pinned, KEY)
    assert has_weights(pinned)
    stored, expected = load_file(directory / "model.safetensors"), load_file(CHECKPOINT / "model.safetensors")
    assert stored.keys() == expected.keys()
    assert all((stored[name] == expected[name]).all() for name in expected)
    hub.requests.clear()
    assert fetch_model(pinned, KEY) == directory
    assert hub.downloads() == []


def test_only_the_files_of_the_index_are_fetched(hub: HubServer, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(CHECKPOINT, source)
    weights = load_file(source / "model.safetensors")
    (source / "model.safetensors").unlink()
    names = sorted(weights)
    parts = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for file, tensors in parts.items():
        save_file({name: weights[name] for name in tensors}, source / file)
    weight_map = {name: file for file, tensors in parts.items() for name in tensors}
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (source / "consolidated.safetensors").write_bytes(b"the same weights again")
    (source / "pytorch_model.bin").write_bytes(b"and again")
    hub.add("acme/parts", source)
    fetch_model(pinned_path("acme/parts", KEY), KEY)
    fetched = [name for name in hub.downloads() if not name.endswith(".json")]
    assert sorted(fetched) == sorted(parts)


def test_a_revision_is_the_commit_that_it_was(hub: HubServer) -> None:
    before = pinned_path(NAME, KEY)
    repository = hub.models[NAME]
    files = dict(repository.commits[repository.branches["main"]])
    config = json.loads(files["config.json"])
    after_commit = repository.commit({**files, "config.json": json.dumps({**config, "note": "new"}).encode()})
    assert json.loads((fetch_description(before, KEY) / "config.json").read_text()) == config
    hub_module._fetched_description.cache_clear()  # as in another process
    assert pinned_path(NAME, KEY) == f"{NAME}@{after_commit}"


def test_models_with_the_same_path_are_the_same_commit(hub: HubServer) -> None:
    first = pinned_path(NAME, KEY)
    repository = hub.models[NAME]
    repository.commit({**repository.commits[repository.branches["main"]], "note.txt": b"new"})
    assert pinned_path(NAME, "models.ref.path") == first


def test_without_a_network_the_cache_is_used(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    pinned = pinned_path(NAME, KEY)
    fetch_model(pinned, KEY)
    hub_module._fetched_description.cache_clear()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    hub.requests.clear()
    assert pinned_path(NAME, KEY) == pinned
    assert fetch_model(pinned, KEY) == local_directory(pinned)
    assert hub.requests == []


def test_a_private_model_needs_its_token(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("acme/private", CHECKPOINT, token="hf_secret")
    with pytest.raises(ConfigError, match="HF_TOKEN if it is private"):
        pinned_path("acme/private", KEY)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert pinned_path("acme/private", KEY).startswith("acme/private@")


def _gate(hub: HubServer) -> None:
    hub.models[NAME].is_gated = True


def _fail(hub: HubServer) -> None:
    hub.problem = 403


def _take_config(hub: HubServer) -> None:
    repository = hub.models[NAME] = Repository()
    repository.commit({"README.md": b"no model"})


@pytest.mark.parametrize(
    ("path", "change", "message"),
    [
        ("acme/nothing", None, "neither a directory here nor a model of the Hub"),
        (f"{NAME}@v2", None, "has no such revision; write acme/addition@"),
        (NAME, _gate, "is gated; ask for access"),
        (NAME, _fail, "the Hub answers: .*403"),
        (NAME, _take_config, "has no config.json on the Hub"),
        ("hf:acme/addition", None, "write acme/addition, as hf: is for datasets"),
        ("acme/a--b", None, "nor a name on the Hub"),
    ],
)
def test_refusals_name_the_key_and_the_fix(hub: HubServer, path: str, change: object, message: str) -> None:
    if callable(change):
        change(hub)
    with pytest.raises(ConfigError, match=message) as raised:
        pinned_path(path, KEY)
    assert str(raised.value).startswith(f"{KEY} is {path}")
    assert "\n" not in str(raised.value)


def test_a_hub_that_is_not_reached(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ConfigError, match=r"http://127.0.0.1:9 is not reached: .*; correct it, or check"):
        pinned_path(NAME, KEY)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE is set; unset it"):
        pinned_path(NAME, KEY)


def test_a_model_without_safetensors(hub: HubServer, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(CHECKPOINT, source)
    (source / "model.safetensors").rename(source / "pytorch_model.bin")
    hub.add("acme/old", source)
    with pytest.raises(ConfigError, match=r"has no model\.safetensors on the Hub"):
        fetch_model(pinned_path("acme/old", KEY), KEY)


def test_a_run_trains_a_model_of_the_hub_and_keeps_its_commit(hub: HubServer, hflow: CommandLine) -> None:
    arguments = (
        "run",
        "grpo",
        f"{KEY}={NAME}",
        "workers=inproc",
        "steps=1",
        "batch=4",
        "nodes.eval_gen.every=9",
    )
    hflow.prints(*arguments)
    commit = hub.models[NAME].branches["main"]
    assert f"path: {NAME}@{commit}" in Path("runs/grpo/latest/config.yaml").read_text()
    assert hub.downloads().count("model.safetensors") == 1
    saved = Path("runs/grpo/latest/checkpoints/latest/actor")
    assert (saved / "tokenizer.json").read_bytes() == (CHECKPOINT / "tokenizer.json").read_bytes()


def test_an_adapter_names_its_model_of_the_hub(hub: HubServer, hflow: CommandLine) -> None:
    small = ("workers=inproc", "cluster=cpu-1x1", "steps=1", "batch=4", "nodes.eval_gen.every=9")
    hflow.prints("run", "grpo", f"{KEY}={NAME}", "models.actor.lora.r=4", *small)
    saved = json.loads(Path("runs/grpo/latest/checkpoints/latest/actor/adapter_config.json").read_text())
    commit = hub.models[NAME].branches["main"]
    assert (saved["base_model_name_or_path"], saved["revision"]) == (NAME, commit)
    hflow.prints("export", "grpo", "merged")
    assert Path("merged/model.safetensors").is_file()


def test_a_plan_with_an_architecture_needs_no_hub(
    hub: HubServer, hflow: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    setup = ("gsm8k/grpo", "setup=qwen3-4b-8x80g", "models.actor.path=Qwen/Qwen3-4B")
    printed = hflow.prints("plan", *setup, "model@models.actor=qwen3-4b")
    assert "Its sizes are those of the architecture; a run needs the model" in " ".join(printed.split())
    refused = hflow.refused("plan", *setup)
    assert "HF_HUB_OFFLINE is set" in refused
    assert "A plan needs only its sizes, as model@models.actor=" in refused


def test_a_plan_made_without_a_network_runs_with_one(
    hub: HubServer, hflow: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = ("grpo", f"{KEY}={NAME}", "model@models.actor=tiny-qwen2", "workers=inproc", "cluster=cpu-1x1")
    with monkeypatch.context() as offline:
        offline.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        short = ("steps=1", "batch=4", "nodes.eval_gen.every=9")
        Path("lock.json").write_text(hflow.prints("plan", *small, *short, "--json"))
    hflow.prints("run", "--plan", "lock.json")
    pinned = f"path: {NAME}@{hub.models[NAME].branches['main']}"
    assert pinned in Path("runs/grpo/latest/config.yaml").read_text()


def _rows(first: int) -> bytes:
    rows = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(first, first + 20)]
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def test_a_run_keeps_the_commit_of_its_rows(
    hub: HubServer, hflow: CommandLine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    datasets = pytest.importorskip("datasets")
    rows = hub.datasets["acme/rows"] = Repository()
    first = rows.commit({"train.jsonl": _rows(10)})
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", hub.endpoint)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    data = ("data.train.generator=null", "data.train.path=hf:acme/rows", "batch=4", "nodes.eval_gen.every=9")
    hflow.prints("run", "grpo", *data, "workers=inproc", "steps=1")
    assert f"path: hf:acme/rows@{first}" in Path("runs/grpo/latest/config.yaml").read_text()
    second = rows.commit({"train.jsonl": _rows(50)})
    hflow.prints("run", "--resume", "grpo", "steps=2")
    assert f"path: hf:acme/rows@{first}" in Path("runs/grpo/latest/config.yaml").read_text()
    # Without a network the library would take the commit that it has.
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    other = f"data.train.path=hf:acme/rows@{second}"
    refused = hflow.fails("run", "grpo", "data.train.generator=null", other, "workers=inproc", "steps=1")
    assert f"which has commit {first} of it" in refused


@pytest.mark.long
def test_export_uploads_a_model_that_can_be_trained_again(
    hub: HubServer, hflow: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ("run", "grpo", "workers=inproc", "steps=1", "batch=4", "nodes.eval_gen.every=9")
    hflow.prints(*arguments)
    refused = hflow.fails("export", "grpo", "out", "--push", "me/trained")
    assert "--push is me/trained" in refused
    assert "HF_TOKEN" in refused
    assert not Path("out").exists()
    monkeypatch.setenv("HF_TOKEN", "hf_mine")
    assert "HF_TOKEN" in hflow.fails("export", "grpo", "out", "--push", "other/trained")
    assert "write OWNER/NAME" in hflow.fails("export", "grpo", "out", "--push", "trained")
    printed = hflow.prints("export", "grpo", "out", "--push", "me/trained")
    assert f"{hub.endpoint}/me/trained" in printed
    repository = hub.models["me/trained"]
    pushed = repository.commits[repository.branches["main"]]
    exported = {path.name: path.read_bytes() for path in Path("out").iterdir()}
    assert pushed == exported
    assert {path.stat().st_mode & 0o777 for path in Path("out").iterdir()} == {0o644}
    hflow.prints(*arguments, f"{KEY}=me/trained")


def test_a_model_of_the_hub_is_evaluated_served_and_exported(hub: HubServer, hflow: CommandLine) -> None:
    evaluated = json.loads(
        hflow.prints(
            *("eval", NAME, "--recipe", "grpo", "--json", "workers=inproc", "data.heldout.limit=8"),
        )
    )
    assert evaluated["streams"][0]["num_prompts"] == 8
    served = find_checkpoint(NAME, (), None)
    assert (served.name, served.directory) == (NAME, local_directory(pinned_path(NAME, KEY)))
    assert hflow.prints("export", f"{NAME}@main", "out").startswith(f"{NAME}@main: ")
    assert load_file("out/model.safetensors").keys() == load_file(CHECKPOINT / "model.safetensors").keys()
    assert not Path("out/model.safetensors").is_symlink()
    assert "neither a directory here nor a model of the Hub" in hflow.fails("serve", "acme/nothing")
    assert "there is no run 'acme/nothing'" in hflow.fails("report", "acme/nothing")
