"""`EpisodeEngine`: what one sample's episode sees of a generation engine."""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from random import Random
from typing import Any

from hflow.backends.base import Generated, SamplingParams
from hflow.data.tokenizer import TextTokenizer
from hflow.errors import NotYetError
from hflow.types import Trajectory
from hflow.workers.engine_driver import EngineDriver


def sample_seed(run_seed: int, stream: str, sample: int, model: str) -> int:
    """The seed of one sample's draws from one model: 64 bits that depend on nothing else."""
    digest = hashlib.blake2b(f"{run_seed}/{stream}/{sample}/{model}".encode(), digest_size=8)
    return int.from_bytes(digest.digest(), "little")


class EpisodeEngine:
    """The `hflow.types.Engine` of one sample and one model."""

    def __init__(
        self, driver: EngineDriver, tokenizer: TextTokenizer, params: SamplingParams, seed: int
    ) -> None:
        """Make one.

        Args:
            driver: of the engine that draws.
            tokenizer: the model's.
            params: the node's; the tokenizer's stop tokens are added to `stop_ids`.
            seed: the sample's, see `sample_seed`.
        """
        self._driver = driver
        self._tokenizer = tokenizer
        self._params = params
        self._seed = seed

    async def complete(
        self,
        prompt: str | Sequence[Mapping[str, Any]] | Trajectory,
        *,
        tools: Sequence[Callable[..., Any]] | None = None,
        max_tokens: int | None = None,
        stop: Sequence[str] | None = None,
    ) -> Trajectory:
        """Generate until a stop and return the longer trajectory.

        Args:
            prompt: a text, encoded as it stands; messages, encoded by the chat template; or a
                trajectory, of which every token is kept and only pending messages are encoded.
            tools: not yet executed.
            max_tokens: most tokens to draw now; the node's by default.
            stop: texts that end the turn; the node's by default. Their tokens stay in the
                trajectory, but the completion ends before them.

        Raises:
            NotYetError: when tools are given.
            BackendError: when the engine refuses the prompt.
            RunError: when the engine has failed.
            DataError: when the tokenizer cannot encode it.
        """
        if tools:
            raise NotYetError("tools are not executed in this version, call complete() without tools")
        start = self._opened(prompt)
        params = self._turn(max_tokens, stop)
        generated = await self._driver.submit(start.input_ids, params)
        text = _until_stop(self._tokenizer.decode(generated.ids), params.stop)
        return _extended(start, generated, text)

    async def call(self, tool: Callable[..., Any], **arguments: Any) -> Any:
        """Run a tool.

        Raises:
            NotYetError: always, in this version.
        """
        raise NotYetError(f"tools are not executed in this version, {tool.__name__} cannot be called")

    def random(self) -> float:
        """A number in [0, 1), seeded by the sample."""
        return self._random.random()

    def time(self) -> float:
        """Seconds since the epoch."""
        return time.time()

    @cached_property
    def _random(self) -> Random:
        return Random(self._seed)

    def _turn(self, max_tokens: int | None, stop: Sequence[str] | None) -> SamplingParams:
        """How this turn is drawn."""
        params = self._params
        return dataclasses.replace(
            params,
            stop_ids=tuple(dict.fromkeys((*params.stop_ids, *self._tokenizer.stop_ids))),
            seed=self._seed,
            max_tokens=params.max_tokens if max_tokens is None else max_tokens,
            stop=params.stop if stop is None else tuple(stop),
        )

    def _opened(self, prompt: str | Sequence[Mapping[str, Any]] | Trajectory) -> Trajectory:
        """The trajectory that the next token is drawn behind."""
        if isinstance(prompt, Trajectory):
            return self._continued(prompt)
        if isinstance(prompt, str):
            message = {"role": "user", "content": prompt}
            return _masked(self._tokenizer.prompt(prompt), (message,))
        return _masked(self._tokenizer.template().prompt(prompt), tuple(prompt))

    def _continued(self, talk: Trajectory) -> Trajectory:
        if not talk.pending:
            return talk
        template = self._tokenizer.chat_template
        if template is not None:
            ids = template.continuation(talk.pending, talk.input_ids[-1] if talk.input_ids else None)
        else:
            ids = self._tokenizer.encode("".join(str(m.get("content", "")) for m in talk.pending))
        return _extended_by_prompt(talk, ids)


def _masked(ids: Sequence[int], messages: tuple[Mapping[str, Any], ...]) -> Trajectory:
    """A prompt: nothing of it is learned."""
    return Trajectory(
        input_ids=tuple(ids),
        loss_mask=(False,) * len(ids),
        behav_logprobs=(0.0,) * len(ids),
        versions=(-1,) * len(ids),
        messages=messages,
    )


def _extended_by_prompt(talk: Trajectory, ids: Sequence[int]) -> Trajectory:
    """`talk` with the encoded pending messages behind it."""
    added = _masked(ids, talk.pending)
    return dataclasses.replace(
        talk,
        input_ids=talk.input_ids + added.input_ids,
        loss_mask=talk.loss_mask + added.loss_mask,
        behav_logprobs=talk.behav_logprobs + added.behav_logprobs,
        versions=talk.versions + added.versions,
        messages=talk.messages + added.messages,
        pending=(),
    )


def _extended(talk: Trajectory, generated: Generated, text: str) -> Trajectory:
    """`talk` with a generated turn behind it."""
    return dataclasses.replace(
        talk,
        input_ids=talk.input_ids + generated.ids,
        loss_mask=talk.loss_mask + (True,) * len(generated.ids),
        behav_logprobs=talk.behav_logprobs + generated.logprobs,
        versions=talk.versions + generated.versions,
        messages=(*talk.messages, {"role": "assistant", "content": text}),
        completion=text,
        stop_reason=generated.stop_reason,
        num_turns=talk.num_turns + 1,
    )


def _until_stop(text: str, stops: Sequence[str]) -> str:
    """The text before the first stop string in it."""
    ends = [position for stop in stops if (position := text.find(stop)) >= 0]
    return text[: min(ends)] if ends else text
