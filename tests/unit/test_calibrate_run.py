"""`calibrate=RUN`: a run whose seconds were made up from known figures, and the plan that learns from it."""

import json
import re
from dataclasses import fields, replace
from pathlib import Path

import pytest
import yaml

from hflow.base.errors import ConfigError, PlanError
from hflow.config import RunConfig
from hflow.launch.planning.compile import Compiled, compile_recipe, learn_from_run, plan_file_text
from hflow.launch.planning.request import cluster_hardware
from hflow.planner.plan.calibration import (
    Calibration,
    HostTimes,
    LinkRate,
    MatmulRate,
    MemoryRate,
    TransferRates,
)
from hflow.planner.plan.rows import Plan
from hflow.planner.plan.serialise import to_plain
from hflow.profiling.fit import HELD_OUT_EVERY, split_held_out
from hflow.profiling.from_run import FIGURES, RATES, TIMES, planned_run
from hflow.profiling.run_times import MIN_STEPS, WARM_STEPS
from hflow.profiling.short_run import find_overheads
from hflow.runtime import events as ev
from hflow.runtime.ledger import Ledger, make_header
from hflow.runtime.records.trace import Trace
from hflow.runtime.saving.run_directory import RunDirectory
from hflow.workers.interface import SampleReady, Span

RECIPE = Path("recipes/grpo.py").resolve()
NUM_STEPS = WARM_STEPS + MIN_STEPS + 4
SETTINGS = ("models.actor.path=null", "cluster=cpu-1x1", "workers=inproc", "batch=4", f"steps={NUM_STEPS}")
LENGTHS = {"workload.prompt": 9, "workload.response_mean": 3, "workload.response_cv": 0}
GIVEN = tuple(f"{key}={value}" for key, value in LENGTHS.items())


@pytest.fixture(scope="module")
def compiled() -> Compiled:
    return compile_recipe(RECIPE, SETTINGS)


def seconds_of(plan: Plan) -> dict[str, float]:
    """Seconds of nodes without messages, and `step`."""
    assert plan.forecast.period
    rows = plan.forecast.times
    nodes = {row.node: row.seconds - dict(row.parts).get("messages", 0.0) for row in rows}
    return {**nodes, "step": plan.forecast.period.seconds}


def slower(plan: Plan, directory: Path) -> Plan:
    """The plan with figures that are not those of `plan`: what its runs really take."""
    values = to_plain(plan.hardware.calibration)
    del values["name"]
    values |= {"devices": ["cpu"], "node_us": 30_000.0}
    values["matmul"]["fp32"]["share"] *= 0.8
    values["host"]["torch"]["layer_us"] *= 3
    values["host"]["embedded"]["layer_us"] *= 0.5
    file = directory / "truth.yaml"
    file.write_text(yaml.safe_dump(values))
    return compile_recipe(RECIPE, (*SETTINGS, *GIVEN, f"calibration={file}")).plan


def write_run(
    compiled: Compiled, directory: Path, truth: Plan, num_steps: int = NUM_STEPS, noise: float = 0.0
) -> None:
    """Write the directory of a run that took what `truth` predicts; its first steps were five times slower.

    Args:
        compiled: what ran.
        directory: where to write.
        truth: its forecast gives the seconds.
        num_steps: completed steps.
        noise: the steps that are held out take longer by this fraction.
    """
    run = RunDirectory(directory)
    directory.mkdir(parents=True)
    run.plan.write_text(plan_file_text(compiled))
    seconds, ran = seconds_of(truth), {"actor_train": "step", "generate actor@gen": "version"}
    trace, rows = Trace(), []
    _, held_out = split_held_out(range(WARM_STEPS, num_steps))
    for step in range(num_steps):
        factor = 5.0 if step < WARM_STEPS else 1 + noise * (step in held_out)
        for name, key in ran.items():
            took = factor * seconds[name.replace("generate actor@gen", "actor_gen")]
            trace.add(0, Span(name, "device", 100.0 * step, 100.0 * step + took, {key: step}))
        rows.append({"step": step + 1, "time/step_seconds": seconds["step"] * factor})
    trace.add(0, Span("save actor", "files", 0.0, 9.0, {}))
    trace.write(run.trace)
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with Ledger(run.ledger, make_header(compiled.plan)) as ledger:
        stream = compiled.plan.schedule.streams[0]
        members = tuple(range(stream.group_size))
        ledger.record_issued(ev.OpenGroup(stream.name, 0, members), 0, 0, 0)
        for sample in members:
            ledger.record_result(SampleReady(stream.name, sample, 12, 3, 0, 0, ((0, 3),), 1))
        ledger.record_instruction(ev.Accept(stream.name, 0, members))
        ledger.record_instruction(ev.FormBatch(stream.name, 0, members, (0,)))
        ledger.record_instruction(ev.StepDone(0))
        ledger.close("done")


def learned_plan(run: str, *changes: str) -> Plan:
    return compile_recipe(RECIPE, (*SETTINGS, f"calibrate={run}", *changes)).plan


