"""Types as mypy sees them: hflow and its recipes have the right ones, wrong uses of the API are errors."""

import re
import subprocess
import sys
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

import hflow
from hflow import Dataset, Model, RecipeError, compute, encode, extend, generate, infer, launch, train, update
from hflow.extend import NodeType, Option, typed_options

ROOT = Path(__file__).parents[2]
WRONG_USES = Path(__file__).with_name("wrong_uses.py")
ERROR = re.compile(r"(?P<file>[^:]+):(?P<line>\d+): error: .* \[(?P<code>[a-z-]+)\]$")

DECORATORS = [encode, generate, compute, infer, train, update]
UNTYPED = {"train": {"returns"}}
"""Options that exist only so that their error says what to do."""


@pytest.fixture(scope="module")
def errors() -> list[tuple[str, int, str]]:
    """mypy's errors in hflow, the recipes and the file of wrong uses: (file, line, code)."""
    for package in ("openai", "uvicorn"):  # hflow and its recipes have subclasses of theirs
        pytest.importorskip(package)
    files = [ROOT / "hflow", *sorted((ROOT / "recipes").rglob("*.py")), WRONG_USES]
    # Recipes of two directories may have the same name.
    options = ["--explicit-package-bases"]
    command = [sys.executable, "-m", "mypy", *options, *(str(file.relative_to(ROOT)) for file in files)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False, timeout=280)
    lines = [line for line in done.stdout.splitlines() if ": error: " in line]
    matches = [ERROR.match(line) for line in lines]
    assert lines, done.stdout + done.stderr
    assert all(matches), done.stdout
    return [(m["file"], int(m["line"]), m["code"]) for m in matches if m]


def test_hflow_and_its_recipes_have_the_right_types(errors: list[tuple[str, int, str]]):
    assert [error for error in errors if Path(error[0]).name != WRONG_USES.name] == []


def test_wrong_uses_are_errors(errors: list[tuple[str, int, str]]):
    expected = [
        (number, code)
        for number, line in enumerate(WRONG_USES.read_text().splitlines(), start=1)
        if "  # expect: " in line
        for code in line.split("  # expect: ")[1].split(", ")
    ]
    reported = [(line, code) for file, line, code in errors if Path(file).name == WRONG_USES.name]
    assert sorted(reported) == sorted(expected)


@pytest.mark.parametrize("decorator", DECORATORS, ids=lambda decorator: decorator.verb)
def test_every_option_is_typed_documented_and_has_a_default_that_fits(decorator: type[NodeType]):
    typed = get_type_hints(get_args(get_type_hints(decorator.__init__)["options"])[0])
    untyped = UNTYPED.get(decorator.verb, set())
    assert set(typed) == {*decorator.options, *decorator.objects} - untyped
    for name, option in decorator.options.items():
        assert option.check(option.default) == option.default
        assert bool(option.text) == (name not in untyped)
    for name, kind in decorator.objects.items():
        assert set(get_args(typed[name])) == {kind, type(None)}


def test_a_subclass_of_a_decorator_adds_options_to_the_table():
    class Scaled(infer):
        verb = "scaled"
        options = infer.options | {"factor": Option("float", 2.0)}

    assert Scaled(Model("actor"), factor=3).option_values["factor"] == 3.0
    with pytest.raises(RecipeError, match="@scaled has no option 'factr'; did you mean 'factor'"):
        Scaled(factr=3)


def test_a_user_may_type_the_constructor_of_a_node_type():
    class Ranked(NodeType):
        options = NodeType.options | {"best": Option("float", 10.0)}

        @typed_options
        def __init__(self, *, best: float = 10.0, returns: str | None = None) -> None:
            """Set the options."""

    assert Ranked(best=5, returns="grade").option_values["best"] == 5.0


def test_optional_objects_of_a_recipe_may_be_none():
    assert update(Model("ref"), source=None).has_open_models
    assert generate(data=None).given_objects == {}
    assert generate(data=Dataset("heldout", prompt=hflow.Text)).given_objects["data"].name == "heldout"


PUBLIC_NAMES = """
BackendError ConfigError DataError Dataset Endpoint Engine EpisodeError HflowError Image Json Messages
Metrics Model NotYetError Observer Output PerGroup PerSequence PerToken Plan PlanError Recipe
RecipeError RunError RunInfo RunSummary Sequences Service ServiceError Simulation State Tensor TensorDict Text
Tokenizer ToolCall Trajectory algo check compare compute encode evaluate export first_pass
generate infer nodes plan read_report resume rewards rows run sampler sandbox serve simulate size train
twin update use
"""
"""What recipes may import. Change it only with the reference."""


def test_public_names_are_those_that_were_agreed():
    assert hflow.__all__ == PUBLIC_NAMES.split()
    assert dir(hflow) == sorted(hflow.__all__)
    assert all(hasattr(hflow, name) for name in hflow.__all__)
    assert extend.__all__ == ["Context", "Level", "NodeType", "Option", "Shapes", "typed_options"]


def test_the_functions_of_the_commands_return_typed_values():
    assert hflow.check("recipes/sft.py").name == "sft"
    assert hflow.plan(ROOT / "recipes/sft.py").recipe == "sft"


def test_the_names_of_launch_are_in_its_table():
    assert all(hasattr(launch, name) for name in launch.__all__)
