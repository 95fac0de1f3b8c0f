"""Nodes that know which text a token makes: rewards of steps, and teachers with another tokenizer."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from hflow.base.errors import DataError, shorten
from hflow.dsl import compute, encode, generate, infer
from hflow.nodes.inference import encoded_again
from hflow.types import (
    Engine,
    Image,
    Json,
    Messages,
    Metrics,
    Output,
    PerToken,
    Sequences,
    Tokenizer,
    Trajectory,
)


@generate(returns="token_ends")
async def traced_gen(
    engine: Engine, tokenizer: Tokenizer, prompt: str, images: list[Image] | None = None
) -> tuple[Trajectory, list[int]]:
    """Generate one completion of the prompt, as `actor_gen`, and return where the text of each token ends.

    Args:
        engine: generates.
        tokenizer: the model's.
        prompt: the text.
        images: images for the places `<image>` of the prompt, or in front of it.

    Returns:
        The trajectory, and `Tokenizer.token_ends` of the completion; -1 for tokens of the prompt.
    """
    talk = await engine.complete(prompt, images=images)
    return talk, _token_ends(tokenizer, talk)


@generate(returns="token_ends")
async def traced_chat_gen(
    engine: Engine, tokenizer: Tokenizer, prompt: Messages, images: list[Image] | None = None
) -> tuple[Trajectory, list[int]]:
    """Generate the assistant's next message, as `chat_gen`, and return where the text of each token ends.

    Args:
        engine: generates.
        tokenizer: the model's.
        prompt: the messages so far. A text is one message of the user.
        images: images for the places that the messages have for them, or in front of the user's last text.

    Returns:
        The trajectory, and `Tokenizer.token_ends` of the message; -1 for tokens of the prompt.
    """
    talk = await engine.complete(prompt, images=images)
    return talk, _token_ends(tokenizer, talk)


def _token_ends(tokenizer: Tokenizer, talk: Trajectory) -> list[int]:
    ends = tokenizer.token_ends(talk.input_ids[len(talk.input_ids) - talk.num_tokens :])
    return [-1] * (len(talk.input_ids) - len(ends)) + ends


# ------------------------------------------------------------------------------------------- steps
@compute(per="sample", returns="is_step_end")
def step_ends(
    completion: str, token_ends: list[int], loss_mask: list[bool], *, delimiter: str = "\n\n"
) -> list[bool]:
    """Mark the last token of each step of an answer, for `step_inf`.

    Args:
        completion: the answer.
        token_ends: from `traced_gen` or `traced_chat_gen`.
        loss_mask: True for tokens of the answer.
        delimiter: what separates steps. It belongs to the step before it; blank steps do not count.
    """
    marks, start = [False] * len(token_ends), 0
    learned = [i for i, is_learned in enumerate(loss_mask) if is_learned]
    for step in _steps(completion, delimiter):
        end = start + len(step)
        last = next((i for i in learned if token_ends[i] >= end), None)
        if last is not None and step.strip():
            marks[last] = True
        start = end
    return marks


def _steps(text: str, delimiter: str) -> list[str]:
    *steps, last = text.split(delimiter)
    return [*(step + delimiter for step in steps), last]


@infer(returns="token_reward")
def step_inf(out: Output, is_step_end: PerToken, *, as_probability: bool = True) -> PerToken:
    """Return the score `[T]` of each step by a process reward model, on the step's last token; 0 elsewhere.

    Args:
        out: the reward model, `head="score"`. It reads the policy's tokens.
        is_step_end: `[T]`, from `step_ends`.
        as_probability: return the score's sigmoid, the probability that the step is right.

    Source: Lightman et al. 2023, "Let's verify step by step", process supervision.
    """
    scores = out.token_scores.sigmoid() if as_probability else out.token_scores
    return scores.masked_fill(~is_step_end, 0)


# --------------------------------------------------------------------- teachers with another tokenizer
@encode(returns="spans")
def aligned_view(
    tokenizer: Tokenizer, messages: Messages, completion: str, token_ends: list[int], loss_mask: list[bool]
) -> tuple[Trajectory, dict[str, Any]]:
    """Encode a sample again for a teacher with another tokenizer, and align the tokens of both by their text.

    Prompt and answer are in the teacher's chat template; without one, their texts follow one another. A span
    is the shortest run of characters that begins and ends with a token of both; the end of the turn is one
    too.

    Args:
        tokenizer: the teacher's.
        messages: the prompt, and the answer.
        completion: the text of the answer.
        token_ends: from `traced_gen` or `traced_chat_gen`.
        loss_mask: True for the student's tokens of the answer.

    Returns:
        The teacher's trajectory, and the bounds of spans, as positions among the `student`'s and the
        `teacher`'s tokens.

    Raises:
        DataError: if the student's tokens are no text, or the teacher's make another one.
    """
    talk = encoded_again(tokenizer, [*messages[:-1], {"role": "assistant", "content": completion}])
    own = _last_run(talk.loss_mask)
    ids = talk.input_ids[own.start : own.stop]
    text = tokenizer.decode(ids)
    before = len(text) - len(completion)  # of a template that begins every answer with some text
    teacher = {
        end - before: place
        for end, place in {0: own.start, **_bounds(own, tokenizer.token_ends(ids))}.items()
    }
    if not text.endswith(completion) or 0 not in teacher:
        raise DataError(
            f"the teacher's tokens make {shorten(text, 60)!r} of the answer {shorten(completion, 60)!r}, so "
            "they cannot be aligned with the student's"
        )
    answer = _last_run(loss_mask)
    student = _bounds(answer, [token_ends[i] for i in answer])
    own = range(teacher[0], own.stop)
    shared = sorted(end for end in student.keys() & teacher.keys() if end > 0)
    if not shared or shared[-1] < len(completion) or "\N{REPLACEMENT CHARACTER}" in completion:
        raise DataError("some tokens of the answer make no whole characters, so they cannot be aligned")
    mask = tuple(i in own for i in range(len(talk.input_ids)))
    spans = {
        "student": [answer.start, *(student[end] for end in shared)],
        "teacher": [own.start, *(teacher[end] for end in shared)],
    }
    return dataclasses.replace(talk, loss_mask=mask, num_turns=1), spans


def _last_run(mask: Sequence[bool]) -> range:
    """Return the positions of the last run of True."""
    end = max((i + 1 for i, flag in enumerate(mask) if flag), default=0)
    start = max((i + 1 for i in range(end) if not mask[i]), default=0)
    return range(start, end)


def _bounds(tokens: range, ends: Sequence[int]) -> dict[int, int]:
    """Return end of text -> the position after the last token that ends there."""
    return {end: i + 1 for i, end in zip(tokens, ends, strict=True) if end > 0}


@infer(returns="teacher_spans")
def span_inf(out: Output, spans: Json, seqs: Sequences) -> Json:
    """Return the log-probs of a teacher for each span of `aligned_view`: the sums over its tokens.

    Args:
        out: the teacher.
        spans: bounds of spans.
        seqs: the layout of the batch.

    Returns:
        For each sample a dict with `logprobs`.
    """
    return [{"logprobs": sums} for sums in _span_sums(out.logprobs, [x["teacher"] for x in spans], seqs)]


@compute(returns="advantages")
def span_advantage(
    behav_logprobs: PerToken, spans: Json, teacher_spans: Json, seqs: Sequences
) -> tuple[PerToken, Metrics]:
    """Return minus the student's reverse KL from a teacher with another tokenizer, estimated for each span.

    All tokens of a span have the advantage of the span: `log p_teacher(text) - log p_student(text)`, each the
    sum over the own tokens of the model. For spans of one token on both sides it is that of
    `recipes/distill.py`.

    Args:
        behav_logprobs: `[T]`, recorded at generation.
        spans: bounds of spans, from `aligned_view`.
        teacher_spans: log-probs of spans, from `span_inf`.
        seqs: the layout of the batch.

    Returns:
        Advantages `[T]`, and metrics: the `reverse_kl` of a token, and `tokens_of_span`.

    Source: Patiño et al. 2025, "Unlocking on-policy distillation for any model family" (GOLD): sequences are
    aligned by their text, and the log-probs of the tokens of a span are added.
    """
    bounds = [x["student"] for x in spans]
    advantages = behav_logprobs.new_zeros(behav_logprobs.shape)
    sizes = behav_logprobs.new_zeros(behav_logprobs.shape)
    starts = seqs.offsets.tolist()  # waits: once per batch
    of_student = _span_sums(behav_logprobs, bounds, seqs)
    for start, edges, own, other in zip(starts, bounds, of_student, teacher_spans, strict=False):
        for (a, b), student, teacher in zip(pairwise(edges), own, other["logprobs"], strict=True):
            advantages[start + a : start + b] = teacher - student
            sizes[start + a : start + b] = b - a
    return advantages, {"reverse_kl": -advantages / sizes.clamp(min=1), "tokens_of_span": sizes}


def _span_sums(logprobs: PerToken, bounds: Sequence[list[int]], seqs: Sequences) -> list[list[float]]:
    """Return the sums of log-probs between the bounds of each sequence's spans."""
    total = logprobs.new_zeros(len(logprobs) + 1).double()
    total[1:] = logprobs.double().cumsum(0)
    starts = seqs.offsets.tolist()  # waits: once per micro-batch
    at = [start + edge for start, edges in zip(starts, bounds, strict=False) for edge in edges]
    found = iter(total[seqs.index.new_tensor(at)].tolist())  # waits: once per micro-batch
    return [[b - a for a, b in pairwise([next(found) for _ in edges])] for edges in bounds]
