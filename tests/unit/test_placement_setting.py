"""Placement by short strings: every colocation of the contract, and one line for every contradiction."""

import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from model_configs import model_config
from plan_graphs import ema, grpo, infer, ppo, request

from hflow.base.errors import PlanError
from hflow.base.text import format_ranges
from hflow.config import load_config
from hflow.graph.ir import Graph, Node
from hflow.graph.model import Model
from hflow.launch.planning.compile import compile_recipe
from hflow.planner.compile import compile_plan
from hflow.planner.make.placement_setting import apply_placement, replace_layout
from hflow.planner.plan.rows import Plan

ROOT = Path(__file__).parents[2]


def rlhf() -> Graph:
    """PPO with a reward model: five replicas of four models."""
    graph = ppo()
    rew_inf = Node(infer("rew_inf", "rm", "rm_score"), "actor_gen")
    return replace(graph, nodes=(*graph.nodes, rew_inf), models=(*graph.models, Model("rm", head="score")))


def plan(
    placement: str | None, cluster: str = "h100-1x8", graph: Graph | None = None, **changes: object
) -> Plan:
    return compile_plan(graph or rlhf(), request(cluster, batch=64, placement=placement, **changes))


def groups(plan: Plan) -> dict[str, tuple[int, ...]]:
    return {group.name: group.devices for group in plan.groups}


def placed(plan: Plan) -> dict[str, tuple[str, str, tuple[int, ...]]]:
    return {r.name: (",".join(r.groups), str(r.layout), r.workers) for r in plan.replicas}


def refused(message: str, placement: str, cluster: str = "h100-1x8", **changes: object) -> None:
    with pytest.raises(PlanError) as refusal:
        plan(placement, cluster, **changes)
    assert message in str(refusal.value)


LOW, HIGH = (0, 1, 2, 3), (4, 5, 6, 7)


def test_nothing_colocated():
    made = plan("actor=0-1:d2 critic=2 ref=3 rm=4 actor.gen=5-7:d3")
    assert placed(made) == {
        "actor@train": ("actor", "d2t1p1", (0, 1)),
        "actor@gen": ("actor.gen", "d3t1p1", (5, 6, 7)),
        "critic@train": ("critic", "d1t1p1", (2,)),
        "ref@infer": ("ref", "d1t1p1", (3,)),
        "rm@infer": ("rm", "d1t1p1", (4,)),
    }
    assert made.schedule.shared == ()  # no engine takes turns with a batch node


def test_actor_and_ref_colocated():
    made = plan("actor,ref=0-1:d1t2 critic=2-3 rm=4 actor.gen=5-6:d2")
    assert placed(made)["ref@infer"] == placed(made)["actor@train"] == ("actor", "d1t2p1", (0, 1))
    assert dict(made.schedule.orders)["actor"] == ("actor_inf", "ref_inf", "actor_train", "save.actor")
    assert made.warnings == ("placement leaves devices 7 of cluster h100-1x8 unused",)


def test_critic_and_reward_model_colocated():
    made = plan("actor,ref=0-3 critic,rm=4-7 actor.gen=0-3:d4")
    assert groups(made) == {"actor": LOW, "critic": HIGH}
    orders = dict(made.schedule.orders)
    assert set(orders["critic"]) == {"critic_inf", "rew_inf", "gae", "critic_train", "save.critic"}
    assert dict(made.schedule.shared) == {"actor": ("actor@gen",)}


def test_engines_on_the_devices_of_two_trainers():
    made = plan("actor.gen=all:d4t2 actor,ref=0-3 critic,rm=4-7")
    assert groups(made) == {"actor": LOW, "critic": HIGH}
    assert placed(made)["actor@gen"] == ("actor,critic", "d4t2p1", (*LOW, *HIGH))
    assert made.schedule.shared == (("actor", ("actor@gen",)), ("critic", ("actor@gen",)))
    assert made.schedule.publishers == ()
    assert [route.how for route in made.weights] == ["pull"]


def test_a_trainer_on_the_devices_of_two_models():
    """It occupies both groups, each in the order that all nodes have together."""
    made = plan("actor,actor.gen=all critic,rm=0-3 ref=4-7")
    assert placed(made)["actor@train"] == ("critic,ref", "d8t1p1", (*LOW, *HIGH))
    orders = dict(made.schedule.orders)
    both = [name for name in orders["critic"] if name in orders["ref"]]
    assert both == ["actor_inf", "actor_train", "save.actor"]
    assert both == [name for name in orders["ref"] if name in orders["critic"]]
    node = next(node for node in made.schedule.nodes if node.name == "actor_train")
    assert node.groups == made.placement("actor_train").groups == ("critic", "ref")
    assert [route.how for route in made.weights] == ["gather"]
    last = [edge for edge in made.order if edge.src == "actor_train"]
    assert [(edge.groups, edge.dst) for edge in last] == [(("critic", "ref"), "save.actor")]


