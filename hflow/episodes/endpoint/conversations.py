"""`EpisodeEndpoint`: turns the requests of an episode's agent into trajectories.

A request holds a whole conversation. If it begins with one that the endpoint has recorded, only the messages
after it are encoded, and the recorded tokens, as they were sampled, are in front of them. If it continues an
earlier turn of a recorded conversation, it is a branch: a new trajectory that begins with the tokens up to
that turn. Any other request starts a new trajectory. A request continues what has its `X-Session-ID`.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from hflow.base.errors import EpisodeError
from hflow.data.text.messages import normal_messages
from hflow.episodes.endpoint.replies import Reply, ReplyPart, StreamedTurn, generated_ids, reply_of
from hflow.episodes.endpoint.requests import CompletionRequest, Message, RequestRefused, TokenPrompt
from hflow.episodes.endpoint.server import REFUSALS, EndpointServer
from hflow.episodes.trajectories import append_messages
from hflow.types import Trajectory
from hflow.types.recorded import cut_recorded

Tools = Sequence[Mapping[str, Any]]
Prompt = str | tuple[Message, ...] | TokenPrompt


class ConversationEngine(Protocol):
    """Generates the turns of one conversation."""

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The tokens that end a turn."""
        ...

    async def complete(
        self,
        prompt: str | Sequence[Mapping[str, Any]] | Trajectory,
        *,
        tools: Tools | None = None,
        max_tokens: int | None = None,
        stop: Sequence[str] | None = None,
        on_part: Callable[[ReplyPart], None] | None = None,
    ) -> Trajectory:
        """Generate a turn, as `hflow.types.Engine.complete`; `on_part` is called with parts of its text."""
        ...

    def text_before_calls(self, turn: Trajectory) -> str:
        """Return the text of a trajectory's last turn in front of its tool calls."""
        ...

    def found_stop(self, ids: Sequence[int], stops: Sequence[str]) -> str | None:
        """Return the string that ended a turn of these tokens; None if none of `stops` did."""
        ...

    def token_text(self, token: int) -> str:
        """Return the text of a token, also of a special one."""
        ...


