"""`hflow serve` on a real checkpoint, with both engines, as a process that is stopped by signals."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
from command_line import CommandLine
from openai import OpenAI
from runs import run
from serve_kit import serving

from hflow.base.errors import ConfigError
from hflow.data.text.tokenizer import TextTokenizer, TokenizerSettings
from hflow.engines.vllm.memory import STEP_TOKENS
from hflow.launch.checkpoints.serve import _example
from hflow.launch.checkpoints.served import find_checkpoint
from hflow.planner.models.descriptors import engine_kind

JOINED = "{{ bos_token }}{% for message in messages %}{{ message.content }}{% endfor %}"
ASK: Any = [{"role": "user", "content": "17+25="}]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run."""
    small = ["workers=inproc", "cluster=cpu-1x1", "steps=1", "batch=4"]
    return run("recipes/tool_sft.py", tmp_path_factory.mktemp("runs"), *small).directory


def test_a_run_is_served_until_ctrl_c(finished: Path) -> None:
    with serving(finished) as served, served.client() as client:
        assert served.title.startswith("actor at http://127.0.0.1:")
        assert served.title.endswith("(engine embedded: the device is cpu)\n")
        assert served.run_example() >= 1
        assert [model.id for model in client.models.list()] == ["actor"]
        request: Any = {"model": "actor", "prompt": "17+25=", "max_tokens": 20}
        texts = [client.completions.create(**request, **seed).choices[0].text for seed in SEEDS]
        assert texts[0] == texts[1]
        assert len(set(texts)) == 3
        greedy = [client.completions.create(**request, temperature=0).choices[0].text for _ in range(2)]
        assert greedy[0] == greedy[1]
        whole = client.completions.create(model="actor", prompt="1=", temperature=0)
        assert whole.usage is not None
        assert whole.choices[0].finish_reason == "stop" or whole.usage.total_tokens == 128
        with pytest.raises(openai.BadRequestError, match="n=2 is not supported"):
            client.completions.create(**request, n=2)
        with pytest.raises(openai.BadRequestError, match="has no token for 'S'"):
            client.completions.create(model="actor", prompt="Say")
        with pytest.raises(openai.BadRequestError, match="no chat template"):
            client.chat.completions.create(model="actor", messages=ASK)
        code, errors = served.stop(signal.SIGINT)
    assert code == 130
    step = finished.resolve() / "checkpoints" / "step-1" / "actor"
    assert errors.replace("\n", "") == f"starting embedded on {step}"


@pytest.mark.parametrize(
    ("template", "content"), [(JOINED, "17+25="), (JOINED.replace("content }}", "content }}="), "17+25")]
)
def test_the_example_is_what_the_model_was_trained_on(template: str, content: str) -> None:
    """A template may append what ends a question."""
    tokenizer = TextTokenizer(TokenizerSettings(alphabet="0123456789+=", chat_template=template))
    example = _example("http://host/v1", "actor", tokenizer, None)
    body = json.loads(shlex.split(example)[-1])
    assert body["messages"] == [{"role": "user", "content": content}]


SEEDS: list[dict[str, Any]] = [{"seed": 3}, {"seed": 3}, {"seed": 4}, {}]


@pytest.mark.long
def test_keys_and_templates_of_a_checkpoint(finished: Path) -> None:
    checkpoint = finished / "checkpoints" / "latest" / "actor"
    changes = [f"chat_template={JOINED}", "gen.max_model_len=16"]
    with serving(checkpoint, *changes, "--api-key", "secret") as served:
        assert "Authorization: Bearer secret" in served.example
        assert served.run_example() >= 1
        with served.client("wrong") as client, pytest.raises(openai.AuthenticationError):
            client.models.list()
        with served.client("secret") as client:
            reply = client.chat.completions.create(model="actor", messages=ASK)
            assert reply.usage is not None
            assert reply.usage.total_tokens <= 16
            with pytest.raises(openai.BadRequestError, match="the engine takes 1 to 15"):
                client.completions.create(model="actor", prompt="1" * 20)
        assert served.stop(signal.SIGTERM)[0] == 0


