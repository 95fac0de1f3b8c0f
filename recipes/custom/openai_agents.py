"""An agent of OpenAI's Agents SDK, unchanged: its requests go to the endpoint of its episode, and it learns.

    pip install openai-agents
    hflow run custom/openai_agents

The agent calls a calculator. Starts from the checkpoint of `recipes/tool_sft.py`. `recipes/openai_agent.py`
writes the same loop with OpenAI's client alone.
"""

import asyncio
from typing import Any

from openai import AsyncOpenAI

from hflow import (
    Dataset,
    Endpoint,
    Engine,
    Model,
    Recipe,
    RecipeError,
    Text,
    Trajectory,
    compute,
    generate,
    nodes,
    use,
)

try:
    from agents import Agent, AgentsException, OpenAIResponsesModel, RunConfig, Runner, function_tool
except ModuleNotFoundError as error:
    raise RecipeError(f"the agent cannot be imported ({error}): pip install openai-agents") from None

data = Dataset("train", prompt=Text, answer=Text)
heldout = Dataset("heldout", prompt=Text, answer=Text)
actor = Model("actor", trainable=True)
CLIENTS: dict[asyncio.AbstractEventLoop, AsyncOpenAI] = {}


def calculator(expression: str) -> str:
    """Add numbers, as in 17+25."""
    return f"{sum(int(number) for number in expression.split('+'))}"[:8] + "="


def failed(context: Any, error: Exception) -> str:
    """Return the error that the model reads, in characters that it knows."""
    return "?"


def client_of(endpoint: Endpoint) -> AsyncOpenAI:
    """Return a client; all share connections, and wait while the engine sleeps (see `openai_agent.py`)."""
    loop = asyncio.get_running_loop()
    if loop not in CLIENTS:
        CLIENTS[loop] = AsyncOpenAI(api_key=endpoint.api_key, timeout=None, max_retries=0)
    return CLIENTS[loop].with_options(base_url=endpoint.base_url, api_key=endpoint.api_key)


# Few at a time: the SDK computes on the event loop, where all episodes wait for each other.
@generate(actor, group=8, concurrency=32, timeout=600.0, tool_format="[]?", returns="reward")
async def agent(engine: Engine, prompt: str, answer: str, *, max_turns: int = 3) -> tuple[Trajectory, float]:
    tools = [function_tool(calculator, failure_error_function=failed)]
    async with engine.endpoint() as endpoint:
        model = OpenAIResponsesModel(endpoint.model, client_of(endpoint))
        asked, config = Agent("adder", tools=tools, model=model), RunConfig(tracing_disabled=True)
        try:
            said = (await Runner.run(asked, prompt, max_turns=max_turns, run_config=config)).final_output
        except AgentsException:  # the model wrote too much, or took too many turns
            said = None
    return endpoint.trajectory, float(said == answer)


@compute(per="sample", on="eval_agent")
def accuracy(completion: str, answer: str) -> float:
    return float(completion == answer)


recipe = Recipe(
    "openai_agents",
    data,
    [
        agent,
        use(nodes.group_advantage, on="agent"),
        use(nodes.actor_train, actor, on="agent", minibatches=2, prox="none"),
        use(agent, actor, name="eval_agent", data=heldout, group=1, every=10, temperature=0.0),
        accuracy,
    ],
)
