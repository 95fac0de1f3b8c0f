"""Each knob of the library's nodes changes what the node returns, or is refused, also beside other knobs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, get_args, get_origin

import pytest
import torch
from torch import Tensor

from hflow import Sequences, nodes
from hflow.dsl.bodies import WARNING_ATTRIBUTE, check_of
from hflow.types import State

Knobs = dict[str, Any]
Parameters = Mapping[str, inspect.Parameter]
NEEDED: dict[str, Knobs] = {
    "dppo_train": {"max_divergence": 0.12},
    "dro_train": {"dro_beta": 0.3},
    "clip_cov_train": {"share": 0.5, "lower": 0.05, "upper": 2.0},
    "kl_cov_train": {"share": 0.5},
    "high_entropy_train": {"share": 0.5},
    "adaptive_entropy": {"change": 0.3},
}
"""Node -> knobs that it needs, or that suit a batch as small as this one."""
OF_TEXT = {"step_ends", "step_inf"}
"""Nodes that read texts, whose knobs have tests of their own."""


class Forward:
    """The results of a model, as `Output` has them."""

    def __init__(self, theta: Tensor, draw: Callable[[int], Tensor], samples: int) -> None:
        self.logprobs, self.observed_logprobs = theta, theta / 2
        self.entropy, self.values, self.scores = draw(len(theta)), draw(len(theta)), draw(samples)
        self._vocabulary = (theta[:, None] - torch.arange(20)).log_softmax(-1)

    def topk(self, k: int) -> tuple[Tensor, Tensor]:
        return torch.arange(k).expand(len(self.logprobs), k), self._vocabulary[:, :k]

    def logprobs_of(self, ids: Tensor) -> Tensor:
        return self._vocabulary.gather(1, ids)


def inputs(theta: Tensor, lengths: list[int], group: int) -> dict[str, Any]:
    """Return the fields that nodes read, by name. Log-probs differ little and much, and rewards vary."""
    generator = torch.Generator().manual_seed(1)

    def draw(*size: int) -> Tensor:
        return torch.rand(*size, generator=generator, dtype=torch.float64)

    tokens, samples = sum(lengths), len(lengths)
    reward = ((draw(samples) * 6).floor() - 2).clamp(min=0) / 3
    is_learned = [i % 3 > 0 for length in lengths for i in range(length)]
    distance = torch.repeat_interleave(draw(samples) ** 2, torch.tensor(lengths)) * 7
    others = {
        f"{name}_logprobs": theta.detach() + distance * (draw(tokens) - 0.5)
        for name in ("prox", "behav", "ref")
    }
    seqs = Sequences.of(lengths, is_learned, [i // group for i in range(samples)])
    return others | {
        "out": Forward(theta, draw, samples),
        "logprobs": theta.detach(),
        "entropy": draw(tokens),
        "seqs": seqs,
        "reward": reward,
        "second_reward": draw(samples),
        "token_reward": draw(tokens) * seqs.loss_mask,
        "values": draw(tokens),
        "value_targets": draw(tokens),
        "stop_reason": ["stop", "length"] * (samples // 2),
        "prox_entropy": draw(tokens) / 4,
        "role": ["white", "black", "white"] * (samples // 3),
        "input_ids": torch.zeros(tokens, dtype=torch.int64),
        "desirable": draw(samples) < 0.5,
        "teacher_ids": torch.arange(3).expand(tokens, 3),
        "teacher_logprobs": draw(tokens, 3).log() - 2,
        "random": draw(tokens),
        "behav_weights": draw(tokens),
        "entropy_weights": draw(tokens),
        "bootstrap": draw(samples),
        "score_margin": draw(samples // group),
        "third_reward": draw(samples),
        "trajectory": None,
        "state": State(),
    }


def parameters(node: Any) -> Parameters:
    """Return the parameters of a node's body and of its first pass."""
    own = dict(inspect.signature(node, eval_str=True).parameters)
    first = getattr(node, "__hflow_first_pass__", None)
    return own | (dict(inspect.signature(first, eval_str=True).parameters) if first else {})


def optional(node: Any) -> set[str]:
    """Return the inputs of a node that a recipe need not have, but for the reference of a KL."""
    values = inspect.signature(node).parameters.values()
    names = {p.name for p in values if p.kind is not p.KEYWORD_ONLY and p.default is not p.empty}
    return names - {"ref_logprobs"}


def result(node: Any, knobs: Knobs, extra: str | None, *, with_loss: bool = True) -> Tensor:
    """Call a node twice. Return entries and gradient of a loss, or else results and metrics."""
    theta = torch.rand(240, generator=torch.Generator().manual_seed(2), dtype=torch.float64).log()
    theta = theta.requires_grad_()
    of_pairs = node.__hflow__.kind.option_values.get("reduce") == "group-mean"
    given = inputs(theta, [5, 12, 8, 3, 9, 11] * 5, group=2 if of_pairs else 6)
    given = {name: value for name, value in given.items() if name == extra or name not in optional(node)}
    seqs, own = given["seqs"], inspect.signature(node, eval_str=True).parameters
    by_token = "ref_logprobs" in own
    given["advantages"] = seqs.widen(given["reward"] - 0.4) if by_token else given["reward"] - 0.4
    if knobs.get("prox") == "none":
        given["prox_logprobs"] = given["behav_logprobs"]
    elif knobs.get("minibatches") == 1:
        given["behav_logprobs"] += theta.detach() - given["prox_logprobs"]
        given |= {"prox_logprobs": theta.detach(), "values": given["out"].values}

    def call(function: Any) -> Any:
        torch.manual_seed(0)
        names = inspect.signature(function).parameters
        return function(**{name: value for name, value in (given | knobs).items() if name in names})

    if first := getattr(node, "__hflow_first_pass__", None):
        given[first.__name__] = call(first)
    found: list[Tensor] = []
    for returned in (call(node), call(node)):
        for entries in returned if isinstance(returned, tuple) else (returned,):
            if isinstance(entries, dict):
                values = [] if "out" in own else entries.values()
                found += [torch.as_tensor(x, dtype=torch.float64).flatten() for x in values]
                continue
            entries = entries[seqs.loss_mask] if len(entries) == len(theta) else entries
            if with_loss or not entries.requires_grad:
                found.append(entries.detach().double().flatten())
            if entries.requires_grad:
                found.append(torch.autograd.grad(entries.sum(), theta, retain_graph=True)[0])
    return torch.cat(found)