@pytest.mark.long
@pytest.mark.slow
def test_vllm_serves_the_same_model(finished: Path, tmp_path: Path) -> None:
    """Greedy completions of both engines are equal, vLLM's follow from a seed, and none of it outlives the
    command. Both end turns at a token that only config.json names."""
    greedy: Any = {"model": "actor", "temperature": 0, "max_tokens": 12}
    template = f"chat_template={JOINED}"
    with serving(finished, template) as served, served.client() as client:
        whole = client.completions.create(prompt="17+25=", **greedy).choices[0].text
    saved = tmp_path / "actor"
    shutil.copytree(finished / "checkpoints" / "latest" / "actor", saved)
    config = json.loads((saved / "config.json").read_text())
    vocabulary = json.loads((saved / "tokenizer.json").read_text())["model"]["vocab"]
    config["eos_token_id"] = [config["eos_token_id"], vocabulary[whole[2]]]
    (saved / "config.json").write_text(json.dumps(config))
    with serving(saved, template) as served, served.client() as client:
        expected = client.completions.create(prompt="17+25=", **greedy).choices[0].text
        assert expected == whole[: whole.index(whole[2])]
        talk = client.chat.completions.create(messages=ASK, **greedy).choices[0].message.content
    with serving(saved, template, "--engine", "vllm", "--api-key", "secret") as served:
        assert served.title.endswith("(engine vllm: as configured)\n")
        assert served.run_example() >= 1
        with served.client("secret") as client:
            assert client.completions.create(prompt="17+25=", **greedy).choices[0].text == expected
            assert client.chat.completions.create(messages=ASK, **greedy).choices[0].message.content == talk
            assert many_prompts(client, 3) == many_prompts(client, 3) != many_prompts(client, 4)
        with served.client("wrong") as client, pytest.raises(openai.AuthenticationError):
            client.completions.create(prompt="1", **greedy)
        (server,) = children(served.process.pid)
        assert children(server)
        code, errors = served.stop(signal.SIGINT)
    assert code == 130
    assert errors.count("starting vllm on") == 1
    assert "error" not in errors
    assert running_in_group(server) == []


def many_prompts(client: OpenAI, seed: int) -> list[str]:
    """Complete prompts that together are longer than vLLM computes in a step; return the texts.

    If it divided a prompt, the seed's generator would have to be turned back, which ends vLLM on a CPU.
    """
    length = 100
    prompts = [f"{i:0{length}}" for i in range(STEP_TOKENS // length + 20)]
    request: Any = {"model": "actor", "prompt": prompts, "seed": seed, "max_tokens": 8}
    return [choice.text for choice in client.completions.create(**request).choices]


def running_in_group(group: int) -> list[psutil.Process]:
    """Return the processes of a group that have not ended, after they had time to.

    One that has ended may still wait for the system to collect it.
    """

    def is_running(process: psutil.Process) -> bool:
        with suppress(ProcessLookupError, psutil.NoSuchProcess):
            return os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE
        return False

    _, remaining = psutil.wait_procs(filter(is_running, psutil.process_iter()), timeout=10)
    return list(filter(is_running, remaining))


def children(process: int) -> list[int]:
    tasks = Path(f"/proc/{process}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


@pytest.mark.parametrize("engine", ["embedded", "vllm"])
def test_a_port_in_use(finished: Path, engine: str, hflow: CommandLine) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        message = hflow.fails("serve", finished, "--engine", engine, "--port", str(port))
    assert message == (
        f"cannot listen on 127.0.0.1, port {port}: Address already in use. Choose another port or host"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "there is no checkpoint or run 'nowhere'; give a directory with config.json"),
        (["RUN", "--engine", "vlm"], "--engine is 'vlm'; it must be 'embedded' or 'vllm'"),
        (["RUN", "--model", "actr"], "has no model 'actr'; did you mean 'actor'"),
        (["RUN", "gen.max_len=3"], "unknown key 'gen.max_len'; did you mean 'gen.max_model_len'"),
        (["RUN", "gen.max_model_len=long"], "gen.max_model_len is 'long'"),
        (["RUN", "gen.quantization=fp8"], "the engine embedded uses the model's dtype only"),
        (["RUN", "gen.cache_dtype=fp8"], "set gen.cache_dtype=null"),
        (
            ["RUN", "--engine", "vllm", "gen.quantization=fp8"],
            "the model is in fp32; set dtype=bf16 or gen.quantization=null",
        ),
        (["RUN", "dtype"], "override 'dtype' cannot be parsed: write key=value"),
        (
            ["RUN", "--host", "203.0.113.1", "--api-key", "k"],
            "cannot listen on 203.0.113.1, port 8000: Cannot assign",
        ),
    ],
)
def test_mistakes_are_one_line(arguments, message, finished: Path, hflow: CommandLine) -> None:
    arguments = [str(finished) if argument == "RUN" else argument for argument in arguments]
    assert message in hflow.fails("serve", *arguments)
    assert hflow.ended.output == ""


@pytest.mark.long
def test_the_network_is_warned_of(finished: Path) -> None:
    with serving(finished, "--host", "0.0.0.0") as served:
        assert "http://0.0.0.0" not in served.title
        assert served.run_example() >= 1
        code, errors = served.stop(signal.SIGINT)
    assert code == 130
    assert "every machine that reaches 0.0.0.0 may send requests; --api-key asks for a key" in errors


def test_what_vllm_cannot_serve(finished: Path, tmp_path: Path, monkeypatch, hflow: CommandLine) -> None:
    small = tmp_path / "small"
    shutil.copytree(finished / "checkpoints" / "latest" / "actor", small)
    config = json.loads((small / "config.json").read_text())
    (small / "config.json").write_text(json.dumps({**config, "num_attention_heads": 8}))
    message = hflow.fails("serve", small, "--engine", "vllm")
    assert "vllm's attention on CPUs has no kernel for heads of size 16" in message
    kind = engine_kind("vllm")
    monkeypatch.setitem(kind.__dict__, "packages", ("an_absent_package",))
    message = hflow.fails("serve", finished, "--engine", "vllm")
    assert message.startswith("--engine vllm: an_absent_package is not installed; pip install")


def saved_model(path: Path, architecture: str, **config: Any) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps({"architectures": [architecture], **config}))
    return path.resolve()


