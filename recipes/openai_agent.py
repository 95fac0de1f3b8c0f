"""An agent that only knows an endpoint with OpenAI's API. Any agent framework can take its place.

    hflow run recipes/openai_agent.py

`engine.endpoint()` opens the endpoint for one episode. The agent sends messages with OpenAI's client, runs
the tools that the model calls, and sends their results back. hflow records the tokens, log-probs and versions
of each turn, so the conversation becomes a trajectory without being encoded again. The calculator runs in a
sandbox. Starts from the checkpoint of `recipes/tool_sft.py`. Expect the sampled reward to rise from 0.45 to
0.60 in 30 steps; greedy answers are at 0.97 from the start, and then at 0.99.
"""

import asyncio
import json
from typing import Any

from openai import AsyncOpenAI

from hflow import (
    Dataset,
    Endpoint,
    Engine,
    Model,
    Recipe,
    Text,
    Trajectory,
    compute,
    generate,
    nodes,
    sandbox,
    use,
)

data = Dataset("train", prompt=Text, answer=Text)
heldout = Dataset("heldout", prompt=Text, answer=Text)
actor = Model("actor", trainable=True)

TOOL: Any = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Add numbers, as in 17+25.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
    },
}
CLIENTS: dict[asyncio.AbstractEventLoop, AsyncOpenAI] = {}


@sandbox(timeout=2.0, memory_mb=128)
def calculator(expression: str) -> str:
    return str(sum(int(number) for number in expression.split("+")))


def client_of(endpoint: Endpoint) -> AsyncOpenAI:
    """Return a client. All clients of a worker share the connections of one, as a new one takes 30 ms.

    It has no timeout, as the engine may sleep while a step trains. The node's `timeout` does not count that
    time.
    """
    loop = asyncio.get_running_loop()
    if loop not in CLIENTS:
        CLIENTS[loop] = AsyncOpenAI(api_key=endpoint.api_key, timeout=None, max_retries=0)
    return CLIENTS[loop].with_options(base_url=endpoint.base_url, api_key=endpoint.api_key)


@generate(actor, group=8, timeout=60.0, tool_format="[]?", returns=("num_calls", "reward"))
async def agent(
    engine: Engine, prompt: str, answer: str, *, max_calls: int = 2
) -> tuple[Trajectory, int, float]:
    messages: list[Any] = [{"role": "user", "content": prompt}]
    num_calls = 0
    async with engine.endpoint() as endpoint:
        client = client_of(endpoint)
        while True:
            reply = await client.chat.completions.create(
                model=endpoint.model, messages=messages, tools=[TOOL]
            )
            message: Any = reply.choices[0].message
            if not message.tool_calls or num_calls == max_calls:
                break
            messages.append(message.model_dump())
            for call in message.tool_calls:
                result = await engine.call(calculator, **json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": f"{result[:8]}="})
                num_calls += 1
    return endpoint.trajectory, num_calls, float(message.content == answer)


@compute(per="sample", on="eval_agent")
def accuracy(completion: str, answer: str) -> float:
    return float(completion == answer)


recipe = Recipe(
    "openai_agent",
    data,
    [
        agent,
        use(nodes.group_advantage, on="agent"),
        use(nodes.actor_train, actor, on="agent", minibatches=2, prox="none"),
        use(agent, actor, name="eval_agent", data=heldout, group=1, every=20, temperature=0.0),
        accuracy,
    ],
)
