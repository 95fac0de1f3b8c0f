import copy
import json
import os
import pickle
import subprocess
from dataclasses import FrozenInstanceError, asdict
from pathlib import Path

import pytest

from hflow.base.errors import ConfigError
from hflow.base.shipped import shipped_directory
from hflow.base.validation import COUNTERPARTS
from hflow.config import RunConfig, flatten, load_config, to_yaml, validate_names
from hflow.config.schema import ImagesConfig
from hflow.dsl import load_recipe, overridable_keys
from hflow.launch.planning.request import _LATER_KEYS, _settings

RECIPES = Path(__file__).parents[2] / "recipes"
GRPO = RECIPES / "grpo.py"


@pytest.fixture
def recipe(tmp_path: Path):
    """Writes the YAML of a recipe and returns the recipe's path."""

    def write(text: str, name: str = "mine") -> Path:
        (tmp_path / f"{name}.yaml").write_text(text)
        return tmp_path / f"{name}.py"

    return write


def test_defaults_without_a_yaml(tmp_path: Path):
    config = load_config(tmp_path / "bare.py")
    assert config == RunConfig(name="bare")


def test_files_groups_and_overrides_in_this_order(recipe):
    path = recipe("defaults:\n- optim@models.actor.optim: rl-tiny\n- _self_\nsteps: 7\nbatch: 3\n")
    config = load_config(path, ["steps=9", "models.actor.optim.lr=3e-4"])
    assert (config.steps, config.batch) == (9, 3)
    optim = config.models["actor"].optim
    assert (optim.lr, optim.warmup_steps, optim.betas) == (3e-4, 40, (0.9, 0.99))


def test_configuration_groups_next_to_a_recipe_are_found(recipe, tmp_path: Path):
    (tmp_path / "optim").mkdir()
    (tmp_path / "optim" / "mine.yaml").write_text("lr: 0.5\n")
    path = recipe("defaults:\n- optim@models.actor.optim: mine\n- model@models.actor: tiny-qwen2\n- _self_\n")
    actor = load_config(path).models["actor"]
    assert actor.optim.lr == 0.5
    assert actor.architecture is not None
    assert actor.architecture["hidden_size"] == 128


def test_a_directory_with_the_name_of_a_key_is_no_group(recipe, tmp_path: Path):
    for name in ("out", "steps", "cluster", "report"):
        (tmp_path / name).mkdir()
    overrides = ["out=elsewhere", "steps=7", "cluster=cpu-1x2", "report.wandb=project"]
    config = load_config(recipe("seed: 3"), overrides)
    assert (config.out, config.steps, config.cluster) == ("elsewhere", 7, "cpu-1x2")
    assert config.report.wandb == "project"


def test_a_directory_with_quotes_and_spaces(tmp_path: Path):
    odd = tmp_path / "it's a, b=c"
    odd.mkdir()
    (odd / "r.yaml").write_text("defaults:\n- data@data.train: addition\n- _self_\n")
    assert load_config(odd / "r.py").data["train"].generator == "addition"


def test_grpo_starts_from_a_shipped_checkpoint():
    grpo = load_config(GRPO)
    path = grpo.models["actor"].path
    assert path is not None
    assert (Path(path) / "model.safetensors").is_file()
    assert load_config(GRPO, ["models.actor.path=hflow:addition"]) == grpo
    assert {name: data.split for name, data in grpo.data.items()} == {"train": "train", "heldout": "heldout"}


def test_an_override_chooses_another_file_of_a_group(recipe, tmp_path: Path):
    (tmp_path / "setup").mkdir()
    for name, steps in (("small", 3), ("large", 5)):
        (tmp_path / "setup" / f"{name}.yaml").write_text(f"# @package _global_\nsteps: {steps}\n")
    path = recipe("defaults:\n- setup: small\n- _self_\n")
    assert load_config(path).steps == 3
    assert load_config(path, ["setup=large"]).steps == 5
    with pytest.raises(ConfigError, match="there is no setup 'larg'; did you mean 'large'"):
        load_config(path, ["setup=larg"])