def test_groups_of_overlapping_sets_have_readable_names():
    made = plan("actor=0-3 critic=2-5 ref,rm=7 actor.gen=0-6")
    assert groups(made) == {
        "actor": (0, 1),
        "actor+critic": (2, 3),
        "critic": (4, 5),
        "actor.gen": (6,),
        "ref": (7,),
    }
    assert placed(made)["actor@gen"][0] == "actor,actor+critic,critic,actor.gen"
    # The device that only the engine uses sleeps with the others.
    assert dict(made.schedule.shared)["actor.gen"] == ("actor@gen",)
    assert "actor.gen" not in dict(made.schedule.orders)


def test_ranks_on_several_groups_are_in_the_order_of_devices():
    """So that tensor ranks are neighbours, although groups alternate."""
    made = plan("actor.gen=all:d2t4 actor,ref=0-1,4-5:d1t4 critic,rm=2-3,6-7:d1t4", "h100-2x4")
    assert placed(made)["actor@gen"][2] == (*LOW, *HIGH)


def test_keys_can_name_several_groups():
    models = {
        "actor": model_config(group="a", gen_group="a,b"),
        "critic": model_config(group="b"),
        "ref": model_config(group="a"),
        "rm": model_config(group="b"),
    }
    made = plan(None, models=models, groups={"a": LOW, "b": HIGH})
    same = plan("actor,ref=0-3 critic,rm=4-7 actor.gen=all")
    assert made.schedule.shared == (("a", ("actor@gen",)), ("b", ("actor@gen",)))
    assert [r.workers for r in made.replicas] == [r.workers for r in same.replicas]
    with pytest.raises(PlanError, match=r"in groups a and b, which have no devices yet; set groups\.a and"):
        plan(None, models=models)
    models["critic"] = model_config(group="b,b")
    with pytest.raises(PlanError, match=r"models\.critic\.group=b,b is not understood; list each group once"):
        plan(None, models=models, groups={"a": LOW, "b": HIGH})


def test_a_layout_that_reaches_no_device_of_a_group_is_refused():
    refused("none of group 'critic' (4-7)", "actor.gen=all:d4 actor,ref=0-3 critic,rm=4-7")


def test_all_colocated():
    everywhere = plan("actor,critic,ref,rm,actor.gen=all")
    assert groups(everywhere) == {"all": (*LOW, *HIGH)}
    assert everywhere == compile_plan(rlhf(), request("h100-1x8", batch=64))  # which is the default


def test_the_example_of_the_manual():
    made = plan("actor=0-3:d2t2p1 actor.gen=4-7:d4", graph=grpo())
    assert placed(made)["actor@train"] == ("actor", "d2t2p1", LOW)
    assert placed(made)["actor@gen"] == ("actor.gen", "d4t1p1", HIGH)
    assert placed(made)["ref@infer"] == ("actor", "d4t1p1", LOW)  # left out: where the trained model is


def test_devices_in_every_form():
    made = plan("actor=0-2,6:t4 critic=actor:d2 ref=critic rm=5,3,4 actor.gen=7")
    assert groups(made) == {"actor": (0, 1, 2, 6), "rm": (3, 4, 5), "actor.gen": (7,)}
    assert placed(made)["actor@train"][1:] == ("d1t4p1", (0, 1, 2, 6))
    assert placed(made)["critic@train"] == ("actor", "d2t1p1", (0, 1))
    assert placed(made)["ref@infer"] == ("actor", "d4t1p1", (0, 1, 2, 6))


def test_equal_sets_are_one_group_however_they_are_written():
    made = plan("actor=0-3 critic=3,2,1,0 actor.gen=0,1,2-3")
    assert groups(made) == {"actor": LOW}


def test_a_layout_smaller_than_its_devices_is_warned_of():
    made = plan("actor=0-3:d2 critic=4-7", graph=rlhf())
    assert made.warnings == (
        "actor@train uses 2 of the 4 devices of group 'actor'; the other 2 are idle during its turn",
    )


