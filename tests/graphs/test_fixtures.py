"""Every small recipe in `good`, `broken` and `warned` is checked as `hflow check` does."""

import re
from pathlib import Path

import pytest

from hflow.base.errors import RecipeError
from hflow.dsl import load_recipe
from hflow.graph.build import build_graph
from hflow.graph.draw import to_dot, to_mermaid
from hflow.graph.render import render_text

HERE = Path(__file__).parent
RECIPES = HERE.parents[1] / "recipes"


def files(folder: str) -> list[Path]:
    return sorted((HERE / folder).glob("*.py"))


def by_name(path: Path) -> str:
    return path.stem


def expected(path: Path) -> str:
    first = path.read_text().splitlines()[0]
    assert first.startswith("# expect: ")
    return first.removeprefix("# expect: ")


SHIPPED = [*sorted(RECIPES.glob("*.py")), RECIPES / "environments" / "grid_world.py"]


@pytest.mark.parametrize("path", [*files("good"), *SHIPPED], ids=by_name)
def test_good_recipes_pass_without_a_warning(path: Path):
    graph = build_graph(load_recipe(path).spec())
    assert graph.warnings == ()
    text = render_text(graph)
    for node in graph.nodes:
        assert re.search(rf"^  {node.name}  {node.spec.kind_name}\(", text, re.MULTILINE)
        assert f'"{node.name}" [' in to_dot(graph)
        assert f'  {node.name}["' in to_mermaid(graph)


@pytest.mark.parametrize("path", files("broken"), ids=by_name)
def test_broken_recipes_are_refused(path: Path):
    with pytest.raises(RecipeError) as refused:
        build_graph(load_recipe(path).spec())
    message = str(refused.value)
    assert expected(path) in message
    assert "\n" not in message
    assert path.name in message


@pytest.mark.parametrize("path", files("warned"), ids=by_name)
def test_warned_recipes_pass_with_one_warning(path: Path):
    graph = build_graph(load_recipe(path).spec())
    assert len(graph.warnings) == 1
    assert expected(path) in graph.warnings[0]
    assert path.name in graph.warnings[0]
    assert f"warning: {graph.warnings[0]}" in render_text(graph)
