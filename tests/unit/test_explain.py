"""`hflow plan --explain`: every second of a node has a place, and the figures that decide it."""

import pytest

from hflow.base.errors import PlanError
from hflow.launch import compile_recipe, explain
from hflow.planner.forecast.cost import Term

SEVEN_B = ("model@models.actor=qwen2.5-7b", "models.actor.path=null", "models.actor.gen.engine=vllm")
PLACED = (*SEVEN_B, "nodes.actor_gen.max_tokens=512", "batch=64")


@pytest.fixture(scope="module")
def colocated():
    """A plan on a CPU, whose models take turns."""
    return compile_recipe("grpo")


@pytest.fixture(scope="module")
def on_gpus():
    """Trainer and engine on devices of their own, on two machines."""
    return compile_recipe(
        "grpo", (*PLACED, "cluster=h100-2x8", "placement='actor=0-7:d8 actor.gen=8-15:d4t2'")
    )


@pytest.mark.parametrize("name", ["colocated", "on_gpus"])
def test_the_parts_of_every_node_add_up_to_its_seconds(name: str, request):
    compiled = request.getfixturevalue(name)
    assert len(compiled.plan.forecast.times) > 4
    for row in compiled.plan.forecast.times:
        found = explain(compiled, row.node)
        assert found.seconds == pytest.approx(row.seconds)
        assert sum(term.seconds for term in found.terms) == pytest.approx(row.seconds)
        assert [(term.name, pytest.approx(term.seconds)) for term in found.terms] == list(row.parts)


def named(terms: tuple[Term, ...], name: str) -> Term:
    return next(term for term in terms if term.name == name)


def figures(term: Term) -> dict[str, float]:
    return {figure.name: figure.value for figure in term.figures}


def test_a_decode_step_has_device_and_host(on_gpus):
    found = explain(on_gpus, "actor_gen")
    calibration = on_gpus.plan.hardware.calibration
    assert dict(found.facts)["engines"].startswith("4, with at most")
    decode = named(found.terms, "decode")
    scheduling = named(decode.terms, "scheduling")
    host = calibration.host["vllm"]
    assert scheduling.where == "host"
    assert figures(scheduling) == {
        "host.vllm.step_us": host.step_us,
        "host.vllm.sequence_us": host.sequence_us,
    }
    assert named(decode.terms, "products").where == "device"
    # It schedules a step ahead, beside the device.
    device = sum(term.seconds for term in decode.terms if term.where == "device")
    assert decode.seconds == pytest.approx(max(device, scheduling.seconds))


def test_kernels_of_training_add_up_and_name_their_kernel(on_gpus):
    found = explain(on_gpus, "actor_train")
    passes = named(found.terms, "forward and backward")
    launching = named(passes.terms, "launching kernels")
    device = sum(term.seconds for term in passes.terms if term.where == "device")
    assert passes.seconds == pytest.approx(max(device, launching.seconds))
    assert figures(launching) == {"host.torch.layer_us": 600.0}
    share = on_gpus.plan.hardware.calibration.attention_of["torch varlen"]
    assert figures(named(passes.terms, "attention")) == {"attention_of.torch varlen": share}
    host = named(found.terms, "host")
    assert (host.where, figures(host)) == ("host", {"trainer.layer_us": 1000.0})
    # One machine has no figure between machines; new weights on another one have that of updates.
    assert "inter.share" in figures(named(found.terms, "all-gather"))
    weights = named(explain(on_gpus, "actor@gen").terms, "weights")
    assert "updates.share" in figures(weights)
    assert "inter.share" not in figures(weights)


def test_an_unknown_node_is_named(colocated):
    with pytest.raises(PlanError, match=r"no node or engine is called 'actor_trian'.*actor_train"):
        explain(colocated, "actor_trian")


def test_the_command_prints_the_table(hflow):
    out = hflow.prints("plan", "grpo", "--explain", "actor_gen")
    assert all(word in out for word in ("where", "products", "together"))
    assert "remove other options" in hflow.refused("plan", "grpo", "--explain", "actor_gen", "--json")
