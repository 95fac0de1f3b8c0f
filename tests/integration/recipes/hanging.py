"""Nodes whose ranks do not come together. Rank 1 is at fault; the two ranks are those of data parallelism."""

from __future__ import annotations

import time

import torch.distributed as dist

from hflow import Dataset, Model, Output, PerToken, Recipe, Text, infer, nodes, use

data = Dataset("train", prompt=Text, answer=Text)
actor = Model("actor", trainable=True)


@infer(actor, returns="slept")
def sleeps(out: Output) -> PerToken:
    if dist.get_rank() == 1:
        time.sleep(3600)  # the missing rank
    return together(out.logprobs)


@infer(actor, returns="late")
def slow(out: Output, *, seconds: float = 9.0) -> PerToken:
    time.sleep(seconds)
    return together(out.logprobs)


@infer(actor, returns="disagreed")
def disagrees(out: Output) -> PerToken:
    if dist.get_rank() == 1:
        dist.recv(out.logprobs.clone(), src=0)
    return together(out.logprobs)


def together(values: PerToken) -> PerToken:
    dist.all_reduce(values.sum())
    return values


recipe = Recipe(
    "hanging",
    data,
    [use(nodes.sft_view, actor), sleeps, slow, disagrees, use(nodes.sft_train, actor)],
)