def test_a_group_needs_no_defaults_list(recipe):
    own = "{model_type: qwen2, sliding_window: 8, vocab_size: 32}"
    path = recipe(f"models: {{actor: {{architecture: {own}, optim: {{lr: 0.5, eps: 0.1}}}}}}\n")
    groups = ["model@models.actor=tiny-qwen2", "data@data.train=addition", "optim@models.actor.optim=rl-tiny"]
    config = load_config(path, [*groups, "models.actor.architecture.hidden_size=64"])
    actor = config.models["actor"]
    assert actor.architecture is not None
    assert actor.architecture["hidden_size"] == 64
    assert "sliding_window" not in actor.architecture
    assert (actor.optim.lr, actor.optim.eps) == (2e-4, 0.1)
    assert config.data["train"].generator == "addition"
    assert load_config(path, [f"+{group}" for group in groups]).models["actor"].optim == actor.optim


def test_a_group_in_a_defaults_list_is_replaced_with_and_without_a_plus():
    for plus in ("", "+"):
        model = load_config(RECIPES / "dapo.py", [f"{plus}model@models.actor=qwen2.5-7b"]).models["actor"]
        assert model.architecture is not None
        assert model.architecture["hidden_size"] == 3584


@pytest.mark.parametrize("file", sorted(RECIPES.glob("*.yaml")), ids=lambda file: file.stem)
def test_every_shipped_recipe_config_loads(file: Path):
    assert load_config(file.with_suffix(".py")).name == file.stem


@pytest.mark.parametrize(
    "file", sorted(shipped_directory("configs").glob("*/*.yaml")), ids=lambda file: file.stem
)
def test_every_shipped_group_file_loads(file: Path, recipe):
    places = {"model": "models.m", "optim": "models.m.optim", "data": "data.d"}
    group = file.parent.name
    path = recipe(f"defaults:\n- {group}@{places[group]}: {file.stem}\n- _self_\n")
    assert load_config(path) != RunConfig(name=path.stem)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("stps=1", "unknown key 'stps'; did you mean 'steps'?"),
        ("lr=1", "unknown key 'lr'; did you mean 'models.actor.optim.lr'?"),
        ("max_staleness=2", "did you mean 'schedule.max_staleness'?"),
        ("models.actor.schedule=linear", "did you mean 'models.actor.optim.schedule'?"),
        ("learning_rate=1", "did you mean 'models.actor.optim.lr'?"),
        ("models.actor.optim.learning_rate=1", "did you mean 'models.actor.optim.lr'?"),
        ("+models.actor.lora.rank=32", "'models.actor.lora.rank'; did you mean 'models.actor.lora.r'?"),
        ("epochs=2", "did you mean 'steps' (epochs * rows / batch)?"),
        ("num_generations=4", "did you mean 'nodes.NODE.group' with a name of the recipe for NODE?"),
        (
            "models.actor.optim.wieght_decay=1",
            "optim.wieght_decay'; did you mean 'models.actor.optim.weight_decay'?",
        ),
        ("models.actor.zzz=1", "unknown key 'models.actor.zzz'; known here: activation_checkpointing, "),
        ("steps=many", "steps is 'many'; it must be a whole number"),
        ("steps=true", "steps is True; it must be a whole number"),
        ("steps='3'", "steps is '3'; it must be a whole number"),
        ("steps=3.0", "steps is 3.0; it must be a whole number"),
        ("models.actor.optim.lr=true", "models.actor.optim.lr is True; it must be a number"),
        ("models.actor.optim.lr=inf", "models.actor.optim.lr is inf; it must be a finite number"),
        ("models.actor.optim.betas=[0.9,0.9,0.9]", "it must be a list of 2 values"),
        ("steps=1.5", "steps is 1.5; it must be a whole number"),
        ("steps=0", "steps is 0; it must be at least 1"),
        ("schedule.sync_every=0", "schedule.sync_every is 0; it must be at least 1"),
        ("schedule.max_staleness=-1", "schedule.max_staleness is -1; it must be at least 0"),
        ("schedule.max_staleness=1e300", "schedule.max_staleness is 1e+300; it must be at most 1,000,000"),
        ("schedule.max_staleness=inf", "schedule.max_staleness is inf; it must be a finite number"),
        ("steps=null", "steps is None; it must be a whole number; remove the key for its default"),
        ("data.train.shuffle=1", "data.train.shuffle is 1; it must be true or false"),
        ("models.actor.optim.lr=nan", "models.actor.optim.lr is nan; it must be a finite number"),
        ("models.actor.optim.betas=[0.9]", "models.actor.optim.betas[1] is missing"),
        ("models.actor.optim.betas=[0.9,x]", "betas[1] is 'x'; it must be a number"),
        ("groups.gen=[0,x]", "groups.gen[1] is 'x'; it must be a whole number"),
        ("models.actor.dtype=fp16", "models.actor.dtype is 'fp16'; it must be 'fp32' or 'bf16'"),
        ("models.actor=3", "models.actor is 3; it must be a mapping"),
        ("steps", "override 'steps' cannot be parsed: write key=value"),
        (
            "models.actor.path=a=b",
            "cannot be parsed: in a shell, write 'models.actor.path=\"a=b\"'; the shell",
        ),
        (f"name=a=b{'x' * 300}", "cannot be parsed: in a shell, write 'key=\"value\"'; the shell removes"),
        ("optim@models.actor.optim=rl-tny", "there is no optim 'rl-tny'; did you mean 'rl-tiny'?"),
        ("model=tiny-qwen2", "write model@models.NAME=tiny-qwen2"),
        ("models.actor.path=hflow:subtraction", "that come with hflow are hflow:addition and hflow:"),
        ("seed=${nothing}", "seed: Interpolation key 'nothing' not found"),
        (
            "name=a, b",
            """several values: in a shell, write 'name="a, b"', or a list as 'name=[a,b]'; the shell""",
        ),
        (
            f"name=a{'b' * 20_000}",
            "has 20,006 characters; overrides have at most 20,000, so write the value in",
        ),
        ("seed=" + "9" * 5000, "cannot be parsed: it has a whole number of more than 4,300 digits"),
        ("hydra.job.name=x", "unknown key 'hydra.job.name'"),
    ],
)
def test_a_wrong_override_is_refused_in_one_line(override: str, message: str):
    with pytest.raises(ConfigError) as refusal:
        load_config(GRPO, [override])
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)


