"""Which transport a plan chooses for new weights, and which ones it refuses: from the plan alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from hflow.launch.planning.compile import compile_recipe

RECIPES = Path(__file__).parents[2] / "recipes"
QWEN = ("model@models.actor=qwen2.5-7b", "models.actor.path=null", "models.actor.gen.max_model_len=2048")
VLLM = ("models.actor.gen.engine=vllm",)
MEGATRON = ("models.actor.backend=megatron",)
KEY = "models.actor.gen.transport"
APART = ("placement=null", "models.actor.group=train", "models.actor.gen.group=rollout")


def plan(*overrides: str, recipe: str = "grpo.py"):
    return compile_recipe(RECIPES / recipe, overrides).plan


def on(cluster: str, train: str, rollout: str) -> tuple[str, ...]:
    return (f"cluster={cluster}", f"groups.train={train}", f"groups.rollout={rollout}", *APART)


TWO = on("cpu-1x2", "[0]", "[1]")
TWO_MACHINES = on("cpu-2x1", "[0]", "[1]")
GPUS = (*on("h100-1x8", "[0,1,2,3]", "[4,5,6,7]"), *QWEN)


@pytest.mark.first(5)
@pytest.mark.parametrize(
    ("overrides", "how", "transport"),
    [
        (("cluster=cpu-1x1",), "shared", ""),
        (("cluster=cpu-1x2",), "gather", ""),
        (TWO, "pull", "store"),
        (("cluster=cpu-1x1", *VLLM), "pull", "shared"),
        (("cluster=cpu-1x2", *VLLM, "models.actor.gen.layout=t2"), "pull", "shared"),
        ((*TWO, *VLLM), "pull", "shared"),
        ((*TWO_MACHINES, *VLLM), "pull", "store"),
        (GPUS, "pull", "collective"),
        ((*GPUS, *VLLM), "pull", "collective"),
        (("cluster=h100-1x1", *VLLM, "models.actor.optim.lr=1e-6"), "pull", "ipc"),
        (("cluster=h100-1x8", *QWEN, *VLLM, "models.actor.gen.layout=d4t2"), "gather", ""),
        (
            (
                "cluster=h100-1x8",
                "placement=actor,actor.gen=all",
                *QWEN,
                *VLLM,
                "models.actor.gen.delta=true",
            ),
            "pull",
            "shared",
        ),
        (("cluster=h100-1x8", *QWEN, *VLLM, f"{KEY}=shared"), "pull", "shared"),
        (
            # Each half that an engine's rank needs is in place.
            (
                "cluster=h100-1x4",
                *QWEN,
                *VLLM,
                *MEGATRON,
                "models.actor.layout=d2t2",
                "models.actor.gen.layout=d2t2",
            ),
            "pull",
            "ipc",
        ),
        (("cluster=cpu-1x2", *VLLM, f"{KEY}=gather"), "gather", ""),
        (("cluster=cpu-1x2", f"{KEY}=gather"), "gather", ""),
    ],
)
def test_a_plan_chooses_a_transport(overrides: tuple[str, ...], how: str, transport: str) -> None:
    (route,) = plan(*overrides).weights
    assert (route.how, route.transport, bool(route.why)) == (how, transport, bool(transport))


@pytest.mark.first(4)
@pytest.mark.parametrize(
    ("overrides", "transport", "near"),
    [
        (("cluster=h100-2x8", *QWEN, *VLLM, "models.actor.gen.layout=d8t2"), "", "ipc"),
        (("cluster=h100-1x8", *QWEN, *VLLM, f"{KEY}=shared"), "shared", "ipc"),
        (("cluster=h100-2x8", *QWEN, *VLLM, f"{KEY}=store"), "store", "ipc"),
        (("cluster=cpu-1x2", *VLLM, f"{KEY}=gather"), "", "shared"),
        (("cluster=cpu-1x2", f"{KEY}=gather"), "", ""),
        (("cluster=cpu-2x1", *VLLM), "store", "shared"),
        (("cluster=cpu-1x2", *VLLM, f"{KEY}=disk"), "disk", "shared"),
        (("cluster=cpu-1x2", *VLLM, f"{KEY}=disk", "workers=inproc"), "disk", ""),
        (("cluster=cpu-1x2", *VLLM), "shared", ""),
        (("cluster=h100-1x1", *VLLM, "models.actor.optim.lr=1e-6"), "ipc", ""),
        ((*GPUS, *VLLM), "collective", ""),
        ((*TWO_MACHINES, *VLLM), "store", ""),
    ],
)
def test_what_the_own_device_holds_does_not_leave_it(
    overrides: tuple[str, ...], transport: str, near: str
) -> None:
    (route,) = plan(*overrides).weights
    assert (route.transport, route.near) == (transport, near)


@pytest.mark.parametrize(
    ("overrides", "transport", "reason"),
    [
        (TWO_MACHINES, "shared", "are on 2 machines"),
        (("cluster=cpu-1x1", *VLLM), "collective", "share a device, and a broadcast needs one per process"),
        ((*TWO, "workers=inproc"), "collective", "workers=inproc is one process"),
        (TWO, "ipc", "the cluster's devices are cpu, and only GPUs have it"),
        (GPUS, "ipc", "has no process of its own on the trainer's GPU"),
        ((*GPUS, *VLLM), "ipc", "need weights that other devices hold"),
        ((*GPUS, *VLLM), "gather", "does not have exactly the devices of its trainer"),
        (("cluster=cpu-1x2", *VLLM, "workers=inproc"), "gather", "workers=inproc is one process"),
        (("cluster=cpu-1x2", *VLLM, "models.actor.gen.delta=true"), "gather", "and not changes alone"),
    ],
)
def test_a_plan_refuses_a_transport(overrides: tuple[str, ...], transport: str, reason: str) -> None:
    reasons = plan(*overrides, f"{KEY}={transport}").unrunnable
    (found,) = [text for text in reasons if KEY in text]
    assert found.startswith(f"{KEY}={transport} cannot be used: ")
    assert reason in found
    assert found.endswith(f"Set {KEY}=auto.")


@pytest.mark.parametrize("transport", ["store", "disk", "shared", "collective"])
def test_engines_apart_can_use_any_other(transport: str) -> None:
    found = plan(*TWO, f"{KEY}={transport}")
    assert [route.transport for route in found.weights] == [transport]
    assert not [text for text in found.unrunnable if KEY in text]
