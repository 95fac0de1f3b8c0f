# expect: kl(view_logprobs): 'view_logprobs' belongs to the tokens of stream 'view', but the node works on
from hflow import (
    Dataset,
    Model,
    Output,
    PerToken,
    Recipe,
    Text,
    Tokenizer,
    Trajectory,
    compute,
    encode,
    infer,
    nodes,
    use,
)

data = Dataset(prompt=Text, answer=Text)
actor = Model("actor", trainable=True)


@encode(actor)
def view(tokenizer: Tokenizer, messages: list[dict]) -> Trajectory:
    return tokenizer.chat(messages)


@infer(actor, on="view")
def view_logprobs(out: Output) -> PerToken:
    return out.logprobs


@compute()
def kl(view_logprobs: PerToken, behav_logprobs: PerToken) -> PerToken:
    return behav_logprobs - view_logprobs


recipe = Recipe("broken", data, [use(nodes.actor_gen, actor), view, view_logprobs, kl])