def test_the_model_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    step = tmp_path / "runs" / "ppo" / "20260101-000000" / "checkpoints" / "step-2"
    actor = saved_model(step / "actor", "Qwen2ForCausalLM", dtype="bfloat16")
    saved_model(step / "critic", "Qwen2Model")
    (step.parent / "latest").symlink_to("step-2")
    (step.parent.parent / "plan.json").write_text("{}")
    (tmp_path / "runs" / "ppo" / "latest").symlink_to("20260101-000000")
    for name in ("ppo", "runs/ppo", "runs/ppo/latest", str(step), str(actor)):
        assert find_checkpoint(name, [], None).directory == actor
    assert find_checkpoint("ppo", [], "actor").dtype == "bf16"
    assert find_checkpoint("ppo", ["dtype=fp32"], None).dtype == "fp32"
    with pytest.raises(ConfigError, match="'critic' has no language-model head"):
        find_checkpoint("ppo", [], "critic")
    config = {"models": {"actor": {"dtype": "fp32", "alphabet": "ab", "gen": {"max_model_len": 7}}}}
    (step.parent.parent / "config.yaml").write_text(json.dumps(config))
    found = find_checkpoint("ppo", ["gen.max_running=2"], None)
    assert (found.dtype, found.tokenizer.alphabet) == ("fp32", "ab")
    assert (found.config.gen.max_model_len, found.config.gen.max_running) == (7, 2)
    (tmp_path / "mine.jinja").write_text("{{ messages }}")
    assert find_checkpoint("ppo", ["chat_template=mine.jinja"], None).config.chat_template == "{{ messages }}"
    assert find_checkpoint("ppo", ["chat_template=null"], None).config.chat_template is None
    with pytest.raises(ConfigError, match=r"^chat_template is 'other', neither a file nor a Jinja template"):
        find_checkpoint("ppo", ["chat_template=other"], None)
    saved_model(step / "bob", "Qwen2ForCausalLM")
    with pytest.raises(ConfigError, match="'ppo' has actor, bob; choose one with --model NAME"):
        find_checkpoint("ppo", [], None)
    shutil.rmtree(step)
    with pytest.raises(ConfigError, match="the run 'ppo' has saved no checkpoint"):
        find_checkpoint("ppo", [], None)
    with pytest.raises(ConfigError, match="did you mean 'ppo'"):
        find_checkpoint("pppo", [], None)