def test_tensor_ranks_on_several_machines_are_warned_of():
    made = plan("actor=0-7:d1t8 critic=0-7:d8", graph=rlhf(), cluster="cpu-2x4")
    (warning,) = made.warnings
    assert warning.startswith("actor@train: tensor ranks of d1t8p1 are on 2 machines, and every layer waits")
    assert plan("actor=0-7:d2t4 critic=0-7:d8", graph=rlhf(), cluster="cpu-2x4").warnings == ()


def test_models_left_out_follow_the_first_placed_trained_model():
    made = plan("critic=4-7")
    assert {group for group, _, _ in placed(made).values()} == {"critic"}


def test_models_left_out_of_the_placement_keep_their_layouts():
    made = plan("actor=0-3", models={"ref": model_config(layout="d2t2")})
    assert placed(made)["ref@infer"] == ("actor", "d2t2p1", LOW)


def test_layouts_on_all_devices():
    made = plan("actor.gen=all:d4t2")
    assert groups(made) == {"all": (*LOW, *HIGH)}
    assert (placed(made)["actor@gen"][1], placed(made)["actor@train"][1]) == ("d4t2p1", "d8t1p1")


def test_a_model_that_generates_and_infers_without_being_trained():
    made = plan("actor=0 ref=1 ref.gen=1", "cpu-1x2", graph=ema())
    assert placed(made)["ref@gen"] == ("ref", "d1t1p1", (1,))


def test_a_request_without_placement_is_unchanged():
    asked = request("h100-1x8")
    assert apply_placement(rlhf(), asked) is asked


NAMES = "(known: actor, actor.gen, critic, ref, rm)"


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        ("", "placement is empty; write items such as actor=0-3:d2t2p1, or set it to null"),
        *(
            (
                item,
                f"placement: {item!r} is not understood; write NAMES=DEVICES or NAMES=DEVICES:LAYOUT, as in "
                "actor,ref=0-3:d2t2p1",
            )
            for item in ("actor", "actor=", "=0-3", "actor,=0", "actor=0=1", "actor=0:d1:d1", "actor:d1=0")
        ),
        (
            "acter=0",
            "placement: 'acter=0' names 'acter', which this recipe does not have; did you mean 'actor'? "
            f"{NAMES}",
        ),
        (
            "critic.gen=0",
            "placement: 'critic.gen=0' names 'critic.gen', which this recipe does not have; did you mean "
            f"'critic'? {NAMES}",
        ),
        (
            "actor=0-1 critic,actor=2",
            "placement: 'actor' is placed by 'actor=0-1' and by 'critic,actor=2'; remove one of them",
        ),
        ("actor=0-3,2", "placement: 'actor=0-3,2' lists device 2 twice; list it once"),
        ("actor=3-0", "placement: range '3-0' in 'actor=3-0' is backwards; write 0-3"),
        ("actor=6-8", "placement: 'actor=6-8' names device 8, but cluster h100-1x8 has devices 0-7"),
        (
            "actor=0-3 ref=actr",
            "placement: 'actr' in 'ref=actr' is not a device, a range such as 0-3, or the name of another "
            "item; did you mean 'actor'?",
        ),
        (
            "actor=0,x",
            "placement: 'x' in 'actor=0,x' is not a device, a range such as 0-3, or the name of another item",
        ),
        (
            "actor=ref ref=actor",
            "placement: 'actor=ref' refers back to itself; name devices, as in actor=0-3",
        ),
        ("actor=actor", "placement: 'actor=actor' refers back to itself; name devices, as in actor=0-3"),
        (
            "actor=0-3:d2 critic=2-5",
            "actor@train: layout d2t1p1 uses devices 0-1, but none of group 'actor+critic' (2-3); give it "
            "the devices that it uses, as in placement='... actor=0-1'",
        ),
        (
            "ref=4-7",
            "gets all devices and overlaps 'ref=4-7'; place it too, as in actor=0-3",
        ),
        (
            "ref=0-3 rm=4-7",
            "gets all devices and overlaps 'ref=0-3'; place it too, as in actor=ref",
        ),
        ("actor=0-3:d8", "actor@train: layout d8t1p1 needs 8 devices, but group 'actor' has 4; d4t1p1 fits"),
        (
            "actor=0-1:t4",
            "actor@train: layout d1t4p1 needs 4 devices, but group 'actor' has 2; give it at least 4 "
            "devices, or reduce its t or p",
        ),
        (
            "actor=0-3:2d",
            "layout '2d' is not understood; write data, tensor, pipeline, context, expert and replicate "
            "sizes in that order, as in d2t2p1, d4, d8t2e8 or d16r2",
        ),
    ],
)
def test_contradictions_are_refused_in_one_line(placement: str, message: str):
    refused(message, placement)


