"""A plan file runs exactly its plan, or says in one line what is out of date."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hflow import launch
from hflow.base.errors import ConfigError, HflowError, PlanError, RecipeError
from hflow.planner.diff import Effect
from hflow.planner.plan.serialise import rows_digest

RECIPE = '''"""GRPO, as small as it gets."""

from hflow import Dataset, Engine, Model, Recipe, Text, Trajectory, compute, generate, nodes, use

train = Dataset(prompt=Text, answer=Text)
actor = Model("actor", trainable=True)


@generate(actor, group=4)
async def actor_gen(engine: Engine, prompt: str) -> Trajectory:
    return await engine.complete(prompt)


@compute(per="sample", returns="reward")
def score(completion: str, answer: str) -> float:
    return float(completion.strip() == answer)


recipe = Recipe("small", train, [actor_gen, score, nodes.group_advantage, use(nodes.actor_train, actor)])
'''
NUMBERS = "cluster: cpu-1x1\nsteps: 7\nbatch: 8\nmodels:\n  actor:\n    path: checkpoint\n"
SIZES = {
    "model_type": "llama",
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 32,
}


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a recipe, its numbers and a checkpoint's sizes, in which the test works."""
    directory = tmp_path / "checkout"
    (directory / "recipes").mkdir(parents=True)
    (directory / "checkpoint").mkdir()
    (directory / "recipes" / "small.py").write_text(RECIPE)
    (directory / "recipes" / "small.yaml").write_text(NUMBERS)
    (directory / "checkpoint" / "config.json").write_text(json.dumps(SIZES))
    monkeypatch.chdir(directory)
    return directory


def lock(*overrides: str) -> Path:
    """Write the recipe's plan file."""
    file = Path("lock.json")
    file.write_text(launch.plan_file_text(launch.compile_recipe("recipes/small.py", overrides)))
    return file


def edit(file: Path, change: Callable[[dict[str, Any]], None]) -> None:
    values = json.loads(file.read_text())
    change(values)
    file.write_text(json.dumps(values))


