# expect: centred: it combines a group's sequences (group, group_sum), so an episode would count once for each
from hflow import (
    Dataset,
    Engine,
    Model,
    Output,
    PerSequence,
    PerToken,
    Recipe,
    Sequences,
    Text,
    Trajectory,
    compute,
    generate,
    train,
)

data = Dataset(prompt=Text, answer=Text)
actor = Model("actor", trainable=True)


@generate(actor, group=4)
async def agent(engine: Engine, prompt: str) -> list[Trajectory]:
    return [await engine.complete(prompt)]


@compute(per="sample")
def reward(completion: str) -> float:
    return 1.0


def mean_of_group(x: PerSequence, seqs: Sequences) -> PerSequence:
    return (seqs.group_sum(x) / seqs.group_count())[seqs.group]


@train(actor, reduce="token-mean")
def centred(out: Output, reward: PerSequence, seqs: Sequences) -> PerToken:
    return -out.logprobs * seqs.widen(reward - mean_of_group(reward, seqs))


recipe = Recipe("broken", data, [agent, reward, centred])