def advised(error: str) -> list[str]:
    """Run what an error advises to type in a shell, and return the arguments that it makes."""
    typed = error.partition("in a shell, write ")[2].removesuffix("; the shell removes the outer quotes")
    typed = typed.removeprefix("a list as ").replace("', or a list as '", "' '")
    done = subprocess.run(
        ["sh", "-c", f"printf '%s\\0' {typed}"],
        capture_output=True,
        text=True,
        check=True,
        env={"HOME": "/x"},
    )
    return done.stdout.split("\0")[:-1]


@pytest.mark.parametrize(
    "value",
    [
        "Answer with the name only, please: no dots!",
        'it\'s: a "b" \\"c\\ d\\',
        "a, $HOME `b`",
        "'open",
        "*#?",
    ],
)
def test_an_error_says_how_to_quote_a_value_in_a_shell(value: str):
    with pytest.raises(ConfigError) as refusal:
        load_config(GRPO, [f"name={value}"])
    assert load_config(GRPO, advised(str(refusal.value))[:1]).name == value


@pytest.mark.parametrize(
    ("value", "items"),
    [
        ("[a b.jsonl,c=d.jsonl]", ["a b.jsonl", "c=d.jsonl"]),
        ("[$HOME,'x, y',`z`;#]", ["$HOME", "x, y", "`z`;#"]),
        ('[it\'s,"1, 2", 3*]', ["it's", "1, 2", "3*"]),
        ("[~/x.jsonl, y&z]", ["/root/x.jsonl", "y&z"]),
        ("a.jsonl,b c.jsonl", ["a.jsonl", "b c.jsonl"]),
        ("a.jsonl,b.jsonl", ["a.jsonl", "b.jsonl"]),
    ],
)
def test_an_error_says_how_to_write_a_list_in_a_shell(
    value: str, items: list[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HOME", "/root")
    with pytest.raises(ConfigError) as refusal:
        load_config(GRPO, [f"report.show={value}"])
    assert load_config(GRPO, advised(str(refusal.value))[-1:]).report.show == tuple(items)


def test_an_error_says_what_a_tilde_means(monkeypatch: pytest.MonkeyPatch):
    """A shell replaces it at the start of a word only, and not between quotes."""
    monkeypatch.setenv("HOME", "/home/me")
    with pytest.raises(ConfigError) as refusal:
        load_config(GRPO, ["out=~/runs"])
    assert load_config(GRPO, advised(str(refusal.value))).out == "/home/me/runs"
    for override in ('out="~/runs"', 'models.actor.path="~me/x"', 'data.train.path=[x,"~/y"]'):
        with pytest.raises(ConfigError, match=r"~.*, which only a shell replaces"):
            load_config(GRPO, [override])


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("env.X=3", "env.X"),
        ("env.X=true", "env.X"),
        ("env.X=1.5", "env.X"),
        ("name=3", "name"),
        ("report.show=[3]", "report.show"),
        ("data.train.map.a=1", "data.train.map.a"),
    ],
)
def test_an_error_says_how_to_write_a_number_as_text(override: str, key: str):
    with pytest.raises(ConfigError, match="must be a string; in a shell, write") as refusal:
        load_config(GRPO, [override])
    (typed,) = advised(str(refusal.value))
    assert typed.startswith(f"{key}=")
    value = dict(flatten(asdict(load_config(GRPO, [typed]))))[key]
    text = override.partition("=")[2]
    assert value == ([text.strip("[]")] if text.startswith("[") else text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1", "mine.yaml:1: invalid YAML"),
        ("- 1\n", "mine.yaml: "),
        ("3", "mine.yaml: "),
        ("stpes: 3", "unknown key 'stpes'; did you mean 'steps'?"),
        ("hydra: {searchpath: []}", "unknown key 'hydra'"),
        ("models: {actor: {path: '???'}}", "models.actor.path: Missing mandatory value"),
        ("defaults: [{model@models.actor: tiny}]", "there is no model 'tiny'; did you mean 'tiny-qwen2'?"),
    ],
)
def test_a_wrong_file_is_refused_in_one_line(text: str, message: str, recipe):
    with pytest.raises(ConfigError) as refusal:
        load_config(recipe(text))
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_names_that_the_recipe_does_not_know():
    known = {
        "models": ["actor"],
        "data": ["train", "heldout"],
        "nodes": {
            "actor_gen": ["max_tokens", "temperature"],
            "eval_gen": ["max_tokens"],
            "actor_train": ["clip", "kl_coef", "dro_beta"],
        },
    }
    validate_names(load_config(GRPO, ["nodes.actor_train.clip=0.1"]), **known)
    for override, message in [
        ("models.actr.path=x", "unknown key 'models.actr'; did you mean 'models.actor'?"),
        ("data.trian.limit=1", "unknown key 'data.trian'; did you mean 'data.train'?"),
        ("nodes.actor_trian.clip=0.1", "unknown key 'nodes.actor_trian'; did you mean 'nodes.actor_train'?"),
        (
            "nodes.actor_gen.max_token=1",
            "'nodes.actor_gen.max_token'; did you mean 'nodes.actor_gen.max_tokens'?",
        ),
        ("nodes.actor_train.beta=1", "'nodes.actor_train.beta'; did you mean 'nodes.actor_train.kl_coef'?"),
    ]:
        with pytest.raises(ConfigError) as refusal:
            validate_names(load_config(GRPO, [override]), **known)
        assert message in str(refusal.value)


