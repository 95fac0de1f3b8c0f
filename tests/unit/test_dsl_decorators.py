"""Decorators and `use`, and the specifications that they make."""

from typing import Any, ClassVar, Literal

import pytest

from hflow import (
    Dataset,
    Engine,
    Model,
    Output,
    PerGroup,
    PerSequence,
    PerToken,
    Recipe,
    Tensor,
    Text,
    Trajectory,
    compute,
    encode,
    generate,
    infer,
    nodes,
    sandbox,
    train,
    update,
    use,
)
from hflow.base.errors import RecipeError
from hflow.base.validation import check_value, text_of_type
from hflow.extend import NodeType, Option
from hflow.graph.ir import Knob, Level, NodeSpec, Parameter, Returned
from hflow.types import Unit
from hflow.types.sandbox import Sandbox, sandbox_of

data = Dataset(prompt=Text, answer=Text)
actor = Model("actor", trainable=True)
other = Model("other", trainable=True)


@compute(per="sample", returns="reward", timeout=5)
def score(completion: str, answer: str, *, bonus: float = 1, mode: Literal["a", "b"] = "a") -> float:
    return bonus * float(completion == answer)


def spec_of(*listed: Any) -> NodeSpec:
    """The last node's spec in a recipe of a generator and these."""
    recipe = Recipe("test", data, [use(nodes.actor_gen, actor, name="source", group=2), *listed])
    return next(node for node in reversed(recipe.spec().nodes) if not node.implicit)


def test_the_decorated_function_is_the_same_and_still_a_function():
    def body(completion: str) -> float:
        return float(len(completion))

    assert compute(per="sample")(body) is body
    assert body("four") == 4.0


def test_a_sample_body_becomes_a_spec():
    spec = spec_of(score)
    assert (spec.name, spec.verb, spec.level) == ("score", "compute", Level.SAMPLE)
    assert spec.parameters == (
        Parameter("completion", "completion", Unit.TEXT, "str"),
        Parameter("answer", "answer", Unit.TEXT, "str"),
    )
    assert spec.returns == (Returned("reward", Unit.SEQUENCE, "float"),)
    assert spec.knobs == (Knob("bonus", "float", 1.0), Knob("mode", "'a' | 'b'", "a"))
    assert spec.option("timeout") == 5.0
    assert spec.option("retries") is None
    assert spec.where.file.endswith("test_dsl_decorators.py")


@pytest.mark.parametrize(
    ("hint", "unit", "scalar"),
    [
        (str, Unit.TEXT, "str"),
        (bool, Unit.SEQUENCE, "bool"),
        (list[int], Unit.TOKEN, "list[int]"),
        (dict, Unit.JSON, "dict"),
        (dict[str, Any], Unit.JSON, "dict"),
        (list[dict], Unit.JSON, "list[dict]"),
    ],
)
def test_types_of_a_sample_body(hint: Any, unit: Unit, scalar: str):
    def body(x):
        return 0.0

    body.__annotations__ = {"x": hint, "return": float}
    assert spec_of(compute(per="sample")(body)).parameters == (Parameter("x", "x", unit, scalar),)


@pytest.mark.parametrize(
    ("hint", "unit", "scalar"),
    [
        (float, Unit.GROUP, "float"),
        (list[str], Unit.TEXT, "list[str]"),
        (list[float], Unit.SEQUENCE, "list[float]"),
        (list[list[int]], Unit.TOKEN, "list[list[int]]"),
        (list[dict], Unit.JSON, "list[dict]"),
    ],
)
def test_types_of_a_group_body(hint: Any, unit: Unit, scalar: str):
    def body(x):
        return x

    body.__annotations__ = {"x": hint, "return": hint}
    spec = spec_of(compute(per="group")(body))
    assert spec.parameters == (Parameter("x", "x", unit, scalar),)
    assert spec.returns == (Returned("body", unit, scalar),)
    assert spec.option("min_group") == 2


def test_an_optional_edge_and_a_batch_body():
    @compute()
    def shaped(reward: PerSequence, prompt: Text, values: PerToken | None = None) -> PerSequence:
        return reward

    assert spec_of(shaped).parameters == (
        Parameter("reward", "reward", Unit.SEQUENCE, "tensor"),
        Parameter("prompt", "prompt", Unit.TEXT, "list[str]"),
        Parameter("values", "values", Unit.TOKEN, "tensor", optional=True),
    )


def test_weights_of_each_verb():
    @update(actor, source=other)
    def ema(target: Tensor, source: Tensor) -> Tensor:
        return target

    assert spec_of(score).reads_weights == ()
    assert spec_of(use(nodes.sft_view, actor)).reads_weights == ()
    inferred = spec_of(use(nodes.actor_inf, actor))
    assert (inferred.reads_weights, inferred.writes_weights) == (("actor",), ())
    trained = spec_of(use(nodes.sft_train, actor))
    assert (trained.reads_weights, trained.writes_weights) == (("actor",), ("actor",))
    averaged = spec_of(ema)
    assert (averaged.reads_weights, averaged.writes_weights) == (("actor", "other"), ("actor",))
    assert averaged.provided == (("target", "target"), ("source", "source"))


def test_one_engine_per_model_by_name_and_in_variants_by_place():
    @generate(actor, other, returns=("one", "two", "winner"))
    async def game(other: Engine, actor: Engine, prompt: str) -> tuple[Trajectory, Trajectory, float]:
        return await actor.complete(prompt), await other.complete(prompt), 1.0

    spec = spec_of(game)
    assert spec.provided == (("other", "engine:other"), ("actor", "engine:actor"))
    assert spec.streams == ("one", "two")
    assert spec.returns == (Returned("winner", Unit.SEQUENCE, "float"),)
    third = Model("third")
    swapped = spec_of(use(game, third, actor, name="again", returns=("a", "b", "winner")))
    assert swapped.provided == (("other", "engine:actor"), ("actor", "engine:third"))


