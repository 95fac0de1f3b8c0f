"""GRPO whose reward is a language model's opinion, by a kind of node of one's own.

    python recipes/custom/judge_server.py &
    hflow run recipes/custom/llm_judge.py

`@Judge()` decorates a body that puts a question about a sample; the kind sends it to an endpoint that speaks
OpenAI's chat completions and reads the first number of the reply, from 0 to `best`, as a score from 0 to 1.
What is busy or not there is asked again after a while; a sample on which the judge stays silent, or says
nothing with a number in it, is refused with the reason. The server above stands for a real one, which is
`nodes.judge.url=https://... nodes.judge.model=NAME` away (the key comes from OPENAI_API_KEY). Expect the
held-out accuracy to rise from 0.42 to about 0.76 in 28 steps.
"""

import asyncio
import os
import re
from collections.abc import Mapping
from typing import Any, ClassVar

import httpx

from hflow import Context, Dataset, Level, Model, NodeType, Option, Recipe, Text, compute, nodes, use

data = Dataset("train", prompt=Text, answer=Text)
heldout = Dataset("heldout", prompt=Text, answer=Text)
actor = Model("actor", trainable=True)

CLIENTS: dict[asyncio.AbstractEventLoop, httpx.AsyncClient] = {}


class Judge(NodeType):
    """Per sample: a question in, a score from 0 to 1 out."""

    level: ClassVar = Level.SAMPLE
    is_async: ClassVar = True
    provides: ClassVar = ()
    options: ClassVar = NodeType.options | {
        "url": Option("str", "http://127.0.0.1:8000/v1"),
        "model": Option("str", "judge"),
        "best": Option("float", 10.0, minimum=0.001),
        "attempts": Option("int", 4, minimum=1),
        "patience": Option("float", 0.5, minimum=0.0),
        "request_timeout": Option("float", 15.0, minimum=0.001),
        "timeout": Option("None | float", 60.0, minimum=0.001),
        "concurrency": Option("None | int", 64, minimum=1),
    }

    def read_results(self, hint: Any, function: str, fault: Any) -> Any:
        """The body returns a text, the node a number."""
        if hint is not str:
            raise fault("a Judge's body returns its question, a str")
        return super().read_results(float, function, fault)

    async def run(self, context: Context, inputs: Mapping[str, Any]) -> float:
        """Ask; wait `patience` seconds after the first failure, twice as long after the next."""
        question, options = await context.body(**inputs, **context.knobs), context.options
        for attempt in range(options["attempts"] - 1):
            try:
                return read_score(await ask(question, options), options["best"])
            except (httpx.TransportError, httpx.HTTPStatusError) as error:
                if not is_passing(error):
                    raise
            await asyncio.sleep(options["patience"] * 2**attempt)
        return read_score(await ask(question, options), options["best"])


async def ask(question: str, options: Mapping[str, Any]) -> str:
    """The reply of a chat model to one message."""
    key = os.environ.get("OPENAI_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    message = {"role": "user", "content": question}
    body = {"model": options["model"], "messages": [message], "temperature": 0.0}
    reply = await client().post(
        f"{options['url']}/chat/completions", json=body, headers=headers, timeout=options["request_timeout"]
    )
    return str(reply.raise_for_status().json()["choices"][0]["message"]["content"])


def client() -> httpx.AsyncClient:
    """One for each process: connections are kept, and certificates are read once."""
    loop = asyncio.get_running_loop()
    if loop not in CLIENTS:
        CLIENTS[loop] = httpx.AsyncClient(limits=httpx.Limits())
    return CLIENTS[loop]


def is_passing(error: httpx.TransportError | httpx.HTTPStatusError) -> bool:
    """Whether the same question may be answered later."""
    if isinstance(error, httpx.HTTPStatusError):
        return error.response.status_code == 429 or error.response.status_code >= 500
    return True


def read_score(reply: str, best: float) -> float:
    """The first number of a reply, over the best; within 0 and 1."""
    found = re.search(r"-?\d+(\.\d+)?", reply)
    if found is None:
        raise ValueError(f"the judge gave no number: {reply!r:.80}")
    return min(max(float(found.group()) / best, 0.0), 1.0)


@Judge(returns="reward")
async def judge(prompt: str, completion: str) -> str:
    return f"Is this sum right? Grade it with 10 or 0, and say the number only.\n{prompt}{completion}"


@compute(per="sample", on="eval_gen")
def accuracy(completion: str, answer: str) -> float:
    return float(completion.strip() == answer.strip())


recipe = Recipe(
    "llm_judge",
    data,
    [
        use(nodes.actor_gen, actor, group=8),
        judge,
        nodes.group_advantage,
        use(nodes.actor_train, actor, minibatches=2, prox="none"),
        use(nodes.actor_gen, actor, name="eval_gen", data=heldout, every=20, temperature=0.0),
        accuracy,
    ],
)
