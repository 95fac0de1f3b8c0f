"""Recipe files: reading them, their bodies, and a configuration's overrides."""

import sys
from pathlib import Path

import cloudpickle
import forked_python
import pytest

from hflow.base.errors import ConfigError, RecipeError
from hflow.dsl import apply_overrides, load_recipe, overridable_keys
from hflow.graph.build import build_graph
from hflow.graph.ir import NodeSpec, RecipeSpec

GOOD = Path(__file__).parents[1] / "graphs" / "good"


def node(spec: RecipeSpec, name: str) -> NodeSpec:
    return next(node for node in spec.nodes if node.name == name)


def refusal(path: Path, text: str) -> str:
    path.write_text(text)
    with pytest.raises(RecipeError) as refused:
        load_recipe(path)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_a_missing_file_and_its_nearest(tmp_path: Path):
    (tmp_path / "ppo.py").write_text("")
    with pytest.raises(RecipeError, match=r"there is no recipe file '.*pppo.py'; did you mean 'ppo.py'\?"):
        load_recipe(tmp_path / "pppo.py")


def test_a_file_that_is_not_python_is_refused(tmp_path: Path):
    path = tmp_path / "bad.py"
    assert refusal(path, "x = 1\nx = = 2\n") == f"{path}:2: invalid syntax"
    (tmp_path / "recipe.yaml").write_text("a: 1")
    with pytest.raises(RecipeError, match=r"recipe\.yaml: a recipe must be a \.py file"):
        load_recipe(tmp_path / "recipe.yaml")


def test_an_error_in_a_recipe_names_its_line(tmp_path: Path):
    path = tmp_path / "bad.py"
    assert refusal(path, "import json\n\njson.loads('{')\n").startswith(f"{path}:3: JSONDecodeError: ")
    assert refusal(path, "import no_such_module\n") == (
        f"{path}:1: ModuleNotFoundError: No module named 'no_such_module'"
    )


def test_a_recipe_of_a_package_that_is_not_installed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "agents", None)
    with pytest.raises(RecipeError, match="pip install openai-agents"):
        load_recipe(Path(__file__).parents[2] / "recipes" / "custom" / "openai_agents.py")


def test_an_undefined_annotation(tmp_path: Path):
    text = (
        "from __future__ import annotations\nfrom hflow import compute\n"
        "@compute(per='sample')\ndef score(completion: strr) -> float:\n    return 0.0\n"
    )
    path = tmp_path / "bad.py"
    assert refusal(path, text).startswith(f"{path}:3: score: an annotation uses 'strr', which is not defined")


def test_a_recipe_declares_its_models_datasets_and_nodes():
    spec = load_recipe(GOOD / "ppo.py").spec()
    assert (spec.name, spec.dataset, spec.unlisted) == ("ppo", "train", ())
    lake = load_recipe(Path(__file__).parents[2] / "recipes" / "environments" / "frozen_lake.py").spec()
    assert lake.unlisted == (), "a node of which others are made is used"
    assert spec.doc == "PPO: critic, KL in the reward, GAE, decoupled loss."
    assert [model.name for model in spec.models] == ["actor", "ref", "critic"]
    assert next(model for model in spec.models if model.name == "ref").init_from.name == "actor"


def test_bodies_are_the_functions_of_the_file():
    recipe = load_recipe(GOOD / "ppo.py")
    bodies = recipe.bodies()
    assert set(bodies) == {node.name for node in recipe.spec().nodes}
    assert bodies["score"](" 4 ", "4") == 1.0


def test_implied_nodes_have_bodies_too():
    recipe = load_recipe(GOOD / "game.py")
    implied = {node.name: node.on for node in recipe.spec().nodes if node.implicit}
    assert implied == {"alice_inf": "alice_play", "bob_inf": "bob_play"}
    assert set(implied) < set(recipe.bodies())


def test_a_body_travels_by_value_to_a_process_without_the_file(tmp_path: Path):
    recipe = load_recipe(GOOD / "own_kind.py")
    module = sys.modules[recipe.module]
    assert recipe.module == "hflow_recipe_own_kind"
    cloudpickle.register_pickle_by_value(module)
    try:
        (tmp_path / "bodies").write_bytes(cloudpickle.dumps(recipe.bodies()))
    finally:
        cloudpickle.unregister_pickle_by_value(module)
    code = (
        "import pickle, torch\n"
        "bodies = pickle.load(open('bodies', 'rb'))\n"
        "audited = bodies['audit'](reward=torch.tensor([0.125, 1.0]), scale=3.0)\n"
        "print(bodies['score']('4', '4'), audited.tolist())\n"
    )
    done = forked_python.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.split(maxsplit=1) == ["1.0", "[0.375, 0.5]\n"], done.stderr


def test_overrides_change_knobs_options_and_fields():
    spec = load_recipe(GOOD / "dapo.py").spec()
    bound = apply_overrides(
        spec,
        {
            "actor_train": {"clip": 0, "minibatches": 2, "prox": "none", "clip_high": None},
            "actor_gen": {"group": 4, "stop": ["\n"]},
        },
    )
    trained, generated = node(bound, "actor_train"), node(bound, "actor_gen")
    assert {k.name: k.value for k in trained.knobs}["clip"] == 0.0
    assert {k.name: k.value for k in trained.knobs}["clip_high"] is None
    assert (trained.option("minibatches"), trained.option("prox")) == (2, "none")
    assert (generated.group, generated.option("stop")) == (4, ("\n",))
    assert apply_overrides(spec, {}) == spec
    assert node(spec, "actor_gen").group == 16


def test_an_override_of_prox_brings_actor_inf_along():
    spec = load_recipe(GOOD / "dapo.py").spec()
    assert "actor_inf" in {node.name for node in build_graph(spec).nodes}
    unread = build_graph(apply_overrides(spec, {"actor_train": {"prox": "none"}}))
    assert "actor_inf" not in {node.name for node in unread.nodes}
    assert unread.skipped == ()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            {"actor_trian": {}},
            "nodes.actor_trian: the recipe has no node 'actor_trian'; did you mean 'actor_train'?",
        ),
        (
            {"actor_train": {"clib": 1}},
            "nodes.actor_train.clib: the node has no such knob or option; did you mean 'clip'?",
        ),
        (
            {"actor_train": {"loss": "sapo"}},
            "nodes.actor_train.loss: the node has no such knob or option, as every loss is a node. In the "
            "place of actor_train, list sapo_train",
        ),
        ({"actor_train": {"clip": "low"}}, "nodes.actor_train.clip is 'low'; it must be float"),
        ({"actor_train": {"epochs": 0}}, "nodes.actor_train.epochs is 0; it must be at least 1"),
        (
            {"actor_train": {"prox": None}},
            "nodes.actor_train.prox is None; it must be 'recompute' or 'loglinear' or 'metrics' or 'none'",
        ),
        (
            {"actor_train": {"returns": "x"}},
            "nodes.actor_train.returns: the node has no such knob or option",
        ),
    ],
)
def test_overrides_that_do_not_fit(overrides: dict, message: str):
    with pytest.raises(ConfigError) as refused:
        apply_overrides(load_recipe(GOOD / "dapo.py").spec(), overrides)
    assert str(refused.value).startswith(message)


def test_overridable_keys_of_a_node():
    spec = load_recipe(GOOD / "dapo.py").spec()
    assert set(overridable_keys(node(spec, "score"))) == {
        *("limit", "buffer", "timeout", "retries", "backoff", "concurrency", "min_group", "every", "after"),
    }