class EpisodeEndpoint:
    """The `hflow.types.Endpoint` of an episode, and the responder of its key.

    `new_engine` makes the engine of the conversation with a number of `numbers`. Requests cannot change the
    sampling options of the node.
    """

    def __init__(
        self,
        model: str,
        new_engine: Callable[[int], ConversationEngine],
        sampling: Mapping[str, float],
        numbers: itertools.count[int],
    ) -> None:
        self.base_url = ""
        self.api_key = ""
        self._model = model
        self._new_engine = new_engine
        self._sampling = sampling
        self._numbers = numbers
        self._conversations: list[_Conversation] = []
        self._failure: Exception | None = None

    @property
    def model(self) -> str:
        """Name of the model."""
        return self._model

    @property
    def server_url(self) -> str:
        """The URL without `/v1`."""
        return self.base_url.removesuffix("/v1")

    @property
    def trajectories(self) -> tuple[Trajectory, ...]:
        """One trajectory for each conversation, in the order in which they began."""
        return tuple(c.trajectory for c in self._conversations if c.trajectory is not None and c.has_reply)

    @property
    def sessions(self) -> tuple[str | None, ...]:
        """The session of the requests of each trajectory."""
        return tuple(c.session for c in self._conversations if c.trajectory is not None and c.has_reply)

    @property
    def trajectory(self) -> Trajectory:
        """The only trajectory.

        Raises:
            EpisodeError: if there is none, or there are several.
        """
        found = self.trajectories
        if not found:
            raise EpisodeError(
                "the endpoint has no trajectory, as its agent completed no request. Check that the agent "
                "uses endpoint.base_url and endpoint.api_key"
            )
        if len(found) > 1:
            raise EpisodeError(
                f"the agent's requests made {len(found)} trajectories: {self._conversations[1].why_new}. "
                "Return endpoint.trajectories from a body with '-> list[Trajectory]', or let the agent send "
                "every conversation back as it was"
            )
        return found[0]

    async def reply(self, request: CompletionRequest, turn: StreamedTurn | None = None) -> Reply:
        """Complete a request, in its conversation."""
        self._check_sampling(request)
        conversation, prompt = self._begin(request)
        before = prompt if isinstance(prompt, Trajectory) else Trajectory((), (), (), ())
        if turn is not None:
            turn.reply_id = conversation.reply_id
        try:
            check_stop_ids(request, conversation.engine.stop_ids)
            after = await conversation.engine.complete(
                prompt,
                tools=request.tools,
                max_tokens=request.max_tokens,
                stop=request.stop,
                on_part=None if turn is None else turn.add,
            )
        except BaseException as error:
            if isinstance(error, Exception) and not isinstance(error, (*REFUSALS, RequestRefused)):
                self._failure = self._failure or error
            conversation.is_busy = False
            if not conversation.has_reply:
                self._conversations.remove(conversation)
            raise
        return conversation.append(request, before, after)

    def raise_failure(self) -> None:
        """Raise the first error that ends the run, if there was one. An agent may have hidden it."""
        if self._failure is not None:
            raise self._failure

    def _check_sampling(self, request: CompletionRequest) -> None:
        for name, fixed in self._sampling.items():
            value = getattr(request, name)
            if value is not None and value != fixed:
                raise RequestRefused(
                    f"{name}={value:g} differs from the generate node's {name}={fixed:g}; leave it out, or "
                    "change the node's",
                    param=name,
                )
        if request.seed is not None:
            raise RequestRefused("seed is not supported, as the sample has one; leave it out", param="seed")

    def _begin(
        self, request: CompletionRequest
    ) -> tuple[_Conversation, str | tuple[Message, ...] | Trajectory]:
        """Return the conversation of a request, and its prompt: what begins it, or its longer trajectory.

        Requests that arrive together are distinguished by their order: the second one that continues a turn
        is a branch.
        """
        prompt, session = request.prompt, request.session
        base, turn = self._longest_match(prompt, request.tools, session)
        is_at_end = base is not None and turn == base.turns[-1] and not base.is_busy
        if base is not None and is_at_end:
            conversation = base
        else:
            why_new = self._why_new(prompt, request.tools, session)
            conversation = _Conversation(next_number := next(self._numbers), request.tools, why_new, session)
            conversation.engine = self._new_engine(next_number)
            self._conversations.append(conversation)
            if base is not None and turn is not None:
                conversation.branch_from(base, turn)
        conversation.is_busy = True
        before = conversation.trajectory
        if isinstance(prompt, TokenPrompt):
            known = Trajectory((), (), (), ()) if before is None else before
            return conversation, append_messages(known, prompt.ids[len(known.input_ids) :])
        if before is None or isinstance(prompt, str):
            return conversation, prompt
        return conversation, dataclasses.replace(before, pending=prompt[len(conversation.messages) :])

    def _longest_match(
        self, prompt: Prompt, tools: Tools, session: str | None
    ) -> tuple[_Conversation, _Turn] | tuple[None, None]:
        """Return the recorded turn that a prompt continues, and its conversation.

        Of several, the latest turn of the newest conversation, if possible one that can be extended. Tools
        are described in front of the first message, so a request with other tools continues nothing; one
        that offers none continues any.
        """
        found = [
            (
                turn.num_messages or turn.num_tokens,
                turn == conversation.turns[-1] and not conversation.is_busy,
                i,
                turn,
            )
            for i, conversation in enumerate(self._conversations)
            for turn in conversation.turns
            if conversation.session == session
            if not tools or list(tools) == list(conversation.tools)
            if conversation.is_continued(prompt, turn)
        ]
        if not found:
            return None, None
        *_, i, turn = max(found, key=lambda match: match[:3])
        return self._conversations[i], turn

    def _why_new(self, prompt: Prompt, tools: Tools, session: str | None) -> str:
        """Say why a request extends no conversation."""
        if isinstance(prompt, str):
            return "every completion of a text is one of its own"
        if isinstance(prompt, TokenPrompt):
            return "the token ids of a request do not begin with all those of its session"
        recorded = [c.messages for c in self._conversations if c.has_reply and c.session == session]
        if session is not None and not recorded:
            return "its requests have several values of X-Session-ID"
        num_equal = max((_num_equal(prompt, messages) for messages in recorded), default=0)
        if num_equal == len(prompt) or self._longest_match(prompt, tools, session)[0] is not None:
            return "a request was sent twice, or continues an earlier turn"
        if self._longest_match(prompt, (), session)[0] is not None:
            return "a request offers other tools than those with which its conversation began"
        role = prompt[num_equal]["role"]
        return f"messages[{num_equal}] of a request, of role {role!r}, differs from what was recorded"


@dataclass(frozen=True)
class _Turn:
    """Where a turn of the model ends."""

    num_messages: int
    """In the conversation, as the client knows it; 0 if it sends tokens."""
    num_recorded: int
    """In the trajectory's messages."""
    num_tokens: int


