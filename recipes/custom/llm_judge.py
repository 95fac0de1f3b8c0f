"""GRPO with a language model as the judge, by a body that calls a service.

    python recipes/custom/judge_server.py &
    hflow run recipes/custom/llm_judge.py

The body of `judge` asks an endpoint with OpenAI's chat completions API about a sample, and reads the first
number of the reply, from 0 to `best`, as a score from 0 to 1. The endpoint is the service `judge` of the
configuration, with its limits, further attempts and budget (docs/rewards.md). If it stays unreachable, or the
reply has no number, the sample is refused with this reason. The server above is a stand-in; to use another
endpoint, set `services.judge.url=https://... services.judge.model=NAME` and
`services.judge.key_variable=OPENAI_API_KEY`. Expect the held-out accuracy to rise from 0.52 to about 0.80 in
28 steps. `rewards.rubric` is a ready judge with several criteria.
"""

import re

from hflow import Dataset, Model, Recipe, Service, Text, compute, nodes, use

data = Dataset("train", prompt=Text, answer=Text)
heldout = Dataset("heldout", prompt=Text, answer=Text)
actor = Model("actor", trainable=True)


def read_score(reply: str, best: float) -> float:
    """Return the first number of a reply divided by the best grade, clamped to [0, 1]."""
    match = re.search(r"-?\d+(\.\d+)?", reply)
    if match is None:
        raise ValueError(f"the judge's reply has no number: {reply!r:.80}")
    return min(max(float(match.group()) / best, 0.0), 1.0)


@compute(per="sample", returns="reward")
async def judge(prompt: str, completion: str, *, service: str = "judge", best: float = 10.0) -> float:
    question = f"Is this sum right? Grade it with 10 or 0, and say the number only.\n{prompt}{completion}"
    return read_score(await Service(service).chat(question, temperature=0.0), best)


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
