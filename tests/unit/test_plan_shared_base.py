"""What the planner knows of models on the weights of another one: their places and memory, and refusals."""

from dataclasses import replace

import plan_graphs as graphs
import pytest
from memory_kit import SMALL, named, rank
from model_configs import model_config

from hflow.base.errors import PlanError
from hflow.config.schema import LoraConfig
from hflow.planner.compile import compile_plan
from hflow.planner.forecast.memory.parts import engine_weights
from hflow.planner.search import search
from hflow.report.formatting import format_replica_size
from hflow.shapes.model_shape import num_parameters
from hflow.training.fsdp import memory
from hflow.training.megatron import memory as megatron_memory

LORA, OTHER = LoraConfig(r=4, alpha=8), LoraConfig(r=2, alpha=4)
ADAPTERS = 16_384
"""Of `SMALL`, of rank 4."""
SHAPES = {"actor": SMALL, "ref": SMALL, "critic": replace(SMALL, head="value")}


def request(critic=None, ref=None, actor=None, cluster="cpu-1x2", **changes):
    models = {
        "actor": model_config(**{"lora": LORA, "engine": "embedded"} | (actor or {})),
        "critic": model_config(**{"lora": OTHER, "base_of": "actor"} | (critic or {})),
        "ref": model_config(**{"base_of": "actor"} | (ref or {})),
    }
    return graphs.request(cluster, models=models, shapes=SHAPES, **changes)


def plan(*changes, **more):
    return compile_plan(graphs.ppo(), request(*changes, **more))


def bases(made):
    return {r.name: r.base_of for r in made.replicas if r.base_of}


@pytest.mark.parametrize("backend", ["torch", "megatron"])
def test_models_on_a_base_are_where_its_model_is(backend):
    own = {"backend": backend}
    made = plan(own, own, actor={"layout": "d1", "group": "a", "gen_group": "b", **own})
    assert bases(made) == {"critic@train": "actor@train", "ref@infer": "actor@train"}
    for name in ("critic@train", "ref@infer"):
        replica = made.replica(name)
        assert (replica.workers, str(replica.layout)) == ((0,), "d1t1p1")
    assert not made.unrunnable
    sizes = {name: format_replica_size(made.replica(name), SHAPES["actor"]) for name in bases(made)}
    assert sizes["ref@infer"] == "those of actor@train"
    assert sizes["critic@train"].startswith("those of actor@train + ")


@pytest.mark.parametrize("critic", [{"layout": "d1"}, {"group": "b"}])
def test_another_place_cannot_run(critic):
    made = plan(critic, actor={"group": "a", "layout": "d2"}, cluster="cpu-1x4")
    assert "critic@train" not in bases(made)
    (reason,) = made.unrunnable
    assert "base_of is actor, but critic@train is" in reason
    assert "Give models.critic the layout, group and kernels of models.actor" in reason


def test_a_placement_need_not_name_them():
    made = compile_plan(graphs.ppo(), request(placement="actor=1:d1 actor.gen=0:d1"))
    assert bases(made) == {"critic@train": "actor@train", "ref@infer": "actor@train"}
    assert {made.replica(name).workers for name in bases(made)} == {(1,)}


def test_the_base_is_in_memory_once():
    owner, other = rank(lora=LORA, dtype="bf16"), rank(lora=LORA, dtype="bf16")
    other = replace(other, replica=replace(other.replica, base_of="m@train"))
    assert named(memory.model_state(owner)) == {
        "weights": 2 * owner.sizes.total,
        "adapters": 4 * ADAPTERS,
        "optimizer": 8 * ADAPTERS,
    }
    assert named(memory.model_state(other)) == {"adapters": 4 * ADAPTERS, "optimizer": 8 * ADAPTERS}
    bare = rank(role="infer")
    bare = replace(bare, replica=replace(bare.replica, base_of="m@train"))
    assert not memory.model_state(bare)
    assert not megatron_memory.model_state(bare)
    megatron = replace(rank(backend="megatron", lora=LORA, dtype="bf16"), replica=other.replica)
    assert named(megatron_memory.model_state(megatron)) == {
        "adapters": 2 * ADAPTERS,
        "gradients": 4 * ADAPTERS,
        "fp32 weights": 4 * ADAPTERS,
        "optimizer": 8 * ADAPTERS,
    }
    engine = rank(backend="embedded", role="gen", lora=LORA)
    guest = replace(engine, replica=replace(engine.replica, base_of="m@gen"))
    assert engine_weights(engine) - engine_weights(guest) == 4 * engine.sizes.total
    alone = plan({"base_of": None, "path": "elsewhere"}, {"base_of": None, "path": "elsewhere"})
    held = [[phase.total for phase in made.forecast.memory] for made in (plan(), alone)]
    saved = [after - before for before, after in zip(*held, strict=True)]
    # On each of two ranks, a half of the weights of two models. Of the value head there is another one.
    weights = sum(num_parameters(SHAPES[name]) for name in ("ref", "critic"))
    assert min(saved) == pytest.approx(4 * weights / 2, abs=4 * SMALL.hidden)


def test_a_search_keeps_them_together():
    free = frozenset({"placement"})
    found = search(
        graphs.ppo(),
        request(
            cluster="h100-1x4",
            free=free,
            actor={"dtype": "bf16"},
            critic={"dtype": "bf16"},
            ref={"dtype": "bf16"},
        ),
    )
    made = compile_plan(graphs.ppo(), found.request)
    assert bases(made) == {"critic@train": "actor@train", "ref@infer": "actor@train"}
    assert not made.unrunnable


@pytest.mark.parametrize(
    ("critic", "message"),
    [
        ({"base_of": "actr"}, r"base_of is actr, which the recipe does not have; did you mean 'actor'"),
        ({"base_of": "critic"}, r"uses the weights of critic itself; name a model with weights of its own"),
        ({"base_of": "ref"}, r"uses the weights of actor itself"),
        ({"lora": None}, r"all weights of critic are trained; set models\.critic\.lora"),
        ({"path": "elsewhere"}, r"models\.critic\.path says that critic has other weights than"),
        ({"dtype": "bf16"}, r"whose dtype is fp32, but that of critic is bf16; set models"),
        ({"backend": "megatron"}, r"whose backend is torch, but that of critic is megatron; set"),
        ({"offload": "all"}, r"critic\.offload is all, but its weights are those of actor"),
    ],
)  # fmt: skip
def test_what_a_base_is_refused_for(critic, message):
    with pytest.raises(PlanError, match=message):
        plan(critic)


@pytest.mark.parametrize(
    ("models", "message"),
    [
        ({"actor": {"lora": None}}, r"are not those of a model with adapters; set models\.actor\.lora"),
        ({"critic": {"base_of": None}, "ref": {"base_of": "critic"}},
         r"ref\.base_of is critic, which has the head 'value', but ref has the head 'lm'"),
        ({"actor": {"lora": LoraConfig(r=2, base="nf4")}},
         r"weights are in 4 bits, beside which one model's adapters are trained; remove models\.actor\.lora"),
        ({"actor": {"path": "here"}, "ref": {"architecture": {}}},
         r"models\.ref\.architecture says|has weights of here; remove models\.ref\.architecture"),
    ],
)  # fmt: skip
def test_what_models_of_a_base_are_refused_for(models, message):
    with pytest.raises(PlanError, match=message):
        plan(models.get("critic"), models.get("ref"), models.get("actor"))
