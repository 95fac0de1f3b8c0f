"""`hflow profile`: figures from made-up times, and a whole calibration of this machine's CPU in small."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from hflow.base.errors import ConfigError, PlanError, RunError
from hflow.config import RunConfig
from hflow.launch.planning.request import cluster_hardware
from hflow.planner.plan.calibration import HostTimes, LinkRate, MatmulRate, MemoryRate
from hflow.planner.plan.hardware import Link
from hflow.profiling import calibrate, measure
from hflow.profiling.calibrate import measure_hardware
from hflow.profiling.fit import (
    CollectiveTime,
    LoadTime,
    ProductTime,
    ShardedTime,
    StepTime,
    cold_seconds,
    decode_seconds,
    fit_decode,
    fit_link,
    fit_loads,
    fit_matmul,
    fit_memory,
    fit_sharded,
    fit_training,
    held_out_error,
    link_seconds,
    training_seconds,
)

RECIPE = Path("recipes/grpo.py")


def test_the_rate_of_products_is_found_from_their_seconds():
    true, peak = MatmulRate(share=0.6, half_size=64.0, kernel_us=8.0, tile_rows=32.0), 1e12
    shapes = [(m, k, n) for m in (16, 64, 512) for k, n in ((128, 512), (512, 512), (2048, 256))]
    rows = [ProductTime(*shape, true.seconds(*shape, peak)) for shape in shapes]
    found = fit_matmul(rows, peak)
    assert found.share == pytest.approx(0.6, rel=1e-6)
    assert (found.half_size, found.kernel_us, found.tile_rows) == (64.0, 8.0, 32.0)


def test_the_rate_of_a_link_is_found_from_all_reduces():
    link, true = Link("near", gb_per_s=10.0, latency_us=5.0), LinkRate(share=0.5, launch_us=20.0)
    # An all-reduce of 1 MB on 2 ranks moves 1 MB at 5 GB/s: 200 us, and 20 us, and the link's latency of 5
    # up and down.
    one = CollectiveTime(1_000_000, 2, 230e-6)
    assert link_seconds(one, true, link) == pytest.approx(one.seconds)
    rows = [CollectiveTime(n, r, 0.0) for n in (4096, 65536, 1_000_000, 16_000_000) for r in (2, 4)]
    rows = [CollectiveTime(r.num_bytes, r.ranks, link_seconds(r, true, link)) for r in rows]
    found = fit_link(rows, link)
    assert (found.share, found.launch_us) == (pytest.approx(0.5), pytest.approx(20.0))
    assert held_out_error(rows, partial(fit_link, link=link), partial(link_seconds, link=link)) < 1e-6


def test_messages_that_take_equally_long_show_no_less_than_their_rate():
    link = Link("near", gb_per_s=10.0, latency_us=0.0)
    found = fit_link([CollectiveTime(2_000_000, 2, 1e-3), CollectiveTime(20_000, 2, 1e-3)], link)
    assert (found.share, found.launch_us) == (pytest.approx(0.2, rel=0.05), pytest.approx(1000, rel=0.5))
    assert fit_link([CollectiveTime(2000, 2, 2e-3), CollectiveTime(20_000, 2, 1e-3)], link).share > 0


def test_an_all_gather_moves_half_the_bytes_of_an_all_reduce():
    assert CollectiveTime(1000, 4, 1.0).moved_bytes == 1500
    assert CollectiveTime(1000, 4, 1.0, is_all_reduce=False).moved_bytes == 750


def test_what_sharding_takes_is_found_from_steps_of_different_models():
    # 1 GB/s, and 10 ms of each step besides.
    rows = [ShardedTime(n, n / 1e9 + 0.01) for n in (2e6, 20e6, 100e6)]
    assert fit_sharded(rows) == (pytest.approx(1e9), pytest.approx(0.01))
    rate, step = fit_sharded([ShardedTime(2e6, 0.02), ShardedTime(20e6, 0.02)])
    assert (rate, step) == (pytest.approx(1e9), pytest.approx(0.02))


def test_the_time_of_a_tensor_is_found_from_weight_updates():
    rows = [LoadTime(10, 1_000_000, 10 * 300e-6 + 1e-3), LoadTime(40, 8_000_000, 40 * 300e-6 + 8e-3)]
    assert fit_loads(rows, seconds_per_byte=1e-9) == pytest.approx(300e-6)
    assert fit_loads(rows, seconds_per_byte=1e-6) == 0.0


def test_the_rate_at_which_weights_are_read_is_found_from_products_with_few_rows():
    rate, peak, sheet = MatmulRate(share=0.5, kernel_us=9.0), 1e11, 1e10
    # A row of 1000 x 1000 weights: 2e6 FLOPs at 5e10 take 40 us, 4 MB at 8e9 bytes/s take 500 us.
    one = ProductTime(1, 1000, 1000, 0.0)
    assert cold_seconds(one, rate, MemoryRate(0.8, 1.0, 1.0), peak, sheet, 4) == pytest.approx(540e-6)
    assert cold_seconds(one, rate, MemoryRate(0.8, 1.0), peak, sheet, 4) == pytest.approx(500e-6)
    for true in (MemoryRate(0.8, 1.0, 1.0), MemoryRate(0.3, 1.0, 4.0)):
        shapes = [(m, k, n) for m in (1, 8, 32, 128) for k, n in ((128, 512), (512, 512), (2048, 256))]
        seconds = [cold_seconds(ProductTime(*s, 0.0), rate, true, peak, sheet, 4) for s in shapes]
        rows = [ProductTime(*shape, took) for shape, took in zip(shapes, seconds, strict=True)]
        share, sharpness = fit_memory(rows, rate, peak, sheet, 4)
        assert (share, sharpness) == (pytest.approx(true.decode, rel=0.02), true.sharpness)


def test_times_of_an_engine_are_found_from_decode_steps_and_are_never_negative():
    true = HostTimes(gap_us=100.0, step_us=300.0, sequence_us=5.0, passes=4.0)
    empty = [
        StepTime(0.0, 1e-4 * n, 1e-6 * n * width * layers, layers, n)
        for layers, width in ((2, 1), (6, 2), (3, 4))
        for n in (1, 8, 64)
    ]
    # 6 layers of 64 sequences: 6,400 us of kernels, 4 x 768 us, 6 x 100 us, 300 us and 64 x 5 us.
    assert decode_seconds(empty[5], true) == pytest.approx((6400 + 3072 + 600 + 300 + 320) * 1e-6)
    found = fit_decode([replace(row, seconds=decode_seconds(row, true)) for row in empty])
    assert (found.gap_us, found.step_us) == (pytest.approx(100.0), pytest.approx(300.0))
    assert (found.sequence_us, found.passes) == (pytest.approx(5.0), pytest.approx(4.0))
    faster = [replace(row, seconds=0.9 * row.kernel_seconds) for row in empty]
    assert fit_decode(faster) == HostTimes(passes=0.0)


@pytest.mark.parametrize("is_ahead", [False, True])
def test_times_of_a_backend_are_found_from_its_calls(is_ahead: bool):
    true = HostTimes(layer_us=800.0, passes=20.0)
    empty = [StepTime(0.0, 2e-4 * n, 1e-5 * n, layers, n) for layers in (2, 6) for n in (1, 4, 16, 64, 256)]
    # Two layers and four samples: 800 us of kernels, 20 x 40 us, and 2 x 800 us on the host.
    assert training_seconds(empty[1], true, is_ahead) == pytest.approx(1600e-6 if is_ahead else 3200e-6)
    found = fit_training(
        [replace(row, seconds=training_seconds(row, true, is_ahead)) for row in empty], is_ahead
    )
    assert (found.layer_us, found.passes) == (pytest.approx(800, rel=0.03), pytest.approx(20, rel=0.03))


def test_a_neighbour_that_does_not_start_is_an_error(monkeypatch):
    monkeypatch.setattr(measure, "_keep_busy", print)
    with pytest.raises(RunError, match="ended with exit code 0"), measure.neighbours("cpu", 1):
        pytest.fail("measures")


def test_every_third_time_is_held_out():
    rows = [ProductTime(64, 64, 64, seconds) for seconds in (1.0, 1.0, 2.0, 1.0, 1.0, 4.0)]

    def mean(seen):
        return sum(row.seconds for row in seen) / len(seen)

    assert held_out_error(rows, mean, lambda row, seconds: seconds) == pytest.approx((0.5 + 0.75) / 2)


@pytest.mark.long
def test_a_profile_of_this_cpu_is_a_calibration_that_plans_can_name(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(measure, "SECONDS_EACH", 0.0)
    monkeypatch.setattr(calibrate, "BACKENDS", ("torch",))
    monkeypatch.setattr(measure, "ROWS", (16, 64))
    monkeypatch.setattr(measure, "SIDES", ((32, 64), (64, 64)))
    monkeypatch.setattr(measure, "COLD_BYTES", {"cpu": 2**23})
    monkeypatch.setattr(measure, "COLLECTIVE_BYTES", (4096, 65536))
    sizes = ((64, 128, 1), (128, 128, 2), (128, 256, 1))
    monkeypatch.setattr(measure, "MODELS", tuple(measure.SmallModel(*size) for size in sizes))
    monkeypatch.setattr(measure, "SEQUENCES", (1, 4))
    monkeypatch.setattr(measure, "LENGTHS", (8,))
    monkeypatch.setattr(measure, "BATCHES", ((1, 8), (2, 8)))
    lines = []
    found = measure_hardware("cpu", tmp_path / "here.yaml", lines.append)
    parts = ["collectives", "matrix products", "memory, attention and disk", "new weights", "decode steps"]
    assert lines == [*parts, "training with torch", "a short run"]
    missed = {"matmul fp32", "matmul bf16", "weights from memory", "new weights", "decode", "torch"}
    assert set(found.calibration.missed) == {*missed, "collectives", "step of a short run"}
    assert found.calibration.sample_us > 0
    assert found.calibration.node_us > 0
    assert "inter" in found.calibration.unmeasured

    file = str(found.file)
    _, hardware = cluster_hardware(RunConfig(name="mine", cluster="cpu-1x2", calibration=file), RECIPE)
    read = hardware.calibration
    assert (read.name, read.devices, read.is_measured) == ("here", ("cpu",), True)
    assert read.matmul["fp32"].share == pytest.approx(found.calibration.matmul["fp32"].share, rel=1e-4)
    assert read.host["embedded"].step_us == pytest.approx(
        found.calibration.host["embedded"].step_us, rel=1e-4
    )
    with pytest.raises(PlanError, match=r"was measured on cpu, but the cluster has h100"):
        cluster_hardware(RunConfig(name="mine", cluster="h100-1x8", calibration=file), RECIPE)


def test_a_device_that_is_not_there_is_refused(tmp_path: Path):
    with pytest.raises(PlanError, match="unknown device 'h1000'"):
        measure_hardware("h1000", tmp_path / "here.yaml")


def test_a_file_that_cannot_be_written_is_found_before_measuring(tmp_path: Path):
    (tmp_path / "taken").write_text("")
    with pytest.raises(ConfigError, match="cannot write the calibration"):
        measure_hardware("cpu", tmp_path / "taken" / "here.yaml", lambda line: pytest.fail("measures"))
