"""Nodes that open a stream, by generating completions or encoding written examples, and infer nodes."""

from __future__ import annotations

from hflow.base.errors import DataError
from hflow.dsl import encode, generate, infer
from hflow.dsl.lazy import algo
from hflow.types import Engine, Image, Messages, Output, PerSequence, PerToken, Tokenizer, Trajectory


@generate()
async def actor_gen(engine: Engine, prompt: str, images: list[Image] | None = None) -> Trajectory:
    """Generate one completion of the prompt.

    Args:
        engine: generates.
        prompt: the text.
        images: images for the places `<image>` of the prompt, or in front of it.
    """
    return await engine.complete(prompt, images=images)


@generate()
async def chat_gen(
    engine: Engine, prompt: Messages, images: list[Image] | None = None, *, system: str | None = None
) -> Trajectory:
    """Generate the assistant's next message of a conversation, with the model's chat template.

    Args:
        engine: generates.
        prompt: the messages so far. A text is one message of the user.
        images: images for the places that the messages have for them, or in front of the user's last text.
        system: a system message in front of conversations that do not begin with one of their own.
    """
    has_own = prompt[0]["role"] == "system"
    first = [] if system is None or has_own else [{"role": "system", "content": system}]
    return await engine.complete([*first, *prompt], images=images)


@encode()
def chat_view(tokenizer: Tokenizer, messages: Messages, images: list[Image] | None = None) -> Trajectory:
    """Encode a conversation with the model's chat template. Only the assistant's messages are learned.

    Args:
        tokenizer: encodes.
        messages: the conversation.
        images: images for the places that it has for them, or in front of the user's last text.

    Raises:
        DataError: if it has none.
    """
    talk = tokenizer.chat(messages, images)
    if not talk.num_tokens:
        raise DataError(
            "the chat template marks no token as the assistant's, so there is nothing to learn; add a "
            "message of the assistant, or remove the conversation"
        )
    return talk


@encode()
def sft_view(tokenizer: Tokenizer, prompt: str, answer: str, images: list[Image] | None = None) -> Trajectory:
    """Encode a prompt and its answer. Only the answer is learned.

    Args:
        tokenizer: encodes.
        prompt: the text.
        answer: what is learned.
        images: images for the places `<image>` of the prompt, or in front of it.
    """
    return tokenizer.join(prompt, answer, images)


@encode(group=2)
def pair(tokenizer: Tokenizer, prompt: str, chosen: str, rejected: str) -> list[Trajectory]:
    """Encode two answers to a prompt as a group of two, the chosen one first."""
    return [tokenizer.join(prompt, chosen), tokenizer.join(prompt, rejected)]


@encode(group=2)
def kto_view(tokenizer: Tokenizer, prompt: str, answer: str, unrelated: str) -> list[Trajectory]:
    """Encode an answer and an unrelated one to the same prompt as a group of two, for `kto`.

    Args:
        tokenizer: encodes.
        prompt: the text.
        answer: the answer that is labelled.
        unrelated: an answer to another prompt.
    """
    return [tokenizer.join(prompt, answer), tokenizer.join(prompt, unrelated)]


@encode()
def reward_view(tokenizer: Tokenizer, messages: Messages) -> Trajectory:
    """Encode the conversation of a sample again, with the tokenizer of a reward model.

    The text is put into the reward model's chat template. Without a template, the texts of all messages
    follow one another, and the end-of-text token ends the last one.
    """
    return encoded_again(tokenizer, messages)


def encoded_again(tokenizer: Tokenizer, messages: Messages) -> Trajectory:
    """Return a conversation in the chat template, or without one its texts one after the other."""
    if tokenizer.has_chat_template:
        return tokenizer.chat(messages)
    *before, last = (str(message.get("content") or "") for message in messages)
    return tokenizer.join("".join(before), last)


@infer(returns="ref_logprobs")
def ref_inf(out: Output) -> PerToken:
    """Return the log-probs `[T]` of the tokens under a reference model."""
    return out.logprobs


@infer(returns=("prox_logprobs", "prox_entropy"))
def entropy_inf(out: Output) -> tuple[PerToken, PerToken]:
    """Return log-probs and entropy `[T]` at the start of the step, in the place of `actor_inf`."""
    return out.logprobs, out.entropy


@infer(returns=("values", "bootstrap"))
def critic_inf(out: Output) -> tuple[PerToken, PerSequence]:
    """Return V before each token `[T]`, and V after the last one `[S]`."""
    return out.values, out.bootstrap


@infer(returns="reward")
def rew_inf(out: Output) -> PerSequence:
    """Return a reward model's score of each sequence `[S]`."""
    return out.scores


@infer(returns=("teacher_ids", "teacher_logprobs"))
def topk_inf(out: Output, *, k: int = 16) -> tuple[PerToken, PerToken]:
    """Return a teacher's `k` likeliest tokens at each position and their log-probs, both `[T, k]`.

    Args:
        out: the teacher.
        k: number of tokens; a step sends 12 bytes for each of them and each token of the batch.
    """
    return out.topk(k)


@infer(returns="logit_gradient")
def logit_gradient_inf(out: Output, *, k: int = 16) -> PerToken:
    """Return the squared norm `[T]` of each token's gradient by the logits (`algo.logit_gradient`).

    Args:
        out: log-probs of the policy at the start of the step.
        k: number of the likeliest tokens whose probabilities count.
    """
    return algo.logit_gradient(out.logprobs, out.topk(k)[1])
