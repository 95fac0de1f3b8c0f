"""`hflow new`, `hflow nodes` and `hflow run --cfg`: what a user starts from."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from hflow.base.errors import ConfigError, RecipeError
from hflow.base.shipped import find_recipe, shipped_recipes
from hflow.config import RunConfig
from hflow.dsl import overridable_keys
from hflow.launch import compose_recipe, new_recipe, ready_node, ready_nodes, recipe_nodes
from hflow.launch.planning.read_recipe import read_recipe
from hflow.report.text.nodes import render_node, render_nodes, render_recipe_nodes
from hflow.testing import try_recipe

OWN = '''from hflow import Dataset, Model, Recipe, Text, compute, nodes, use

data = Dataset("train", prompt=Text, answer=Text)
heldout = Dataset("heldout", prompt=Text, answer=Text)
actor = Model("actor", trainable=True)


@compute(per="sample", returns="reward")
def score(completion: str, answer: str, *, tolerance: float = 0.25) -> float:
    """Return how near a completion is.

    Args:
        completion: of the model.
        answer: of the row.
        tolerance: accepted distance.
    """
    return float(completion == answer)


recipe = Recipe(
    "mine",
    data,
    [
        use(nodes.sft_view, actor),
        use(nodes.sft_train, actor),
        use(nodes.actor_gen, actor, name="eval_gen", data=heldout, max_tokens=4),
        use(score, on="eval_gen"),
        use(score, name="accuracy", on="eval_gen", returns="accuracy"),
    ],
)
'''
OFTEN = ["ppo", "custom/retrieval", "gsm8k/grpo_7b"]
NAMES = ["dapo", "distill", "tool_agent", "custom/llm_judge"]


@pytest.mark.parametrize("name", [*OFTEN, *(pytest.param(name, marks=pytest.mark.long) for name in NAMES)])
def test_a_copy_is_the_recipe_and_its_whole_configuration_can_be_used_again(
    name: str, tmp_path: Path
) -> None:
    made = new_recipe(name, tmp_path / "mine")
    config, graph, _ = read_recipe(made.recipe)
    shipped, shipped_graph, _ = read_recipe(find_recipe(name))
    assert config == shipped
    assert [node.name for node in graph.nodes] == [node.name for node in shipped_graph.nodes]
    assert "recipes/" not in "".join(file.read_text() for file in made.files)
    text = compose_recipe(made.recipe)
    whole = yaml.safe_load(text)
    assert whole.keys() == vars(RunConfig(name="x")).keys()
    assert whole["models"].keys() == {model.name for model in graph.models}
    for node in graph.nodes:
        if not node.spec.implicit:
            assert whole["nodes"][node.name].keys() == set(overridable_keys(node.spec))
    made.recipe.with_suffix(".yaml").write_text(text)
    assert read_recipe(made.recipe)[1] == graph
    assert compose_recipe(made.recipe) == text


def test_what_a_recipe_needs_comes_with_it(tmp_path: Path) -> None:
    names = {file.name for file in new_recipe("custom/retrieval", tmp_path).files}
    assert names == {"retrieval.py", "retrieval.yaml", "text_index.py", "sums.txt", "test_retrieval.py"}


@pytest.mark.long
def test_every_recipe_can_be_copied(tmp_path: Path) -> None:
    names = shipped_recipes()
    assert {"grpo", "ppo", "sft"} <= set(names)
    for name in names:
        made = new_recipe(name, tmp_path / name)
        compile(made.files[-1].read_text(), str(made.files[-1]), "exec")
        assert made.files[-1].name == f"test_{made.recipe.stem}.py"


def test_files_are_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "test_grpo.py").write_text("mine")
    with pytest.raises(ConfigError, match=r"test_grpo.py exists already and is not overwritten"):
        new_recipe("grpo", tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["test_grpo.py"]


def test_the_chat_form_of_a_recipe(tmp_path: Path) -> None:
    assert new_recipe("grpo", tmp_path, chat=True).recipe.name == "grpo_chat.py"
    with pytest.raises(ConfigError, match=r"^ppo has no chat form; .* one that has: grpo$"):
        new_recipe("ppo", tmp_path, chat=True)


@pytest.mark.long
def test_a_recipe_is_tried_with_random_weights_where_a_checkpoint_is_missing(tmp_path: Path) -> None:
    made = new_recipe("distill", tmp_path / "mine")
    summary = try_recipe(made.recipe, tmp_path / "runs", ["nodes.eval_gen.after=9"], steps=1, batch=8)
    assert (summary.reason, summary.steps) == ("done", 1)


def test_everything_that_can_be_set_of_a_ready_node_has_a_meaning() -> None:
    nodes = ready_nodes()
    assert {"nodes.actor_train", "rewards.math"} <= {node.name for node in nodes}
    silent = [
        f"{node.name}: {option.name}"
        for node in nodes
        for option in (*node.knobs, *node.options)
        if not option.meaning
    ]
    assert silent == []
    assert [node.name for node in nodes if not node.summary] == []


def test_every_ready_node_is_listed_once() -> None:
    nodes = ready_nodes()
    text = "".join(part.text for part in Console(width=200).render(render_nodes(nodes, [])))
    assert sorted(re.findall(r"^  ((?:nodes|rewards)\.\w+)", text, re.M)) == sorted(n.name for n in nodes)


def test_nodes_of_a_recipe_have_the_values_of_its_configuration(tmp_path: Path) -> None:
    """Two nodes with one function have knobs of their own."""
    recipe = tmp_path / "mine.py"
    recipe.write_text(OWN)
    recipe.with_suffix(".yaml").write_text("nodes:\n  score: {tolerance: 0.5}\n  eval_gen: {every: 7}\n")
    nodes = {node.name: node for node in recipe_nodes(recipe)}
    assert list(nodes) == ["sft_view", "sft_train", "eval_gen", "score", "accuracy"]
    score, accuracy = nodes["score"], nodes["accuracy"]
    assert score.function == accuracy.function == "score, mine.py:8"
    assert nodes["eval_gen"].function == "nodes.actor_gen"
    assert score.summary == "Return how near a completion is."
    assert [(k.name, k.default, k.meaning) for k in score.knobs] == [("tolerance", 0.5, "accepted distance.")]
    assert [knob.default for knob in accuracy.knobs] == [0.25]
    assert next(option.default for option in nodes["eval_gen"].options if option.name == "every") == 7
    text = "".join(part.text for part in Console(width=200).render(render_node(accuracy)))
    assert "knobs, as nodes.accuracy.KNOB=VALUE; for this node alone" in text
    text = "".join(part.text for part in Console(width=200).render(render_recipe_nodes("mine.py", [score])))
    assert "score  compute per sample  score, mine.py:8  Return how near a completion is." in text
    assert recipe_nodes(recipe, "accuracy") == [accuracy]
    with pytest.raises(RecipeError, match=r"has no node 'scroe'; did you mean 'score'\?"):
        recipe_nodes(recipe, "scroe")


def test_a_ready_node_is_described_by_its_signature_and_docstring() -> None:
    node = ready_node("kl_reward")
    assert (node.kind, node.level) == ("compute", "batch")
    target = next(knob for knob in node.knobs if knob.name == "target")
    assert (target.type, target.default) == ("float | None", None)
    assert target.meaning.startswith("KL per sequence in nats")
    assert [field.name for field in node.outputs] == ["token_reward", "metrics"]
    assert "returns" not in [option.name for option in ready_node("nodes.actor_train").options]