def choices(parameter: inspect.Parameter, default: Any) -> Iterator[Any]:
    """Yield values of a knob other than its default."""
    kind = parameter.annotation
    kinds = get_args(kind) or (kind,)
    values: tuple[Any, ...]
    if get_origin(kind) is Literal:
        values = kinds
    elif get_origin(kind) is tuple:
        values = ((2.0, 1.0),)
    elif bool in kinds:
        values = (not default,)
    elif int in kinds:
        values = (default + 1, max(default - 1, 1))
    elif float in kinds:
        base = default or 0.3
        values = (base / 2, base * 2, 0.0, 0.05, 0.6, 1.0, 1.1, 4.0)
    else:
        raise AssertionError(f"a knob of another kind: {kind}")
    yield from (value for value in values if value != default)


def accepted(node: Any, knobs: Knobs, extra: str | None) -> bool:
    """Return whether a recipe with these knobs is neither refused nor warned of."""
    kind, checks = node.__hflow__.kind, (check_of(node), check_of(node, WARNING_ATTRIBUTE))
    observed = "is_observed" if knobs.get("observation_coef") else None
    reads = parameters(node).keys() - (optional(node) - {extra})
    settings = kind.option_values | {"observed": observed} | knobs
    return all(check is None or check(settings, reads) is None for check in checks)


def ignored(node: Any, base: Knobs, extra: str | None) -> list[str]:
    """Return the knobs that may be set beside others, but of which no value changes the result.

    Args:
        node: the node.
        base: the node's knobs and options.
        extra: an optional input that the node has.
    """
    known: dict[str, Tensor] = {}

    def result_of(knobs: Knobs) -> Tensor:
        key = repr(sorted(knobs.items(), key=str))
        if key not in known:
            known[key] = result(node, knobs, extra)
        return known[key]

    signature, found = parameters(node), []
    switches = [{}] + [
        {name: value}
        for name in node.__hflow__.knobs
        for value in choices(signature[name], base[name])
        if isinstance(value, str | bool) or value == 0.0
    ]
    for switch in switches:
        setting = base | switch
        if not accepted(node, setting, extra):
            continue
        for name in node.__hflow__.knobs.keys() - switch.keys():
            others = [setting | {name: value} for value in choices(signature[name], setting[name])]
            others = [knobs for knobs in others if accepted(node, knobs, extra)]
            if others and all(torch.equal(result_of(setting), result_of(knobs)) for knobs in others):
                found.append(f"{name} beside {switch} with {extra}")
    return found


LIBRARY = {name: node for name in nodes.__all__ if hasattr(node := getattr(nodes, name), "__hflow__")}
WITH_KNOBS = [
    name
    for name, node in LIBRARY.items()
    if type(node.__hflow__.kind).__name__ in ("Compute", "Train", "Infer")
    and node.__hflow__.knobs
    and name not in OF_TEXT
]


@pytest.mark.parametrize("name", WITH_KNOBS)
def test_no_knob_is_ignored(name: str) -> None:
    node = LIBRARY[name]
    base = node.__hflow__.knobs | NEEDED.get(name, {})
    is_policy = "prox_logprobs" in parameters(node) and "out" in parameters(node)
    updates: list[Knobs] = [{"minibatches": 2}, {"minibatches": 1}] if "out" in parameters(node) else [{}]
    if is_policy:
        updates = [{"prox": "none"}, *({"prox": "recompute"} | options for options in updates)]
    cases = [(options, extra) for options in updates for extra in (None, *optional(node))]
    assert [line for options, extra in cases for line in ignored(node, base | options, extra)] == []


OF_LATER_UPDATES = [
    (name, knob)
    for name in WITH_KNOBS
    for knob in ("clip", "clip_high", "dual_clip", "tau_positive", "tau_negative")
    if knob in LIBRARY[name].__hflow__.knobs
]


@pytest.mark.parametrize(("name", "knob"), OF_LATER_UPDATES)
def test_knobs_of_later_updates_are_warned_of(name: str, knob: str) -> None:
    """With one update per step their values change nothing; with two, nothing is said."""
    node = LIBRARY[name]
    knobs = {"prox": "recompute", "minibatches": 1} | node.__hflow__.knobs | NEEDED.get(name, {})
    warn, options = check_of(node, WARNING_ATTRIBUTE), node.__hflow__.kind.option_values
    assert warn
    assert warn(options | knobs, ()) is None
    wanted = result(node, knobs, None, with_loss=False)
    for value in choices(parameters(node)[knob], knobs[knob]):
        changed = options | knobs | {knob: value}
        if accepted(node, changed | {"minibatches": 2}, None):
            torch.testing.assert_close(result(node, changed, None, with_loss=False), wanted)
            assert f"hardly anything depends on {knob}={value} with one update" in str(warn(changed, ()))
            assert warn(changed | {"epochs": 2}, ()) is None
