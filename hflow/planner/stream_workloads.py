"""The sample lengths that a plan assumes for each root stream."""

from __future__ import annotations

from hflow.errors import PlanError
from hflow.graph.ir import NodeSpec
from hflow.planner.ir import Plan
from hflow.planner.request import PlanRequest
from hflow.planner.workload import Workload

DEFAULT_PROMPT = 512
"""Maximum tokens of a prompt if the user sets none."""
DEFAULT_CV = 0.6


def stream_workloads(plan: Plan, request: PlanRequest) -> tuple[tuple[str, Workload], ...]:
    """Return the lengths of each root stream's samples.

    A written stream has no `max_tokens`: its prompt is assumed to take at most half of the model's
    `max_model_len`, and its response half of the rest on average.

    Raises:
        PlanError: if the prompt leaves no room for a response.
    """
    return tuple(
        (stream.name, _workload(plan.graph.node(stream.source).spec, request))
        for stream in plan.schedule.streams
    )


def _workload(spec: NodeSpec, request: PlanRequest) -> Workload:
    assumed = request.workload
    max_length, model = min((request.model(name).gen.max_model_len, name) for name in spec.models)
    max_tokens = spec.option("max_tokens")
    max_prompt = max_length // 2 if max_tokens is None else max(1, max_length - max_tokens)
    prompt = min(DEFAULT_PROMPT, max_prompt) if assumed.prompt is None else assumed.prompt
    if prompt >= max_length:
        raise PlanError(
            f"prompts of {prompt} tokens leave no room for a response of {spec.name!r} in {max_length} "
            f"tokens; set workload.prompt to {max_length - 1} or less, or raise max_model_len of {model!r}"
        )
    max_response = max_length - prompt if max_tokens is None else min(max_tokens, max_length - prompt)
    return Workload(
        prompt=prompt,
        response_mean=max_response / 2 if assumed.response_mean is None else assumed.response_mean,
        response_cv=DEFAULT_CV if assumed.response_cv is None else assumed.response_cv,
        max_response=max_response,
        is_assumed=None in (assumed.prompt, assumed.response_mean, assumed.response_cv),
    )
