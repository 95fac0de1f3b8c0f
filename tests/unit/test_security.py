"""What docs/security.md promises about files, templates and secrets. Sandboxes: test_sandboxes.py."""

from __future__ import annotations

import ast
import json
import os
import pickle
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import episode_kit
import pytest

from hflow.base.errors import BackendError, ConfigError, DataError, RunError
from hflow.base.secrets import mask_secrets
from hflow.base.terminal import print_data, print_note, print_text, safe_text, show
from hflow.config.compose import load_config
from hflow.data.text.tokenizer import TextTokenizer, TokenizerSettings
from hflow.engines.embedded.module import build_module
from hflow.models.settings import ModelSettings
from hflow.processes.error_location import error_line
from hflow.report.text.ledger import render_samples
from hflow.report.text.live import open_display
from hflow.report.text.samples import render_texts

ROOT = Path(__file__).parents[2]
UNPICKLERS = {
    *("torch.load", "pickle.load", "pickle.Unpickler", "cloudpickle.load", "joblib.load", "dill.load"),
    *("numpy.load", "np.load", "marshal.load", "shelve.open", "pandas.read_pickle"),
}


def test_no_pickle_is_read_from_disk() -> None:
    """`loads` is allowed: it reads what another process of the run has sent."""
    found = []
    for path in (ROOT / "hflow").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                name, options = ast.unparse(node.func), {keyword.arg for keyword in node.keywords}
                loads_weights = name.endswith(".from_pretrained") and "dtype" in options
                if name in UNPICKLERS or "allow_pickle" in options:
                    found.append(f"{path}:{node.lineno}: {name}")
                if loads_weights and options.isdisjoint({"use_safetensors", "gguf_file"}):
                    found.append(f"{path}:{node.lineno}: {name} without use_safetensors=True")
    assert found == []


class Malicious:
    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self._mark,)


def test_weights_in_a_pickle_are_refused(tmp_path: Path) -> None:
    architecture = episode_kit.model_settings(40).architecture
    assert architecture is not None
    (tmp_path / "config.json").write_text(json.dumps(dict(architecture)))
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Malicious(tmp_path / "was_read")))
    with pytest.raises(BackendError, match="safetensors"):
        build_module(ModelSettings(name="actor", path=str(tmp_path), dtype="fp32"), None)
    assert not (tmp_path / "was_read").exists()


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
    ],
)
def test_a_chat_template_runs_in_a_sandbox(template: str, tmp_path: Path) -> None:
    episode_kit.merging_tokenizer(tmp_path, None)
    tokenizer = TextTokenizer(TokenizerSettings(path=str(tmp_path), chat_template=template))
    with pytest.raises(DataError, match="the chat template rejects the messages"):
        tokenizer.chat([{"role": "user", "content": "1"}])


SECRET = "a-secret-of-this-test"


@pytest.fixture(autouse=True)
def _variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_API_KEY", SECRET)
    monkeypatch.setenv("MY_TOKEN", "true")  # too short to be one
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "parallelism")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("nodes.reward.api_key=abc", "nodes.reward.api_key is a secret"),
        ("nodes.reward.password=abc", "nodes.reward.password is a secret"),
        (f"out=runs/{SECRET}", "out holds the value of the environment variable JUDGE_API_KEY"),
        ("name='${oc.env:JUDGE_API_KEY}'", "name holds the value of the environment variable JUDGE_API_KEY"),
        (f"nodes.reward.url=hf_{'x' * 34}", "nodes.reward.url is a secret"),
    ],
)
def test_secrets_are_refused_in_the_configuration(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}, and the configuration is written") as caught:
        load_config(ROOT / "recipes" / "grpo.py", [override])
    assert SECRET not in str(caught.value)
    assert "abc" not in str(caught.value)


def test_what_only_looks_like_a_secret_is_accepted() -> None:
    config = load_config(ROOT / "recipes" / "grpo.py", ["name=is_true", "out=parallelism"])
    assert (config.name, config.out) == ("is_true", "parallelism")


def test_errors_show_no_secret() -> None:
    assert mask_secrets(f"GET /?key={SECRET}&x=true") == "GET /?key=$JUDGE_API_KEY&x=true"
    assert error_line(OSError(f"401 for {SECRET}")) == "OSError: 401 for $JUDGE_API_KEY"
    assert str(RunError(f"401 for {SECRET}")) == "401 for $JUDGE_API_KEY"
    assert str(pickle.loads(pickle.dumps(RunError(f"sk-{'a' * 40}")))) == "***"
    assert os.environ["JUDGE_API_KEY"] == SECRET


HOSTILE = "a\x1b[2J\x1b]0;title\x07[red]b[/red] :boom: \x9b31mc\rd\u202ee\ud800f\x7f"
SHOWN = r"[red]b[/red] :boom: \x9b31mc"
RICHS_OWN = re.compile(r"\x1b\[[0-9;]*m")


def test_text_cannot_change_the_terminal() -> None:
    assert safe_text("a\tb\r\nc \u00e9 \u4e2d \U0001f600") == "a\tb\nc \u00e9 \u4e2d \U0001f600"
    assert safe_text(HOSTILE) == (
        r"a\x1b[2J\x1b]0;title\x07[red]b[/red] :boom: \x9b31mc\rd\u202ee\ud800f\x7f"
    )


@pytest.mark.parametrize("is_terminal", [False, True])
def test_every_printer_shows_text_as_it_is(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for stream in (sys.stdout, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: is_terminal)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "200")
    turn = {"role": "assistant", "text": HOSTILE, "trained": True}
    names = ("stream", "id", "row", "tokens", "oldest", "newest", "reward", "end", "step", "lag", "node")
    row = {**dict.fromkeys(names), "reason": HOSTILE}
    with open_display(HOSTILE, live=is_terminal) as display:
        printers: list[Callable[[], None]] = [
            lambda: print_text(HOSTILE),
            lambda: print_note(HOSTILE),
            lambda: show(HOSTILE),
            lambda: show(render_texts([{"stream": HOSTILE, "turns": [turn]}])),
            lambda: show(render_samples([row], 1)),
            lambda: display.note(HOSTILE),
        ]
        if is_terminal:
            printers.append(lambda: print_data(HOSTILE))
        for number, printer in enumerate(printers):
            capsys.readouterr()
            printer()
            found = "".join(capsys.readouterr())
            assert SHOWN in RICHS_OWN.sub("", found), number
            assert "\x1b[2J" not in found
            assert not set(found) & set("\x07\x9b\u202e\ud800\x7f"), number
            assert "\x1b]" not in found


def test_only_one_module_makes_consoles() -> None:
    """Others would interpret markup and escape sequences."""
    made = re.compile(r"\b(Console\(|rich\.print|sys\.std(out|err)\.write)")
    paths = [path for path in (ROOT / "hflow").rglob("*.py") if made.search(path.read_text())]
    assert [path.name for path in paths] == ["terminal.py"]
