"""`token_loss` and `sequence_loss`: make the body of a train node from a policy's surrogate.

A surrogate is a function of a `PolicyBatch` with knobs of its own. The body weighs it by `exp(prox - behav)`,
adds the KL to a reference and the entropy, and reports metrics. It has the surrogate's inputs, knobs and
documentation, followed by those that all losses share:

    @train(reduce="token-mean")
    @token_loss()
    def reinforce_train(policy: PolicyBatch) -> tuple[Tensor, Metrics]:
        return algo.reinforce_surrogate(policy.theta, policy.prox, policy.advantages), {}
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from hflow.dsl import checked_by, warned_by
from hflow.dsl.bodies import BodyCheck
from hflow.dsl.lazy import algo
from hflow.types import Metrics, Output, PerSequence, PerToken, SeparateSequences, Sequences, Tensor

Surrogate = Callable[..., tuple[Tensor, dict[str, Tensor]]]
"""Takes a `PolicyBatch` and, by name, its own inputs and knobs. Returns the loss and metrics."""
Body = Callable[..., Any]


@dataclass(frozen=True)
class PolicyBatch:
    """What a policy's surrogate is computed from."""

    theta: Tensor
    """`[T]`, log-probs of the policy that is trained, with gradient."""
    prox: Tensor
    """`[T]`, log-probs at the start of the step."""
    behav: Tensor
    """`[T]`, log-probs recorded at generation."""
    advantages: Tensor
    """`[T]`, or `[S]` for losses of sequences."""


def token_loss(check: BodyCheck | None = None) -> Callable[[Surrogate], Body]:
    """Make a surrogate per token the body of a train node, below the decorator `@train`.

    Args:
        check: a check of the surrogate's own knobs. None: they need none beyond that of clipping.
    """
    return functools.partial(_with_shared, _correct_tokens, check)


def sequence_loss(check: BodyCheck | None = None) -> Callable[[Surrogate], Body]:
    """Make a surrogate per sequence the body of a train node, below the decorator `@train`.

    Args:
        check: a check of the surrogate's own knobs. None: they need none beyond that of clipping.
    """
    return functools.partial(_with_shared, _correct_sequences, check)


def more_than_zero(*names: str) -> BodyCheck:
    """Return a check that refuses knobs of 0 or less."""

    def check(knobs: Mapping[str, Any], reads: Collection[str]) -> str | None:
        for name in names:
            if knobs[name] <= 0:
                return f"{name} is {knobs[name]}; it must be more than 0"
        return None

    return check


def one_update(knobs: Mapping[str, Any]) -> bool:
    """Return whether a step has one update, in which the model is still that of the start of the step."""
    return bool(knobs["minibatches"] * knobs["epochs"] == 1)


def warn_of_idle(knobs: Mapping[str, Any], defaults: Mapping[str, Any], of: str) -> str | None:
    """Return a warning of knobs that are set though a step's only update does not need them.

    Args:
        knobs: the knobs and the decorator's options.
        defaults: the defaults of these knobs.
        of: what they bound, and its value in that update.
    """
    names = [name for name, default in defaults.items() if knobs[name] not in (None, default)]
    if not names or not one_update(knobs):
        return None
    shown = " and ".join(f"{name}={knobs[name]}" for name in names)
    return (
        f"hardly anything depends on {shown} with one update per step, as {of} but for rounding. Set "
        f"minibatches or epochs above 1, or remove {' and '.join(names)}"
    )


def clip_fractions(low: Tensor, high: Tensor) -> dict[str, Tensor]:
    """Return the metrics of a loss that clips: the shares of entries that are clipped below and above."""
    return {"clip_fraction": low | high, "clip_fraction_low": low, "clip_fraction_high": high}