def test_use_changes_only_its_arguments():
    variant = use(
        score, name="judged", reads={"completion": "prompt"}, returns="judged", bonus=2, retries=1, after=3
    )
    spec, old = spec_of(variant), spec_of(score)
    assert spec.parameters[0] == Parameter("completion", "prompt", Unit.TEXT, "str")
    assert spec.returns == (Returned("judged", Unit.SEQUENCE, "float"),)
    assert (spec.knobs[0].value, spec.option("retries"), spec.option("timeout")) == (2.0, 1, 5.0)
    assert (spec.after, old.after, old.knobs[0].value) == (3, 0, 1.0)
    assert spec.body == old.body
    assert variant("yes", "yes", bonus=3.0) == 3.0
    again = spec_of(use(variant, name="third", mode="b"))
    assert [knob.value for knob in again.knobs] == [2.0, "b"]
    assert again.parameters == spec.parameters


def test_prox_defaults_to_recompute_where_the_body_reads_it():
    @train(actor, reduce="token-mean")
    def plain(out: Output) -> PerToken:
        return -out.logprobs

    assert spec_of(plain).option("prox") == "none"
    assert spec_of(use(nodes.actor_train, actor)).option("prox") == "recompute"
    assert spec_of(use(nodes.actor_train, actor, prox="none")).option("prox") == "none"


def test_min_group_follows_the_body():
    @train(actor, reduce="group-mean")
    def pairs(out: Output) -> PerGroup:
        return out.logprobs

    assert spec_of(pairs).option("min_group") == 2
    assert spec_of(use(pairs, min_group=1)).option("min_group") == 1
    assert spec_of(use(nodes.sft_train, actor)).option("min_group") == 1


def test_the_digest_follows_the_body():
    @compute(per="sample", returns="x")
    def first(num_tokens: int) -> float:
        return 1.0 * num_tokens

    @compute(per="sample", returns="x")
    def second(num_tokens: int) -> float:
        return 2.0 * num_tokens

    assert spec_of(first).body.digest == spec_of(first).body.digest
    assert spec_of(first).body.digest != spec_of(second).body.digest


def test_encode_makes_a_group_from_a_list():
    spec = spec_of(use(nodes.pair, actor))
    assert (spec.group, spec.streams, spec.returns) == (2, ("pair",), ())
    with pytest.raises(RecipeError, match="belong together"):
        use(nodes.pair, actor, group=1)


def test_a_custom_kind_is_made_like_the_built_in_verbs():
    class Weighed(NodeType):
        verb: ClassVar = "weigh"
        level: ClassVar = Level.SAMPLE
        options: ClassVar = NodeType.options | {"unit": Option("str", "kg")}

        def cost(self, shapes: Any) -> float:
            return 0.5 + 0.25 * shapes.tokens

        def layout(self, field: str) -> str:
            return "sharded"

        def draw(self) -> str:
            return "diamond"

    @Weighed(unit="g")
    def weight(num_tokens: int) -> float:
        return num_tokens / 2

    spec = spec_of(weight)
    assert (spec.verb, spec.kind, spec.level) == ("compute", "weigh", Level.SAMPLE)
    assert (spec.option("unit"), spec.shape) == ("g", "diamond")
    assert spec.cost == (("constant", 0.5), ("tokens", 0.25), ("sequences", 0.0), ("groups", 0.0))
    assert spec.layouts == (("weight", "sharded"),)
    assert all(issubclass(verb, NodeType) for verb in (encode, generate, compute, infer, train, update))


def test_sandbox_marks_the_function_and_returns_it():
    def tool(x: int) -> int:
        return x + 1

    assert sandbox(timeout=2, memory_mb=64)(tool) is tool
    assert sandbox_of(tool) == Sandbox(timeout=2.0, memory_mb=64)
    assert sandbox_of(print) is None
    assert tool(1) == 2
    with pytest.raises(RecipeError, match=r"sandbox: memory_mb is 1; it must be at least 16"):
        sandbox(memory_mb=1)


@pytest.mark.parametrize(
    ("value", "kind", "result"),
    [
        (1, "float", 1.0),
        (None, "None | float", None),
        ("a", "'a' | 'b'", "a"),
        (["x", "y"], "tuple[str, ...]", ("x", "y")),
        (True, "bool", True),
        (3, "None | int", 3),
    ],
)
def test_check_value_accepts(value: object, kind: str, result: object):
    conformed = check_value(value, kind)
    assert (conformed, type(conformed)) == (result, type(result))


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (True, "int"),
        (True, "float"),
        (1.0, "int"),
        (None, "float"),
        ("c", "'a' | 'b'"),
        ([1], "tuple[str, ...]"),
        ({"a"}, "tuple[str, ...]"),
        (True, "1 | 2"),
        (float("nan"), "None | float"),
        ("3", "int"),
    ],
)
def test_check_value_refuses(value: object, kind: str):
    with pytest.raises(ValueError, match="it must be "):
        check_value(value, kind)


def test_text_of_type():
    assert text_of_type(float | None) == "float | None"
    assert text_of_type(tuple[int, ...]) == "tuple[int, ...]"
    assert text_of_type(tuple[int, str]) is None
    assert text_of_type(float | dict) is None
