"""How fast layers are on a device, which `hflow doctor --gpus N` compares with what plans count with."""

from __future__ import annotations

from dataclasses import replace

import failing_measure
import pytest

from hflow.doctor import gpus
from hflow.doctor.gpus import check_layer_times, layers_finding
from hflow.profiling import calibrate, measure
from hflow.profiling.calibrate import LayerTime

INFERENCE = LayerTime(measure.SmallModel(512, 1536, 3), 2048, "fp32", False, 0.010, 0.012)
TRAINING = replace(INFERENCE, trains=True, seconds=0.060, expected_seconds=0.040)


def test_layers_are_timed_on_this_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "SECONDS_EACH", 0.0)
    monkeypatch.setattr(measure, "LAYERS", {"cpu": (measure.SmallModel(64, 128, 1), (2, 8))})
    inference, training = calibrate.layer_times("torch", "cpu")
    assert (inference.trains, training.trains) == (False, True)
    assert (inference.num_tokens, inference.dtype) == (16, "fp32")
    assert 0 < inference.expected_seconds < training.expected_seconds
    assert min(inference.seconds, training.seconds) > 0


def test_the_expected_seconds_are_those_of_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Layers of 7B on an H100: 2 FLOP per weight and token, thrice in training, above 40 % of the peak."""
    model, (num, tokens) = measure.LAYERS["cuda"]
    steps = [(model, num, tokens, trains, 1.0) for trains in (False, True)]
    monkeypatch.setattr(measure, "training_steps", lambda *arguments: steps)
    monkeypatch.setattr(calibrate, "device_at_hand", lambda: "h100")
    inference, training = calibrate.layer_times("torch", "cuda")
    hidden, intermediate = model.hidden, model.intermediate
    weights = 2 * (3 * hidden * intermediate + 3 * hidden * hidden)
    ideal = 2 * weights * num * tokens / 989e12
    assert ideal < inference.expected_seconds < 2.5 * ideal
    assert 3 * ideal < training.expected_seconds < 7 * ideal


def test_layers_at_less_than_half_of_the_planned_speed_are_a_warning() -> None:
    found = layers_finding("torch", [INFERENCE, TRAINING])
    assert found.ok
    assert found.detail == (
        "inference 10.0 ms, planned 12.0 ms; training 60.0 ms, planned 40.0 ms "
        "(3 layers of 512 x 1,536, 2,048 tokens, fp32)"
    )
    slow = layers_finding("torch", [INFERENCE, replace(TRAINING, seconds=0.081)])
    assert (slow.ok, slow.required) == (False, False)
    assert slow.detail.endswith("; less than 50% of the planned speed")


def test_a_failure_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("megatron")
    monkeypatch.setattr(gpus, "_measure", failing_measure.fail)
    found = list(check_layer_times("cpu"))
    assert [finding.name for finding in found] == ["torch", "megatron"]
    assert all("no hardware file is for 'other'" in finding.detail for finding in found)
    assert not any(finding.ok or finding.required for finding in found)
