"""The facts of a plan in words, which its reports share: text and page."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hflow.base.text import format_bytes, format_count, pluralize
from hflow.planner.forecast.figures import step_seconds
from hflow.planner.forecast.memory import fullest_phase
from hflow.planner.models.choices import determinism_line
from hflow.planner.plan.forecast import CycleStep, PhaseMemory
from hflow.planner.plan.rows import Plan
from hflow.planner.plan.workload import expected_max


@dataclass(frozen=True)
class Facts:
    """The figures of a plan that a reader asks for first."""

    peak: PhaseMemory | None
    """The phase in which some devices hold most; None if no memory is known."""
    seconds: float | None
    """Seconds of a step; None if those of some nodes are not known."""
    is_lower_bound: bool
    """Whether `seconds` leaves out waiting for late responses."""
    rates: tuple[str, ...]
    """Samples per second, and tokens per second if the lengths of samples are known."""
    slowest: CycleStep | None
    """The node that takes longest on the critical cycle."""


def facts(plan: Plan) -> Facts:
    """Return the figures of a plan."""
    period = plan.forecast.period
    seconds, is_lower_bound = step_seconds(plan)
    return Facts(
        peak=fullest_phase(plan.forecast.memory, plan.cluster)[0],
        seconds=seconds,
        is_lower_bound=is_lower_bound,
        rates=() if seconds is None else tuple(_rates(plan, seconds)),
        slowest=max(period.cycle if period else (), key=lambda step: step.seconds, default=None),
    )


def _rates(plan: Plan, seconds: float) -> Iterator[str]:
    stream, lengths = plan.schedule.streams[0], dict(plan.forecast.workload)
    per_second = (stream.batch or 0) * stream.group_size / seconds
    yield f"{format_count(per_second)} samples/s"
    if stream.name in lengths:
        tokens = lengths[stream.name].prompt + expected_max(lengths[stream.name], 1)
        yield f"{format_count(per_second * tokens)} tokens/s"


def choice_lines(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield what the planner chose besides the placement, each with the reason: a label and a line."""
    engines = ((choice.replica, f"{choice.engine}: {choice.why}") for choice in plan.engines)
    lines = {
        "backend": plan.forecast.backend,
        "engine": _choices_line(engines),
        "attention": attention_line(plan),
        "layers": layers_line(plan),
        "experts": experts_line(plan),
        "largest batch": largest_batch_line(plan),
        "deterministic": determinism_line(plan),
    }
    yield from ((label, line) for label, line in lines.items() if line)


def attention_line(plan: Plan) -> str:
    """Return the attention kernels with the reasons for them, one after the other where they differ."""
    return _choices_line((choice.replica, f"{choice.kernel}: {choice.why}") for choice in plan.attention)


def layers_line(plan: Plan) -> str:
    """Return the kernels of layers with the reasons for them, one after the other where they differ."""
    return _choices_line(
        (choice.replica, f"{' '.join(filter(None, (choice.kernels, choice.version)))}: {choice.why}")
        for choice in plan.layers
    )


def _choices_line(choices: Iterable[tuple[str, str]]) -> str:
    replicas_of: dict[str, list[str]] = {}
    for replica, text in choices:
        replicas_of.setdefault(text, []).append(replica)
    if len(replicas_of) == 1:
        return next(iter(replicas_of))
    return "; ".join(f"{', '.join(names)} {text}" for text, names in replicas_of.items())


def experts_line(plan: Plan) -> str:
    """Describe the experts of trained models, and how their load is balanced; empty if there are none."""
    trained = {replica.model for replica in plan.replicas if replica.role == "train"}
    found = [
        f"{model}: {shape.experts.per_token} of {shape.experts.num} for each token"
        for model, shape in plan.shapes
        if shape.experts is not None and model in trained
    ]
    if not found:
        return ""
    balanced = [text for model in sorted(trained) if (text := _balance_text(model, dict(plan.settings)))]
    unbalanced = "No loss balances them: router_aux_loss_coef of a config is not used"
    return f"{'; '.join(found)}. {'; '.join(balanced) or unbalanced}"


def _balance_text(model: str, settings: Mapping[str, Any]) -> str:
    """Describe the balance of a model's experts; empty if there is none."""
    key = f"models.{model}.balance"
    coefficient, rate = (settings.get(f"{key}.{name}") for name in ("coefficient", "bias_rate"))
    over = settings.get(f"{key}.over") or "sequence"
    found = [
        *([f"a loss over each {over} with coefficient {coefficient:g}"] if coefficient else []),
        *([f"biases that move by {rate:g} a step"] if rate else []),
    ]
    return f"{model} is balanced by {' and '.join(found)}" if found else ""


def largest_batch_line(plan: Plan) -> str:
    """Return the number of sequences that engines' caches hold, if they do not grow; else an empty text."""
    return "; ".join(
        f"{pluralize(engine.largest_batch, 'sequence')} of mean length, in "
        f"{format_bytes(engine.cache_bytes)} of KV cache of {engine.replica}"
        for engine in plan.engines
        if engine.largest_batch is not None and engine.cache_bytes is not None
    )
