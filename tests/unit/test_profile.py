"""`hflow profile`: figures from made-up times, and a whole calibration of this machine's CPU in small."""

from pathlib import Path

import pytest

from hflow.config import RunConfig
from hflow.errors import ConfigError, PlanError
from hflow.launch.plan_request import cluster_hardware
from hflow.launch.profiling import measure
from hflow.launch.profiling.calibrate import measure_hardware
from hflow.launch.profiling.fit import (
    CollectiveTime,
    DecodeTime,
    ProductTime,
    fit_host,
    fit_link,
    fit_matmul,
    held_out_error,
    host_seconds,
    link_seconds,
)
from hflow.planner.calibration import HostTimes, LinkRate, MatmulRate
from hflow.planner.hardware import Link

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
    assert held_out_error(rows, lambda seen: lambda row: link_seconds(row, fit_link(seen, link), link)) < 1e-6


def test_times_of_the_host_are_found_from_decode_steps_and_are_never_negative():
    true = HostTimes(gap_us=100.0, step_us=300.0, sequence_us=5.0)
    rows = [DecodeTime(layers, n, n * 64, 0.0, 1e-4 * n) for layers in (2, 6) for n in (1, 8, 64)]
    timed = [
        DecodeTime(r.num_layers, r.sequences, r.context, host_seconds(r, true), r.kernel_seconds)
        for r in rows
    ]
    found = fit_host(timed)
    assert (found.gap_us, found.step_us) == (pytest.approx(100.0), pytest.approx(300.0))
    assert found.sequence_us == pytest.approx(5.0)
    faster = [
        DecodeTime(r.num_layers, r.sequences, r.context, 0.9 * r.kernel_seconds, r.kernel_seconds)
        for r in rows
    ]
    assert fit_host(faster) == HostTimes()


def test_every_third_time_is_held_out():
    rows = [ProductTime(64, 64, 64, seconds) for seconds in (1.0, 1.0, 2.0, 1.0, 1.0, 4.0)]

    def predict(seen):
        assert {row.seconds for row in seen} == {1.0}
        return lambda row: 1.0

    assert held_out_error(rows, predict) == pytest.approx((0.5 + 0.75) / 2)


def test_a_profile_of_this_cpu_is_a_calibration_that_plans_can_name(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(measure, "SECONDS_EACH", 0.0)
    monkeypatch.setattr(measure, "ROWS", (16, 64))
    monkeypatch.setattr(measure, "SIDES", ((32, 64), (64, 64)))
    monkeypatch.setattr(measure, "LAYERS", (1, 2))
    monkeypatch.setattr(measure, "SEQUENCES", (1, 4))
    monkeypatch.setattr(measure, "LENGTHS", (8,))
    lines = []
    found = measure_hardware("cpu", tmp_path / "here.yaml", lines.append)
    assert lines == ["matrix products", "memory, attention and disk", "collectives", "decode steps"]
    assert set(found.calibration.missed) == {"matmul fp32", "matmul bf16", "collectives", "decode"}
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