@pytest.mark.parametrize(
    ("key", "changes"),
    [
        ("groups.a", {"groups": {"a": (0,)}}),
        ("models.actor.group", {"models": {"actor": model_config(group="a")}}),
        ("models.actor.gen.group", {"models": {"actor": model_config(gen_group="a")}}),
        ("models.actor.layout", {"models": {"actor": model_config(layout="d2")}}),
        ("models.actor.gen.layout", {"models": {"actor": model_config(gen_layout="d2")}}),
    ],
)
def test_a_placement_is_the_only_one(key: str, changes: dict[str, object]):
    refused(
        f"placement and {key} are both set; remove one of them",
        "actor=0-3 actor.gen=4-7",
        **changes,
    )


def test_a_range_that_is_too_long_is_refused_at_once():
    refused("names device 99999, but cluster h100-1x8 has devices 0-7", "actor=0-99999")
    refused("'0-999999999999' in 'actor=0-999999999999' is not a device", "actor=0-999999999999")


@given(st.sets(st.integers(0, 40), min_size=1))
def test_devices_read_back_from_their_ranges(devices: set[int]):
    held = tuple(sorted(devices))
    made = compile_plan(grpo(), request("h100-6x8", batch=64, placement=f"actor={format_ranges(held)}"))
    assert {group.devices for group in made.groups} == {held}


@pytest.mark.parametrize(
    "override",
    [
        "placement=actor=0-3:d2t2p1 actor.gen=4-7:d4",
        "placement='actor=0-3:d2t2p1 actor.gen=4-7:d4'",
        'placement="actor=0-3:d2t2p1 actor.gen=4-7:d4"',
        "++placement=actor=0-3:d2t2p1 actor.gen=4-7:d4",
    ],
)
def test_the_command_line_needs_no_quotes_of_hydra(override: str):
    config = load_config(ROOT / "recipes" / "grpo.py", [override])
    assert config.placement == "actor=0-3:d2t2p1 actor.gen=4-7:d4"


def test_unusual_placements_reach_the_planner_unchanged():
    for value, read in [("actor,ref=0-3", "actor,ref=0-3"), ("it's", "it's"), ("7", "7"), ("null", None)]:
        assert load_config(ROOT / "recipes" / "grpo.py", [f"placement={value}"]).placement == read


def test_a_placement_in_a_file(tmp_path):
    (tmp_path / "mine.yaml").write_text("placement: actor=0-3:d2t2p1 actor.gen=4-7:d4\n")
    assert load_config(tmp_path / "mine.py").placement == "actor=0-3:d2t2p1 actor.gen=4-7:d4"


@pytest.mark.parametrize(
    ("text", "replaced"),
    [
        ("actor=0-1:d2  actor.gen=2-3:d1t2", "actor=0-1:d2 actor.gen=2-3:new d1t2"),
        ("actor.gen,actor,ref=all:t2 critic=all", "actor,ref=all:t2 actor.gen=all:new t2 critic=all"),
        ("actor=0:d1 actor.gen=1", "actor=0:d1 actor.gen=1"),
    ],
)
def test_the_layout_of_one_name_is_replaced(text: str, replaced: str):
    assert replace_layout(text, "actor.gen", lambda layout: f"new {layout}") == replaced


MANUAL = (ROOT / "docs" / "placement.md").read_text()
COMMANDS = [
    line.removeprefix("hflow plan ")
    for block in re.findall(r"```sh\n(.*?)```", MANUAL, re.DOTALL)
    for line in block.replace("\\\n", " ").splitlines()
    if line.startswith("hflow plan ")
]
assert COMMANDS, "the manual has no examples"


@pytest.mark.first(4)
@pytest.mark.parametrize("command", COMMANDS)
def test_every_example_of_the_manual_can_be_planned(command: str, monkeypatch):
    monkeypatch.chdir(ROOT)
    recipe, *overrides = shlex.split(command, comments=True)
    made = compile_recipe(recipe, overrides).plan
    assert made.replicas


def test_documented_placement_errors_are_those_of_the_planner(monkeypatch):
    monkeypatch.chdir(ROOT)
    rows = re.findall(r"^\| `(placement='[^`]*)` \| `([^`]*)` \|$", MANUAL, re.MULTILINE)
    assert rows
    for overrides, message in rows:
        with pytest.raises(PlanError) as refusal:
            compile_recipe("recipes/ppo.py", ["cluster=h100-1x8", *shlex.split(overrides)])
        assert str(refusal.value) == message