def test_a_configuration_does_not_change():
    config = load_config(GRPO, ["nodes.actor_train.sizes=[1,2]", "nodes.actor_train.deep={a:{b:1}}"])
    with pytest.raises(FrozenInstanceError):
        config.steps = 1  # type: ignore[misc]
    with pytest.raises(TypeError, match="cannot be changed"):
        config.models["critic"] = config.models["actor"]  # type: ignore[index]
    with pytest.raises(TypeError, match="cannot be changed"):
        config.nodes["actor_train"]["deep"]["a"].update(b=2)
    assert config.nodes["actor_train"]["sizes"] == (1, 2)


def test_a_configuration_travels():
    config = load_config(GRPO)
    assert pickle.loads(pickle.dumps(config)) == config
    assert copy.deepcopy(config) == config
    assert json.loads(json.dumps(asdict(config)))["steps"] == 280


@pytest.mark.parametrize("overrides", [[], ["models.actor.optim.eps=1e-12", "groups.gen=[0,1]", "name='07'"]])
def test_the_yaml_composes_to_the_same_configuration(overrides: list[str], recipe):
    config = load_config(GRPO, overrides)
    assert load_config(recipe(to_yaml(config))) == config


def test_flatten_lists_every_leaf_by_its_key():
    rows = list(flatten(load_config(GRPO)))
    assert rows == sorted(rows, key=lambda row: row[0].split("."))
    assert ("models.actor.optim.betas", [0.9, 0.99]) in rows
    assert ("models.actor.architecture.hidden_size", 128) in rows
    assert ("steps", 280) in rows


