"""An agent that calls a calculator in a sandbox, and an environment that allows a second attempt.

    hflow run recipes/tool_agent.py

The agent writes a call such as `[17+25]`. The calculator runs in a process without network access, and its
result is added to the conversation. Only the tokens that the agent wrote are trained; the tokens of tools
are masked. The environment, which belongs to the episode and is restored with it, grades the final answer.
It replies `?` to a wrong one, and a right second attempt gets half of the reward. Starts from the checkpoint
of `recipes/tool_sft.py`. Expect the sampled reward to rise from 0.42 to 0.63 in 60 steps; greedy answers are
at 0.97 from the start, and then at 0.99.
"""

from hflow import Dataset, Engine, Model, Recipe, Text, Trajectory, compute, generate, nodes, sandbox, use

data = Dataset("train", prompt=Text, answer=Text)
heldout = Dataset("heldout", prompt=Text, answer=Text)
actor = Model("actor", trainable=True)


@sandbox(timeout=2.0, memory_mb=128)
def calculator(expression: str) -> str:
    """Add numbers, as in 17+25."""
    return str(sum(int(number) for number in expression.split("+")))


class Exam:
    """Grades replies: a right second attempt gets half of the reward."""

    def __init__(self, answer: str) -> None:
        self._answer, self._num_tries = answer, 0

    async def grade(self, reply: str) -> float:
        """Return the reward of a reply."""
        self._num_tries += 1
        return float(reply == self._answer) / self._num_tries


@generate(actor, group=8, timeout=60.0, tool_format="[]?", returns=("num_calls", "reward"))
async def agent(
    engine: Engine, prompt: str, answer: str, *, max_calls: int = 2, max_tries: int = 2
) -> tuple[Trajectory, int, float]:
    exam = await engine.environment(Exam, answer=answer)
    talk, num_calls = await engine.complete(prompt, tools=[calculator]), 0
    for num_tries in range(1, max_tries + 1):
        while talk.tool_calls and num_calls < max_calls:
            result = await engine.call(calculator, **talk.tool_calls[0].arguments)
            talk, num_calls = await engine.complete(talk.add("tool", f"{result[:8]}=")), num_calls + 1
        reward: float = await engine.call(exam.grade, reply=talk.completion)
        if reward:
            return talk, num_calls, reward
        if num_tries < max_tries:
            talk = await engine.complete(talk.add("user", "?"))
    return talk, num_calls, 0.0


@compute(per="sample", on="eval_agent")
def accuracy(completion: str, answer: str) -> float:
    return float(completion == answer)


recipe = Recipe(
    "tool_agent",
    data,
    [
        agent,
        use(nodes.group_advantage, on="agent"),
        use(nodes.actor_train, actor, on="agent", minibatches=2, prox="none"),
        use(agent, actor, name="eval_agent", data=heldout, group=1, every=20, temperature=0.0, max_tries=1),
        accuracy,
    ],
)