def test_a_plan_predicts_what_a_run_with_other_figures_took(compiled: Compiled, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    truth = slower(compiled.plan, tmp_path)
    write_run(compiled, tmp_path / "runs/mine/20260101-000000", truth, noise=0.1)
    (tmp_path / "runs/mine/latest").symlink_to("20260101-000000")
    plan = learned_plan("mine", *GIVEN)
    times, wanted = seconds_of(plan), seconds_of(truth)
    for name in ("actor_train", "actor_gen", "step"):
        assert times[name] == pytest.approx(wanted[name], rel=0.02)
    assert seconds_of(compiled.plan)["step"] < 0.8 * wanted["step"]

    found = plan.hardware.calibration
    assert (found.name, found.devices, found.is_measured) == ("mine", ("cpu",), True)
    assert found.source == f"{NUM_STEPS - WARM_STEPS} steps of mine/20260101-000000, which correct cpu"
    # The held-out steps took 10 % longer than those that the figures were fitted to: 1 - 1 / 1.1.
    assert found.missed == {name: pytest.approx(0.0909, abs=0.02) for name in found.missed}
    assert set(found.missed) == {"actor_gen", "actor_train", "step"}
    assert {"matmul bf16", "inter", "vllm"} <= set(found.unmeasured)
    assert "torch" not in found.unmeasured
    assert found.node_us == pytest.approx(30_000, rel=0.1)
    assert plan.digest == compiled.plan.digest


def test_the_time_of_samples_and_messages_is_found(compiled: Compiled, tmp_path: Path):
    kernels = replace(compiled.plan.hardware.calibration, attention=0.001, devices=("cpu",))
    values = to_plain(replace(kernels, sample_us=300.0, node_us=4000.0))
    del values["name"]
    (tmp_path / "truth.yaml").write_text(yaml.safe_dump(values))
    truth = compile_recipe(RECIPE, (*SETTINGS, *GIVEN, f"calibration={tmp_path / 'truth.yaml'}")).plan
    write_run(compiled, tmp_path / "run", truth)
    found = find_overheads(kernels, *planned_run(RunDirectory(tmp_path / "run")), num_samples=4 * 8)
    assert found.sample_us == pytest.approx(300, rel=1e-3)
    assert found.node_us == pytest.approx(4000, rel=0.1)
    assert found.missed < 0.01


def test_lengths_come_from_the_run_unless_they_are_configured(compiled: Compiled, tmp_path: Path):
    write_run(compiled, tmp_path / "run", slower(compiled.plan, tmp_path))
    spec = compiled.config.workload
    assert (spec.prompt, spec.response_mean) == (7, 4.0)
    for unset, lengths in ((("prompt", "response_mean"), (9, 3.0)), (("prompt",), (9, 4.0)), ((), (7, 4.0))):
        plan = learned_plan(str(tmp_path / "run"), *(f"workload.{key}=null" for key in unset))
        found = dict(plan.forecast.workload)[plan.schedule.streams[0].name]
        assert (found.prompt, found.response_mean) == lengths


def test_the_names_of_figures_are_fields_of_a_calibration():
    classes = (Calibration, MatmulRate, MemoryRate, LinkRate, HostTimes, TransferRates)
    assert {field.name for kind in classes for field in fields(kind)} >= FIGURES
    assert set(RATES).isdisjoint(TIMES)


def test_the_last_of_every_three_measurements_is_held_out():
    assert HELD_OUT_EVERY == 3
    assert split_held_out(range(8)) == ([0, 1, 3, 4, 6, 7], [2, 5])
    assert split_held_out([0.5, 0.25]) == ([0.5, 0.25], [])


def hardware_of(run: Path, **keys: str) -> None:
    values = {"name": "mine", "cluster": "cpu-1x1", "calibrate": str(run), **keys}
    cluster_hardware(RunConfig(**values), RECIPE, learn_from_run)


def test_runs_that_cannot_teach_are_refused(compiled: Compiled, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    truth, run = slower(compiled.plan, tmp_path), tmp_path / "run"
    write_run(compiled, run, truth)
    message = (
        f"calibrate={run} ran on cpu, but the cluster has h100; choose a run on these devices, or set "
        "calibrate=null"
    )
    with pytest.raises(PlanError, match=re.escape(message)):
        hardware_of(run, cluster="h100-1x8")
    with pytest.raises(ConfigError, match="calibration and calibrate are both set; remove one of them"):
        hardware_of(run, calibration="here.yaml")
    with pytest.raises(ConfigError, match=r"there is no run 'gone'; give a run's directory"):
        hardware_of(Path("gone"))

    write_run(compiled, tmp_path / "short", truth, num_steps=WARM_STEPS + MIN_STEPS - 1)
    with pytest.raises(
        ConfigError, match=r"short has 7 complete steps, but calibrate needs 8; choose a longer"
    ):
        hardware_of(tmp_path / "short")
    with RunDirectory(run).locked(), pytest.raises(ConfigError, match=r"run has not ended; wait for it"):
        hardware_of(run)
    (run / "trace.json").unlink()
    with pytest.raises(ConfigError, match=r"run has no trace.json; choose another run"):
        hardware_of(run)

    two = compile_recipe(RECIPE, (*SETTINGS, "cluster=cpu-1x2"))
    two = replace(two, config=replace(two.config, workers="inproc"))
    write_run(two, tmp_path / "two", truth)
    with pytest.raises(ConfigError, match=r"ran cpu-1x2 in one process, so its times are not those of its"):
        hardware_of(tmp_path / "two")