def test_reading_a_config_changes_no_directory():
    before = os.getcwd()
    load_config(GRPO)
    assert os.getcwd() == before


def test_a_path_in_a_file_is_relative_to_that_file(recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "mine.yaml").write_text("path: mine.jsonl\n")
    path = recipe(
        "defaults: [{data@data.group: mine}, _self_]\n"
        "models: {actor: {path: runs/actor}}\n"
        "data:\n"
        "  train: {path: '${oc.env:FILE}.jsonl'}\n"
        "  list: {path: [b/*.jsonl, /c.parquet, 'hf:openai/gsm8k/main']}\n"
        "  same: {path: '${data.train.path}'}\n"
        "  several: {sources: {x: {path: ../x.jsonl}, y: {path: y.jsonl, weight: 2}}}\n"
        "  changed: {path: a.jsonl}\n"
    )
    monkeypatch.setenv("FILE", "a")
    (tmp_path / "here").mkdir()
    for directory, prefix in (
        (tmp_path, ""),
        (tmp_path / "here", f"{tmp_path}/"),
        (tmp_path.parent, f"{tmp_path.name}/"),
    ):
        monkeypatch.chdir(directory)
        config = load_config(path, ["data.changed.path=z.jsonl"])
        paths = {name: data.path for name, data in config.data.items()}
        assert paths["train"] == paths["same"] == f"{prefix}a.jsonl"
        assert paths["group"] == f"{prefix}data/mine.jsonl"
        assert paths["list"] == (f"{prefix}b/*.jsonl", "/c.parquet", "hf:openai/gsm8k/main")
        assert paths["changed"] == "z.jsonl"
        assert config.data["several"].sources["y"].path == f"{prefix}y.jsonl"
        assert Path(str(config.data["several"].sources["x"].path)).resolve() == tmp_path.parent / "x.jsonl"
        assert config.models["actor"].path == "runs/actor"
        assert load_config(recipe(to_yaml(config), "again"), directory=Path.cwd()).data == config.data
    assert "\0" not in to_yaml(config)