def edit_plan(file: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the rows of a plan, and its digest with them."""

    def change_rows(values: dict[str, Any]) -> None:
        change(values["plan"])
        values["plan"]["digest"] = rows_digest(values["plan"])

    edit(file, change_rows)


def misfit(file: Path, *overrides: str) -> str:
    """The line that says what is out of date."""
    with pytest.raises(PlanError) as refused:
        launch.compile_plan_file(file, None, overrides)
    message = str(refused.value)
    assert "\n" not in message
    assert message.startswith("lock.json is out of date: ")
    return message.removeprefix("lock.json is out of date: ")


def test_a_plan_file_holds_recipe_configuration_and_plan(checkout: Path):
    values = json.loads(lock("seed=3").read_text())
    assert (values["format"], values["recipe"]) == (3, "recipes/small.py")
    assert (values["config"]["steps"], values["config"]["seed"]) == (7, 3)
    assert values["plan"]["digest"] == launch.plan("recipes/small.py", ["seed=3"]).digest


def test_a_plan_file_compiles_to_its_plan(checkout: Path):
    file = lock("cluster=cpu-1x2", "models.actor.optim.lr=3e-4", "nodes.actor_train.clip=0.1")
    compiled = launch.compile_plan_file(file)
    assert compiled.plan.digest == json.loads(file.read_text())["plan"]["digest"]
    assert compiled.config.models["actor"].optim.lr == 3e-4


def test_a_plan_file_ignores_the_yaml_next_to_the_recipe(checkout: Path):
    file = lock()
    Path("recipes/small.yaml").write_text("steps: 99\n")
    assert launch.compile_plan_file(file).config.steps == 7


def test_a_plan_file_can_move_with_its_checkout(checkout: Path, monkeypatch: pytest.MonkeyPatch):
    lock()
    moved = checkout.with_name("moved")
    checkout.rename(moved)
    monkeypatch.chdir(moved)
    assert launch.compile_plan_file("lock.json").recipe == Path("recipes/small.py")


def test_a_recipe_outside_the_working_directory_is_absolute(checkout: Path, monkeypatch: pytest.MonkeyPatch):
    elsewhere = checkout / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    text = launch.plan_file_text(launch.compile_recipe(checkout / "recipes" / "small.py"))
    assert json.loads(text)["recipe"] == str(checkout / "recipes" / "small.py")


def test_a_recipe_that_was_moved_is_named(checkout: Path):
    file = lock()
    shutil.move("recipes/small.py", "small.py")
    with pytest.raises(
        RecipeError, match=r"lock\.json is a plan of 'recipes/small\.py', which does not exist here; run"
    ):
        launch.compile_plan_file(file)
    assert launch.compile_plan_file(file, "small.py").plan.recipe == "small"
    with pytest.raises(RecipeError, match=r"^there is no recipe file 'other\.py'$"):
        launch.compile_plan_file(file, "other.py")


def test_overrides_that_do_not_change_the_plan_are_allowed(checkout: Path):
    compiled = launch.compile_plan_file(lock(), None, ["out=elsewhere", "name=again"])
    assert (compiled.config.out, compiled.config.name, compiled.config.steps) == ("elsewhere", "again", 7)


def test_a_configuration_with_quotes_colons_and_nulls_survives_overrides(checkout: Path):
    Path("recipes/small.yaml").write_text(
        NUMBERS + "    chat_template: \"{% for m in messages %}{{ m['content'] }}: 'x'\\n{% endfor %}\"\n"
    )
    file = lock()
    assert launch.compile_plan_file(file, None, ["out=elsewhere"]).config.models == (
        launch.compile_plan_file(file).config.models
    )


def test_an_override_that_changes_the_plan_is_refused(checkout: Path):
    file = lock("save_every=2")
    message = misfit(file, "steps=9")
    assert message.startswith("schedule steps: 7 -> 9")
    assert "`hflow plan --diff lock.json recipes/small.py steps=9`" in message
    assert misfit(lock(), "steps=9").startswith("schedule steps: 7 -> 9, and 2 more")


def test_a_changed_body_is_refused(checkout: Path):
    file = lock()
    Path("recipes/small.py").write_text(RECIPE.replace("== answer", "== answer.strip()"))
    message = misfit(file)
    assert message.startswith("node score body: source ")
    assert "`hflow plan --diff lock.json recipes/small.py`" in message


def test_a_checkpoint_of_other_sizes_is_refused(checkout: Path):
    file = lock()
    Path("checkpoint/config.json").write_text(json.dumps({**SIZES, "num_hidden_layers": 3}))
    assert misfit(file).startswith("shape actor num_layers: 2 -> 3")


def test_a_configuration_that_no_longer_fits_its_recipe_is_refused(checkout: Path):
    file = lock("nodes.score.timeout=3")
    Path("recipes/small.py").write_text(RECIPE.replace("def score", "def mark").replace(" score,", " mark,"))
    assert misfit(file).startswith("unknown key 'nodes.score'; ")


def test_changed_rows_of_a_plan_are_refused(checkout: Path):
    file = lock("cluster=cpu-1x2")
    edit_plan(file, lambda rows: rows["rules"][1].update(policy="single"))
    assert misfit(file).startswith("data actor_inf: all to one -> samples, balanced")
    file = lock()
    edit_plan(file, lambda rows: rows["schedule"]["nodes"][0].update(keep=True))
    assert misfit(file).startswith("rest schedule.nodes[0].keep: true -> false")


def test_a_plan_that_does_not_have_its_digest_is_refused(checkout: Path):
    file = lock()
    edit(file, lambda values: values["plan"].update(warnings=["mind the gap"]))
    launch.compile_plan_file(file)
    edit(file, lambda values: values["plan"].update(digest="0" * 64))
    with pytest.raises(
        ConfigError, match=r"lock\.json was changed by hand: its plan does not have the digest"
    ):
        launch.compile_plan_file(file)


def test_unknown_keys_are_refused(checkout: Path):
    file = lock()
    with pytest.raises(ConfigError, match=r"^unknown key 'stps'; did you mean 'steps'\?$"):
        launch.compile_plan_file(file, None, ["stps=1"])
    edit(file, lambda values: values["config"].update(stps=1))
    with pytest.raises(
        ConfigError, match=r"^lock\.json: its configuration does not fit this version of hflow: unknown"
    ):
        launch.compile_plan_file(file)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hello", "lock.json is not a plan file: invalid JSON"),
        ("[1]", "lock.json is not a plan file; `hflow plan RECIPE --json` prints one"),
        ('{"digest": "0"}', "lock.json is not a plan file; `hflow plan RECIPE --json` prints one"),
        (
            '{"format": 4}',
            "lock.json has format 4, but this version of hflow reads format 3",
        ),
        ('{"format": 3, "recipe": "a.py"}', "lock.json is not a plan file: its 'config' is missing"),
        (
            '{"format": 3, "recipe": "a.py", "config": {}, "plan": {}}',
            "lock.json: this plan was written by another version of hflow",
        ),
    ],
)
def test_a_file_that_is_not_a_plan_is_refused(text: str, message: str, checkout: Path):
    Path("lock.json").write_text(text)
    with pytest.raises(ConfigError) as refused:
        launch.compile_plan_file("lock.json")
    assert str(refused.value).startswith(message)
    assert "\n" not in str(refused.value)


def test_an_unreadable_file_is_refused(checkout: Path):
    with pytest.raises(ConfigError, match=r"cannot read the plan file 'none\.json': No such file"):
        launch.compile_plan_file("none.json")
    Path("lock.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"lock\.json is not a plan file: invalid JSON"):
        launch.compile_plan_file("lock.json")


def test_a_run_directory_can_replace_a_plan_file(checkout: Path):
    run = Path("runs/small/20260131-142500")
    run.mkdir(parents=True)
    lock().rename(run / "plan.json")
    assert launch.compile_plan_file(run).config.steps == 7
    with pytest.raises(ConfigError, match="runs/small is not a run's directory"):
        launch.compile_plan_file("runs/small")
    Path("runs/small/latest").symlink_to(run.name)
    with pytest.raises(ConfigError, match="runs/small/latest"):
        launch.compile_plan_file("runs/small")


def test_files_runs_and_recipes_are_compared(checkout: Path):
    file = str(lock())
    assert launch.compare_plans(file, "recipes/small.py").changes == ()
    changed = launch.compare_plans(file, "recipes/small.py", ["cluster=cpu-1x2"])
    assert changed.effect is Effect.RESHARD
    assert launch.compare_plans("recipes/small.py", file, ["cluster=cpu-1x2"]).effect is Effect.RESHARD
    assert launch.compare_plans("recipes/small.py", "recipes/small.py", ["cluster=cpu-1x2"]).changes == ()


def test_overrides_without_a_recipe_are_refused(checkout: Path):
    file = str(lock())
    with pytest.raises(HflowError, match="steps=3 has no effect"):
        launch.compare_plans(file, file, ["steps=3"])
