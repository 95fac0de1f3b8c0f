"""Figures of a calibration: which kernel, link, layer and version each one is for."""

from dataclasses import replace
from pathlib import Path

import pytest
from cost_kit import NO_LOSS, SMALL, TOY, named, side, work

from hflow.config import RunConfig
from hflow.config.schema import LoraConfig
from hflow.launch.planning.request import cluster_hardware
from hflow.planner.forecast.cost.collectives import RankPlacement
from hflow.planner.forecast.cost.explain import PARTS
from hflow.planner.forecast.cost.generation import decode_collectives, decode_step
from hflow.planner.forecast.cost.kernels import adapter_bytes, attention_rate, pass_seconds
from hflow.planner.forecast.cost.training import forward, train
from hflow.planner.forecast.cost.transfers import load_weights
from hflow.planner.plan.calibration import (
    HostTimes,
    LinkRate,
    MemoryRate,
    PublishedError,
    TrainerTimes,
    changed_figures,
)
from hflow.planner.plan.hardware import Hardware
from hflow.planner.plan.rows import WeightRoute
from hflow.planner.plan.traits import traits
from hflow.report.text.plan.assumptions import accuracy_text
from hflow.shapes.model_shape import Experts

MIXED = replace(SMALL, family="qwen3_moe", experts=Experts(8, 2, 32))
"""4 layers with 8 experts, of which a token passes 2."""


def calibrated(**figures) -> Hardware:
    return replace(TOY, calibration=replace(NO_LOSS, **figures))


# ----------------------------------------------------------------------------------- attention
@pytest.mark.parametrize(
    ("kernel", "share"),
    [
        ("flash-attn-3 3.0.0", 0.5),
        ("flash-attn 2.8.3", 0.3),
        ("torch varlen", 0.2),
        ("torch sdpa", 0.9),
        ("", 0.9),
    ],
)
def test_each_attention_kernel_has_its_rate(kernel: str, share: float):
    rates = {"flash-attn": 0.3, "flash-attn-3": 0.5, "torch varlen": 0.2}
    one = replace(side(hardware=calibrated(attention=0.9, attention_of=rates)), attention_kernel=kernel)
    assert attention_rate(one) == pytest.approx(share * 1e12)
    own = replace(one, host=replace(one.host, attention=0.7))
    assert attention_rate(own) == pytest.approx(0.7e12)


# ------------------------------------------------------------------------- two rates between machines
def test_weights_of_an_update_have_a_rate_of_their_own():
    """1e9 bytes for an engine on another machine, over a link of 1e9 bytes/s."""

    def arriving(**figures) -> float:
        engine = side(backend="vllm", hardware=calibrated(**figures), per_machine=1)
        route = WeightRoute(
            "m", "m@train", "m@gen", "pull", moved_bytes=10**9, node_bytes=10**9, transport="collective"
        )
        parts = load_weights(route, engine, RankPlacement(), engine.hardware.inter, 1)
        return named(parts)["weights"]

    assert arriving() == pytest.approx(1, rel=1e-3)
    assert arriving(updates=LinkRate(0.25)) == pytest.approx(4, rel=1e-3)
    assert arriving(updates=LinkRate(0.25), inter=LinkRate(0.5)) == pytest.approx(4, rel=1e-3)
    assert arriving(inter=LinkRate(0.5)) == pytest.approx(2, rel=1e-3)


def test_collectives_of_training_keep_the_rate_between_machines():
    slow, both = calibrated(inter=LinkRate(0.5)), calibrated(inter=LinkRate(0.5), updates=LinkRate(0.1))
    steps = [train(side(layout="d2", hardware=one, per_machine=1), work(100.0), 1) for one in (slow, both)]
    assert steps[0] == steps[1]


# ----------------------------------------------------------------------------------- layers with experts
def test_the_host_counts_tokens_only_where_they_leave_their_rank():
    host = HostTimes(expert_us=100, exchange_us=30, expert_launch_us=10)

    def waiting(layout: str, **changes) -> float:
        one = side(MIXED, layout, backend="megatron", host=host, tokens_per_microbatch=64)
        return named(forward(replace(one, **changes), work(64.0)))["experts' host"]

    assert waiting("d4e4") == pytest.approx(4 * 130e-6)
    by_kernels = replace(traits("megatron"), has_exchange_kernels=True)
    assert waiting("d4e4", traits=by_kernels) == pytest.approx(4 * 100e-6)
    assert waiting("d4") == pytest.approx(4 * 10e-6)
    assert waiting("d4e4", counts_tokens=False) == pytest.approx(4 * 10e-6)


def test_experts_are_computed_one_by_one_before_compute_capability_9():
    host = HostTimes(expert_loop_us=5)

    def waiting(capability: tuple[int, int] | None, layout: str = "d4") -> float:
        hardware = replace(TOY, device=replace(TOY.device, capability=capability))
        one = side(MIXED, layout, backend="megatron", hardware=hardware, host=host)
        return named(forward(one, work(64.0))).get("experts' host", 0.0)

    assert waiting((8, 0)) == pytest.approx(4 * 8 * 5e-6)
    assert waiting((8, 0), "d4e4") == pytest.approx(4 * 2 * 5e-6)
    assert waiting((9, 0)) == waiting((10, 0)) == waiting(None) == 0