def test_a_chat_template_may_be_a_file(recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Its text is in the configuration, so that no later command needs the file."""
    text = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    (tmp_path / "here").mkdir()
    (tmp_path / "mine.jinja").write_text(text)
    (tmp_path / "here" / "other.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    path = recipe(
        "models:\n"
        "  a: {chat_template: mine.jinja}\n"
        "  b: {chat_template: '${models.a.chat_template}'}\n"
        "  c: {chat_template: '{{ messages }}'}\n"
        "nodes: {chat_gen: {chat_template: mine.jinja}}\n"
    )
    monkeypatch.chdir(tmp_path / "here")
    config = load_config(path, ["models.d.chat_template=other.json", "models.e.chat_template=../mine.jinja"])
    templates = {name: model.chat_template for name, model in config.models.items()}
    written = "{{ messages }}"
    assert templates == {"a": text, "b": text, "c": written, "d": written, "e": text}
    assert config.nodes["chat_gen"]["chat_template"] == "mine.jinja"
    (tmp_path / "mine.jinja").unlink()
    assert load_config(recipe(to_yaml(config), "again"), directory=Path.cwd()).models == config.models


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("absent.jinja", None, "neither a file nor a Jinja template"),
        ("", None, "which is empty"),
        (".", None, "a directory"),
        ("binary", b"\xff\xfe{{ messages }}", "a file that is not UTF-8"),
        ("text.txt", b"hello", "a file without a Jinja template"),
        ("config.json", b'{"model_type": "qwen2"}', "a file without a Jinja template"),
        ("large", b"{{ messages }}" * 100_000, "a file that is too large for a template"),
    ],
)
def test_a_wrong_file_of_a_chat_template_is_refused_in_one_line(
    name: str, content: bytes | None, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    if content is not None:
        Path(name).write_bytes(content)
    with pytest.raises(ConfigError) as refusal:
        load_config(GRPO, [f"models.actor.chat_template='{name}'"])
    assert str(refusal.value) == (
        f"models.actor.chat_template is {name!r}, {problem}; set models.actor.chat_template to a file with a "
        "Jinja template, or to the template itself"
    )


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.train.path=3", "data.train.path is 3; it must be a path, or a list of paths"),
        ("data.train.path=[]", "data.train.path is []; it must be a path, or a list of paths"),
        ("data.train.path=[a,3]", "data.train.path is ['a', 3]; it must be a path, or a list of paths"),
        ("data.train.map=x", "data.train.map is 'x'; it must be a mapping"),
        ("data.train.map={prompt:3}", "data.train.map.prompt is 3; it must be a string"),
        (
            "data.train.sources={a:{wieght:1}}",
            "'data.train.sources.a.wieght'; did you mean 'data.train.sources.a.weight'?",
        ),
        ("data.train.sources={a:{weight:0}}", "data.train.sources.a.weight is 0; it must be more than 0"),
    ],
)
def test_a_wrong_source_is_refused_in_one_line(override: str, message: str):
    with pytest.raises(ConfigError) as refusal:
        load_config(GRPO, [override])
    assert message in str(refusal.value)


def test_every_counterpart_of_another_librarys_key_exists():
    """Otherwise a message would suggest a key that is refused in turn."""
    knobs = {key for node in load_recipe(GRPO).spec().nodes for key in overridable_keys(node)}
    for name, counterpart in COUNTERPARTS.items():
        if counterpart.key.startswith("nodes."):
            assert counterpart.name in knobs, name
        else:
            ours = counterpart.key.replace("NAME", "actor")
            with pytest.raises(ConfigError, match=rf"did you mean '{ours}'"):
                load_config(GRPO, [f"{name}=1"])


def test_keys_that_came_later_leave_the_settings_of_earlier_plans_as_they_were():
    """Only with their defaults; another value is a setting like any other."""
    adapters = "models.actor.lora={r: 4}"
    config = load_config(GRPO, [adapters])
    settings = _settings(config)
    flat = dict(flatten(config))
    for later, default in _LATER_KEYS.items():
        keys = [key for key in flat if key.endswith(later)]
        assert keys, later
        assert all(flat[key] == default and key not in settings for key in keys)
    changes = ["models.actor.freeze=vision", "models.actor.zero_stage=2"]
    changed = _settings(load_config(GRPO, [adapters, *changes]))
    assert changed == {**settings, "models.actor.freeze": "vision", "models.actor.zero_stage": 2}


def test_limits_of_images_are_taken_one_by_one() -> None:
    """A model that starts from another has its own limits, and the other's where it has none."""
    own, other = ImagesConfig(min_pixels=16), ImagesConfig(min_pixels=4, max_pixels=64)
    assert own.over(other) == ImagesConfig(min_pixels=16, max_pixels=64)
