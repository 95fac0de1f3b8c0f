"""A taskset of verifiers 0.4, with a harness that needs no process of its own."""

from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf
from openai import AsyncOpenAI

__all__ = ["AskTwice", "Letters"]


class LettersData(vf.TaskData):
    """A task: the letter to write."""

    letter: str


class LettersTask(vf.Task[LettersData]):
    """Rewards of the last reply."""

    @vf.reward(weight=2.0)
    async def share(self, trace: vf.Trace) -> float:
        """Return the share of the letter."""
        if self.data.letter == "!":
            raise ValueError("no letter")
        return trace.last_reply.count(self.data.letter) / max(1, len(trace.last_reply))

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        """Return the number of letters."""
        return len(trace.last_reply)


class LettersConfig(vf.TasksetConfig):
    """The letters, a task each."""

    letters: str = "abc!"


class Letters(vf.Taskset[LettersTask, LettersConfig]):
    """One task for each letter."""

    def load(self) -> Iterator[LettersTask]:
        """Yield the tasks."""
        for letter in self.config.letters:
            yield LettersTask(LettersData(prompt=f"Write {letter}.", letter=letter), self.config.task)


class AskTwiceConfig(vf.HarnessConfig):
    """No options."""


class AskTwice(vf.Harness[AskTwiceConfig]):
    """Send the prompt, and then ask again."""

    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        """Hold the conversation."""
        messages: list[Any] = [{"role": "user", "content": data.prompt}]
        async with AsyncOpenAI(base_url=endpoint, api_key=secret, timeout=None, max_retries=0) as client:
            reply = await client.chat.completions.create(model=ctx.model, messages=messages)
            messages += [reply.choices[0].message, {"role": "user", "content": "Again."}]
            await client.chat.completions.create(model=ctx.model, messages=messages)
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")