def _correct_tokens(
    surrogate: Surrogate,
    out: Output,
    behav_logprobs: PerToken,
    prox_logprobs: PerToken,
    advantages: PerToken,
    seqs: SeparateSequences,
    ref_logprobs: PerToken | None = None,
    behav_weights: PerToken | None = None,
    entropy_weights: PerToken | None = None,
    *,
    behav_weight_cap: float | None = 5.0,
    over_cap: Literal["mask", "truncate"] = "mask",
    kl_coef: float = 0.0,
    kl_estimator: Literal["k2", "k3", "k1+", "k3+"] = "k3",
    kl_importance: bool = False,
    entropy_coef: float = 0.0,
    observation_coef: float = 0.0,
    off_policy_limit: float | None = None,
) -> tuple[PerToken, Metrics]:
    """Return `w surrogate + kl_coef KL - entropy_coef H` per token, and the loss of observed tokens.

    Args:
        surrogate: the loss.
        out: log-probs and entropy of the policy that is trained.
        behav_logprobs: `[T]`, recorded at generation.
        prox_logprobs: `[T]`, at the start of the step.
        advantages: `[T]`.
        seqs: the layout of the batch.
        ref_logprobs: `[T]`, needed if `kl_coef` is not 0. Else the KL to the reference is only reported.
        behav_weights: `[T]`, weights in the place of w, from the node `behav_weights`.
        entropy_weights: `[T]`, weights in the place of `entropy_coef`, from the node `adaptive_entropy`.
        behav_weight_cap: largest weight `exp(prox - behav)` of a token. None: no limit.
        over_cap: give tokens with a larger weight the weight 0 (`mask`) or the cap (`truncate`).
        kl_coef: weight of the KL to the reference in the loss.
        kl_estimator: estimator of this KL. `k2`, `k1+` and `k3+` have the gradient of the KL on fresh tokens,
            k3 has that of the KL in the other direction. k1 is not allowed: the mean of its gradient is 0.
        kl_importance: multiply k3 by the ratio theta / behav, which makes value and gradient unbiased also on
            tokens of older policies (DeepSeek-AI 2025, "DeepSeek-V3.2", the unbiased KL estimate).
        entropy_coef: weight of the entropy, which is subtracted from the loss.
        observation_coef: weight of the mean cross-entropy of the tokens that `observed` marks, such as those
            of tools and environments (Shrivastava et al. 2026, "ECHO: terminal agents learn world models for
            free", arXiv 2605.24517, `L_GRPO + lambda L_Env`).
        off_policy_limit: tokens with A < 0 of sequences whose mean of `log(behav / theta)` is larger have no
            surrogate (`algo.is_off_policy`). None: no limit.
    """
    theta, prox, behav = out.logprobs, prox_logprobs, behav_logprobs
    metrics = {
        "kl": algo.kl_k3(prox, theta, cap=None),
        "entropy": out.entropy,
        "bounded_ratios.sum": algo.is_bounded(theta, prox) | algo.is_bounded(prox, behav),
    }
    if behav_weights is None:
        metrics |= _over_cap(prox, behav, behav_weight_cap)
        behav_weights = algo.behav_weight(prox, behav, behav_weight_cap, over_cap)
    loss, own_metrics = surrogate(PolicyBatch(theta, prox, behav, advantages))
    entries = loss * behav_weights
    metrics |= own_metrics
    if off_policy_limit is not None:
        drift = seqs.widen(seqs.mean(behav - theta.detach()))
        metrics["off_policy"] = algo.is_off_policy(drift, advantages, off_policy_limit)
        entries = entries.masked_fill(metrics["off_policy"], 0)
    if kl_coef:
        assert ref_logprobs is not None, "the check of this node's knobs refuses kl_coef without ref_logprobs"
        ref_kl = algo.kl_estimate(theta, ref_logprobs, kl_estimator)
        if kl_estimator in ("k3", "k3+"):
            metrics["bounded_kl.sum"] = ref_kl >= algo.MAX_KL
        if kl_importance:
            ref_kl = algo.policy_ratio(theta, behav) * ref_kl
        metrics["ref_kl"] = ref_kl
        entries = entries + kl_coef * ref_kl
    elif ref_logprobs is not None:
        metrics["ref_kl"] = algo.kl_k3(theta.detach(), ref_logprobs, cap=None)
    if entropy_weights is not None:
        entries = entries - entropy_weights * out.entropy
    elif entropy_coef:
        entries = entries - entropy_coef * out.entropy
    if observation_coef:
        observed_loss = algo.cross_entropy(out.observed_logprobs)
        entries = entries.masked_fill(~seqs.loss_mask, 0) + observation_coef * observed_loss
    return entries, metrics


