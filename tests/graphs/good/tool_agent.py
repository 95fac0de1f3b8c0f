"""An agent with a calculator; reward = reward model + LLM judge."""

import httpx

from hflow import (
    Dataset,
    Engine,
    Model,
    Output,
    PerSequence,
    Recipe,
    Text,
    Tokenizer,
    Trajectory,
    compute,
    encode,
    generate,
    infer,
    nodes,
    sandbox,
    use,
)

data = Dataset(prompt=Text, answer=Text)
actor = Model("actor", trainable=True)
rm = Model("rm", head="score")


@sandbox(timeout=2.0, memory_mb=256)
def calculator(expression: str) -> str:
    return str(eval(expression, {"__builtins__": {}}))


@generate(actor, group=8, timeout=300.0, returns="num_calls")
async def agent(engine: Engine, prompt: str, *, max_calls: int = 6) -> tuple[Trajectory, int]:
    talk, num_calls = await engine.complete(prompt, tools=[calculator]), 0
    while talk.tool_calls and num_calls < max_calls:
        result = await engine.call(calculator, **talk.tool_calls[0].arguments)
        talk, num_calls = await engine.complete(talk.add("tool", result)), num_calls + 1
    return talk, num_calls


@encode(rm)
def rm_view(tokenizer: Tokenizer, messages: list[dict]) -> Trajectory:
    return tokenizer.chat(messages)


@infer(rm, on="rm_view", per="group", returns="rm_score")
def rew_inf(out: Output) -> PerSequence:
    return out.scores


@compute(per="sample", on="agent", timeout=30.0, retries=2, concurrency=64, returns="judge_score")
async def judge(
    prompt: str, completion: str, answer: str, *, url: str = "http://127.0.0.1:8000/judge"
) -> float:
    async with httpx.AsyncClient() as client:
        reply = await client.post(url, json={"prompt": prompt, "completion": completion, "answer": answer})
    return float(reply.raise_for_status().json()["score"])


@compute(per="sample", on="agent", returns="reward")
def total(
    rm_score: float, judge_score: float, num_calls: int, *, judge_weight: float = 0.5, call_cost: float = 0.01
) -> float:
    return rm_score + judge_weight * judge_score - call_cost * num_calls


@compute(per="group", on="agent", returns="keep")
def has_spread(reward: list[float]) -> bool:
    return max(reward) > min(reward)


recipe = Recipe(
    "tool_agent",
    data,
    [
        agent,
        rm_view,
        rew_inf,
        judge,
        total,
        has_spread,
        use(nodes.group_advantage, on="agent"),
        use(nodes.actor_train, actor, on="agent", minibatches=2, clip=0.2),
    ],
)