def test_ranks_that_divide_experts_wait_for_the_one_with_most_tokens():
    waits = calibrated(expert_wait=1.5)

    def decoding(layout: str, hardware: Hardware, **changes) -> float:
        one = replace(side(MIXED, layout, backend="vllm", hardware=hardware), **changes)
        return decode_step(one, 8, 800).seconds + decode_collectives(one, 8).seconds

    assert decoding("d4e4", waits) == pytest.approx(1.5 * decoding("d4e4", TOY))
    assert decoding("d4", waits) == decoding("d4", TOY)
    assert decoding("d4e4", waits, is_uneven=False) == decoding("d4e4", TOY)
    kernels = [
        pass_seconds(side(MIXED, "d4e4", backend="megatron", hardware=one), work(64.0), 1, 1, 1, 1)
        for one in (waits, TOY)
    ]
    assert kernels[0] == pytest.approx(1.5 * kernels[1])
    sent = [
        named(forward(side(MIXED, "d4e4", backend="megatron", hardware=one), work(64.0)))["tokens to experts"]
        for one in (waits, TOY)
    ]
    assert sent[0] == pytest.approx(1.5 * sent[1])


# ----------------------------------------------------------------------------------- trainers
def test_a_trainer_takes_longer_than_a_program_that_pretrains():
    """A factor of kernels other than attention, and a wait for each layer of a pass; engines have neither."""
    trainer = TrainerTimes(factor=1.5, layer_us=100)
    plain, slow = side(), side(hardware=calibrated(trainer=trainer))
    samples = work(1000.0, squares=1e6)
    attention = pass_seconds(plain, samples, 1, 1, 1, 1) - pass_seconds(plain, work(1000.0), 1, 1, 1, 1)
    kernels = pass_seconds(plain, work(1000.0), 1, 1, 1, 1)
    assert pass_seconds(slow, samples, 1, 1, 1, 1) == pytest.approx(1.5 * kernels + attention)
    assert named(forward(slow, samples))["host"] == pytest.approx(4 * 100e-6)
    recomputed = side(hardware=calibrated(trainer=trainer), activation_checkpointing=True)
    assert named(train(recomputed, samples, 2))["host"] == pytest.approx(2 * 3 * 4 * 100e-6)
    assert "host" not in named(forward(plain, samples))
    assert side(backend="vllm", hardware=calibrated(trainer=trainer)).trainer == TrainerTimes()


def test_adapters_read_inputs_and_add_to_outputs():
    """q, k, v, o, gate and up read 64 numbers, down reads 128; they write 3 x 64, 2 x 32 and 2 x 128."""
    memory = calibrated(memory=MemoryRate(1.0, 1.0, passes=8.0))
    one = side(hardware=memory, lora=LoraConfig(r=4))
    inputs, outputs = 6 * 64 + 128, 3 * 64 + 2 * 32 + 2 * 128
    assert adapter_bytes(one, 10) == 10 * 4 * (inputs + 4 * outputs)
    assert adapter_bytes(side(hardware=memory), 10) == 0
    assert adapter_bytes(side(lora=LoraConfig(r=4)), 10) == 0, "the calibration counts no such traffic"


# ----------------------------------------------------------------------------------- warnings
def test_figures_of_another_kernel_or_version_are_named():
    measured = replace(
        NO_LOSS,
        is_measured=True,
        attention_of={"flash-attn": 0.4},
        versions={"torch": "2.11.0", "transformers": "5.1"},
    )
    same = {"torch": "2.11.0", "transformers": "5.1", "numpy": "2.0"}
    assert not list(changed_figures(measured, same, ["flash-attn"]))
    (kernel,) = changed_figures(measured, same, ["torch varlen", "torch varlen"])
    assert "attention was measured with flash-attn" in kernel
    assert "torch varlen" in kernel
    (package,) = changed_figures(measured, {**same, "transformers": "5.2"}, ["flash-attn"])
    assert all(word in package for word in ("times of the host", "5.1", "5.2", "hflow profile"))
    assert not list(changed_figures(measured, {}, ["flash-attn"])), "nothing is installed here"
    shipped = replace(measured, is_measured=False, versions={})
    assert not list(changed_figures(shipped, same, ["torch sdpa"]))


# ----------------------------------------------------------------------------------- accuracy
def hardware_of(cluster: str, recipe: Path) -> Hardware:
    return cluster_hardware(RunConfig(name="r", cluster=cluster), recipe)[1]


def test_shipped_figures_say_how_far_they_are_from_published_runs(tmp_path: Path):
    recipe = tmp_path / "recipe.py"
    one = hardware_of("h100-1x8", recipe).calibration
    assert one.published["training pass"].rows > 50
    assert one.published == hardware_of("h800-1x8", recipe).calibration.published
    assert one.published != hardware_of("h200-1x8", recipe).calibration.published
    assert not hardware_of("l40s-1x8", recipe).calibration.published
    own = tmp_path / "hardware" / "calibrations"
    own.mkdir(parents=True)
    shipped = Path(__file__).parents[2] / "configs" / "hardware" / "calibrations" / "hopper.yaml"
    (own / "hopper.yaml").write_text(shipped.read_text())
    assert not hardware_of("h100-1x8", recipe).calibration.published, "the user's file may say anything"


def test_accuracy_is_printed_by_kind_of_figure():
    published = {
        "training pass": PublishedError(10, 0.12, 0.9),
        "decode": PublishedError(3, 0.05, 1.0),
        "gain by staleness": PublishedError(4, 0.2, 0.8, 3),
    }
    text = accuracy_text(replace(NO_LOSS, published=published), "toy")
    assert "training pass 12 % off (10 runs, median 10 % too low)" in text
    assert "decode 5 % off (3 runs, median as measured)" in text
    assert "gain by staleness 20 % off (4 runs, 3 on the right side of 1)" in text
    assert accuracy_text(NO_LOSS, "toy") == "no published run on toy was compared"


def test_every_place_of_a_part_is_known():
    assert {where for where, _ in PARTS.values()} <= {
        "device",
        "host",
        "network",
        "PCIe",
        "disk",
        "recipe",
    }