def _correct_sequences(
    surrogate: Surrogate,
    out: Output,
    behav_logprobs: PerToken,
    prox_logprobs: PerToken,
    advantages: PerSequence,
    seqs: Sequences,
    *,
    behav_weight_cap: float | None = 2.0,
    over_cap: Literal["mask", "truncate"] = "mask",
    off_policy_limit: float | None = None,
) -> tuple[PerSequence, Metrics]:
    """Return `w surrogate` per sequence.

    Args:
        surrogate: the loss. It reports `bounded_ratios.sum`, as its ratios are those of tokens or sequences.
        out: log-probs and entropy of the policy that is trained.
        behav_logprobs: `[T]`, recorded at generation.
        prox_logprobs: `[T]`, at the start of the step.
        advantages: `[S]`.
        seqs: the layout of the batch.
        behav_weight_cap: largest weight `(p_prox(y) / p_behav(y)) ** (1 / |y|)` of a sequence. None: no
            limit.
        over_cap: give sequences with a larger weight the weight 0 (`mask`) or the cap (`truncate`).
        off_policy_limit: sequences with A < 0 whose mean of `log(behav / theta)` is larger have no loss
            (`algo.is_off_policy`). None: no limit.
    """
    prox, behav = seqs.mean(prox_logprobs), seqs.mean(behav_logprobs)
    loss, metrics = surrogate(PolicyBatch(out.logprobs, prox_logprobs, behav_logprobs, advantages))
    metrics = {
        **metrics,
        "kl": algo.kl_k3(prox_logprobs, out.logprobs, cap=None),
        "entropy": out.entropy,
        **_over_cap(prox, behav, behav_weight_cap),
    }
    entries = algo.behav_weight(prox, behav, behav_weight_cap, over_cap) * loss
    if off_policy_limit is not None:
        drift = behav - seqs.mean(out.logprobs.detach())
        metrics["off_policy"] = algo.is_off_policy(drift, advantages, off_policy_limit)
        entries = entries.masked_fill(metrics["off_policy"], 0)
    return entries, metrics


def _over_cap(prox: Tensor, behav: Tensor, cap: float | None) -> dict[str, Tensor]:
    return {} if cap is None else {"over_cap": prox - behav > math.log(cap)}