@dataclass(eq=False)
class _Conversation:
    """A conversation and its trajectory."""

    number: int
    tools: Tools
    """The tools that were described to the model."""
    why_new: str
    session: str | None = None
    """The header `X-Session-ID` of its requests."""
    engine: ConversationEngine = field(init=False)
    messages: tuple[Message, ...] = ()
    """The messages, as the client sent and received them."""
    trajectory: Trajectory | None = None
    turns: list[_Turn] = field(default_factory=list)
    is_busy: bool = False
    """Whether a turn is being generated."""
    has_reply: bool = False
    """Whether a turn was generated; false for a new branch."""

    def is_continued(self, prompt: Prompt, turn: _Turn) -> bool:
        """Return whether a prompt begins with the conversation up to one of its turns."""
        if isinstance(prompt, TokenPrompt):
            known = () if self.trajectory is None else self.trajectory.input_ids[: turn.num_tokens]
            return turn.num_messages == 0 and prompt.ids[: turn.num_tokens] == known
        if isinstance(prompt, str) or not 0 < turn.num_messages < len(prompt):
            return False
        return prompt[: turn.num_messages] == self.messages[: turn.num_messages]

    @property
    def reply_id(self) -> str:
        return f"{self.number}_{len(self.turns)}"

    def branch_from(self, base: _Conversation, turn: _Turn) -> None:
        """Begin with the turns of another conversation up to one of them."""
        assert base.trajectory is not None
        self.tools = base.tools
        self.turns = base.turns[: base.turns.index(turn) + 1]
        self.messages = base.messages[: turn.num_messages]
        self.trajectory = _cut(base.trajectory, turn, len(self.turns))

    def append(self, request: CompletionRequest, before: Trajectory, after: Trajectory) -> Reply:
        """Append a generated turn, and return the reply to its request."""
        ids = generated_ids(before, after)
        reply = reply_of(
            self.reply_id,
            before,
            after,
            self.engine.text_before_calls(after),
            [self.engine.token_text(token) for token in ids],
            self.engine.found_stop(ids, request.stop or ()),
        )
        self.trajectory = after
        if not isinstance(request.prompt, str):
            if isinstance(request.prompt, tuple):
                self.messages = (*request.prompt, *normal_messages([reply.message]))
            self.turns.append(_Turn(len(self.messages), len(after.messages), len(after.input_ids)))
        self.has_reply, self.is_busy = True, False
        return reply


def check_stop_ids(request: CompletionRequest, stop_ids: Sequence[int]) -> None:
    """Check that the tokens that a client expects to end a turn do so.

    Raises:
        RequestRefused: if one does not.
    """
    if other := set(request.stop_ids) - set(stop_ids):
        raise RequestRefused(
            f"stop_token_ids has {min(other)}, but the model's turns end at {list(stop_ids)}; leave it out",
            param="stop_token_ids",
        )


def _cut(trajectory: Trajectory, turn: _Turn, num_turns: int) -> Trajectory:
    """Return a trajectory up to the end of one of its turns."""
    end = turn.num_tokens
    return Trajectory(
        input_ids=trajectory.input_ids[:end],
        loss_mask=trajectory.loss_mask[:end],
        behav_logprobs=trajectory.behav_logprobs[:end],
        versions=trajectory.versions[:end],
        recorded=cut_recorded(trajectory.recorded, end),
        draws=trajectory.draws[:num_turns],
        messages=trajectory.messages[: turn.num_recorded],
        num_turns=num_turns,
        tools=trajectory.tools,
    )


def _num_equal(a: Sequence[Message], b: Sequence[Message]) -> int:
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


@asynccontextmanager
async def open_endpoint(
    server: EndpointServer,
    model: str,
    new_engine: Callable[[int], ConversationEngine],
    sampling: Mapping[str, float],
    numbers: itertools.count[int],
) -> AsyncIterator[EpisodeEndpoint]:
    """Open an endpoint while the block runs; the arguments are those of `EpisodeEndpoint`.

    Raises:
        HflowError: at the end of the block, an error of the engine that ends the run, even if the agent hid
            it.
    """
    endpoint = EpisodeEndpoint(model, new_engine, sampling, numbers)
    try:
        async with server.admit(endpoint) as key:
            endpoint.base_url, endpoint.api_key = server.url, key
            yield endpoint
    except Exception:
        endpoint.raise_failure()
        raise
    endpoint.raise_failure()
