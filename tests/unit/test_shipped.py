"""Recipes, configuration groups and checkpoints that come with hflow, in the source tree and in a wheel."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

from hflow.base.errors import RecipeError
from hflow.base.shipped import find_recipe, shipped_recipes
from hflow.cli.arguments import recipe_file

ROOT = Path(__file__).parents[2]


def test_a_name_is_a_shipped_recipe_and_a_path_is_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("grpo.py").write_text("")
    Path("grpo").mkdir()
    assert find_recipe("grpo") == ROOT / "recipes" / "grpo.py"
    assert find_recipe("custom/replay") == ROOT / "recipes" / "custom" / "replay.py"
    assert find_recipe("grpo.py") == Path("grpo.py")
    assert find_recipe("./grpo.py").is_file()
    assert {"judge_server", "custom/text_index"}.isdisjoint(shipped_recipes())


def test_a_name_that_is_also_a_file_here_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert recipe_file("grpo") == str(ROOT / "recipes" / "grpo.py")
    assert capsys.readouterr().err == ""
    Path("grpo.py").write_text("")
    assert recipe_file("grpo.py") == "grpo.py"
    assert capsys.readouterr().err == ""
    assert recipe_file("grpo") == str(ROOT / "recipes" / "grpo.py")
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err == (
        "warning: grpo is the recipe that comes with hflow; for the file here write grpo.py\n"
    )


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("grpoo", "no shipped recipe 'grpoo', and a recipe's file ends in .py; did you mean 'grpo'?"),
        ("replay", "did you mean 'custom/replay'?"),
        ("mine", "; to use the file, write mine.py"),
        ("lock.json", "; shipped recipes: "),
    ],
)
def test_an_unknown_name_is_refused_with_what_to_write(
    name: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("")
    with pytest.raises(RecipeError) as refusal:
        find_recipe(name)
    assert message in str(refusal.value)


def test_a_wheel_has_everything_that_commands_read(tmp_path: Path) -> None:
    (wheel,) = WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    with zipfile.ZipFile(wheel) as archive:
        packed = set(archive.namelist())
    sources = {
        f"hflow/{path.relative_to(base).as_posix()}"
        for base, folder in ((ROOT, "recipes"), (ROOT, "configs"), (ROOT / "hflow", "."))
        for path in (base / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert "hflow/py.typed" in sources
    assert "hflow/configs/checkpoints/addition/model.safetensors" in sources
    assert "hflow/recipes/custom/sums.txt" in sources
    assert sources - packed == set()
    assert {name.partition("/")[0] for name in packed} == {"hflow", "hflow_rl-0.1.0.dist-info"}
