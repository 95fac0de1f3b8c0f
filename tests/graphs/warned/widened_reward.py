# expect: reinforce(reward): 'reward' is repeated on every token. To reward the last token only, use
from hflow import Dataset, Model, Output, PerToken, Recipe, Text, compute, nodes, train, use

data = Dataset(prompt=Text, answer=Text)
actor = Model("actor", trainable=True)


@compute(per="sample", returns="reward")
def score(completion: str, answer: str) -> float:
    return float(completion == answer)


@train(actor, reduce="token-mean")
def reinforce(out: Output, reward: PerToken) -> PerToken:
    return -out.logprobs * reward


recipe = Recipe("warned", data, [use(nodes.actor_gen, actor), score, reinforce])