def _with_shared(shared: Body, check: BodyCheck | None, surrogate: Surrogate) -> Body:
    """Return a body that passes its inputs and knobs to a surrogate and to the correction around it."""
    own, common = _parameters(surrogate), _parameters(shared)
    own_names, common_names = {p.name for p in own}, {p.name for p in common}
    returns = inspect.signature(shared, eval_str=True).return_annotation
    signature = inspect.Signature(_joined(own, common))

    @functools.wraps(surrogate)
    def body(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        loss = functools.partial(surrogate, **{name: given[name] for name in given if name in own_names})
        return shared(loss, **{name: given[name] for name in given if name in common_names})

    setattr(body, "__signature__", signature)  # noqa: B010 - mypy does not know it
    body.__annotations__ = {p.name: p.annotation for p in signature.parameters.values()} | {"return": returns}
    body.__doc__ = _joined_doc(surrogate, shared, signature.parameters)
    defaults = {p.name: p.default for p in common}
    of_ratio = {p.name: p.default for p in own if p.name in _OF_RATIO}
    warned_by(functools.partial(_warning, of_ratio))(body)
    return checked_by(functools.partial(_problem, defaults, check))(body)


def _parameters(function: Body) -> list[inspect.Parameter]:
    """Return the parameters of a surrogate or a correction, without the first one."""
    return list(inspect.signature(function, eval_str=True).parameters.values())[1:]


def _joined(own: Sequence[inspect.Parameter], common: Sequence[inspect.Parameter]) -> list[inspect.Parameter]:
    """Return the parameters of a surrogate and of the correction around it, each name once."""
    names = {p.name for p in common}
    return [
        *(p for p in common if not _is_knob(p) and p.default is p.empty),  # inputs that every loss needs
        *(p for p in own if not _is_knob(p) and p.name not in names),
        *(p for p in common if not _is_knob(p) and p.default is not p.empty),
        *(p for p in (*own, *common) if _is_knob(p)),
    ]


def _is_knob(parameter: inspect.Parameter) -> bool:
    return parameter.kind is inspect.Parameter.KEYWORD_ONLY


def _problem(
    defaults: Mapping[str, Any], check: BodyCheck | None, knobs: Mapping[str, Any], reads: Collection[str]
) -> str | None:
    """Return the first knob that has no effect, is out of bounds or lacks an input.

    Args:
        defaults: defaults of the knobs that all losses of the same unit share.
        check: a check of the other knobs.
        knobs: the knobs and the decorator's options.
        reads: parameters that a field is bound to.
    """
    return (
        _weight_problem(defaults["behav_weight_cap"], knobs)
        or (check and check(knobs, reads))
        or _no_effect(defaults, knobs, reads)
        or _out_of_bounds(knobs)
        or _no_reference(knobs, reads)
    )


_OF_RATIO = ("clip", "clip_high", "dual_clip", "tau_positive", "tau_negative")
"""Knobs of surrogates that change no gradient where theta is prox."""


def _warning(of_ratio: Mapping[str, Any], knobs: Mapping[str, Any], reads: Collection[str]) -> str | None:
    if knobs["prox"] == "none":  # ratios are relative to the engine
        return None
    return warn_of_idle(knobs, of_ratio, "the ratio theta / prox is 1")


def _weight_problem(default_cap: float, knobs: Mapping[str, Any]) -> str | None:
    if knobs["over_cap"] != "mask" and knobs["behav_weight_cap"] is None:
        return "over_cap has no effect without a cap. Set behav_weight_cap, or remove over_cap"
    if knobs["prox"] == "none" and knobs["behav_weight_cap"] not in (None, default_cap):
        return "behav_weight_cap has no effect with prox=none, where the weight is 1. Remove one of them"
    if knobs["prox"] == "none" and knobs["over_cap"] != "mask":
        return "over_cap has no effect with prox=none, where the weight is 1. Remove one of them"
    return None


def _no_effect(defaults: Mapping[str, Any], knobs: Mapping[str, Any], reads: Collection[str]) -> str | None:
    for name in ("kl_estimator", "kl_importance"):
        if name in knobs and knobs[name] != defaults[name] and not knobs["kl_coef"]:
            return f"{name} has no effect while kl_coef is 0. Set kl_coef, or remove {name}"
    if knobs.get("kl_importance") and knobs["kl_estimator"] != "k3":
        return f"kl_importance needs kl_estimator=k3, not {knobs['kl_estimator']}, whose gradient differs"
    if "entropy_weights" in reads and knobs["entropy_coef"]:
        return "entropy_coef has no effect beside the node that returns entropy_weights. Remove one of them"
    if knobs.get("observation_coef") and knobs["observed"] is None:
        return 'observation_coef needs observed. List nodes.observed_tokens, and set observed="is_observed"'
    if knobs["observed"] is not None and not knobs.get("observation_coef", 1):
        return "observed has no effect while observation_coef is 0. Set observation_coef, or remove observed"
    for name in ("behav_weight_cap", "over_cap"):
        if "behav_weights" in reads and knobs[name] != defaults[name]:
            return f"{name} has no effect beside the node that returns behav_weights. Set its bounds instead"
    return None


def _out_of_bounds(knobs: Mapping[str, Any]) -> str | None:
    for name in ("clip", "clip_high"):
        if (knobs.get(name) or 0) < 0:
            return f"{name} is {knobs[name]}; it must be 0 or more"
    if knobs.get("observation_coef", 0) < 0:
        return f"observation_coef is {knobs['observation_coef']}; it must be 0 or more"
    for name in ("behav_weight_cap", "off_policy_limit"):
        if knobs[name] is not None and knobs[name] <= 0:
            return f"{name} is {knobs[name]}; it must be more than 0, or null"
    return None


def _no_reference(knobs: Mapping[str, Any], reads: Collection[str]) -> str | None:
    if knobs.get("kl_coef") and "ref_logprobs" not in reads:
        return "kl_coef needs ref_logprobs. List use(nodes.ref_inf, REF)"
    return None


def _joined_doc(surrogate: Surrogate, shared: Body, names: Iterable[str]) -> str:
    """Return a surrogate's docstring with the arguments of the whole body, in the body's order."""
    own, common = (_argument_docs(function) for function in (surrogate, shared))
    paragraphs = [p for p in _paragraphs(surrogate) if not p.startswith("Args:")]
    place = next(
        (i for i, p in enumerate(paragraphs) if p.startswith(("Returns:", "Source:"))), len(paragraphs)
    )
    paragraphs.insert(place, "\n".join(["Args:", *((common | own)[name] for name in names)]))
    return "\n\n".join(paragraphs)


def _argument_docs(function: Body) -> dict[str, str]:
    """Return argument -> its lines in the section `Args:`."""
    found: dict[str, str] = {}
    section = next((p for p in _paragraphs(function) if p.startswith("Args:")), "")
    for line in section.splitlines()[1:]:
        if not line.startswith(" " * 5):
            name = line.strip().partition(":")[0]
            found[name] = line
        else:
            found[name] += f"\n{line}"
    return found


def _paragraphs(function: Body) -> list[str]:
    return (inspect.getdoc(function) or "").split("\n\n")
