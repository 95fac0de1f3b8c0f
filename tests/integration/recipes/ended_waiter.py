"""A collective that rank 1 does not join; the waiting process is aborted after a while, as NCCL does."""

from __future__ import annotations

import datetime
import os
import threading
import time

import torch.distributed as dist

from hflow import Dataset, Model, Output, PerToken, Recipe, Text, infer, nodes, use

data = Dataset("train", prompt=Text, answer=Text)
actor = Model("actor", trainable=True)


@infer(actor, returns="patient")
def patient(out: Output, *, seconds: float = 6.0) -> PerToken:
    """Wait in a group that does not time out, so that only the process's end ends the wait."""
    group = dist.new_group(timeout=datetime.timedelta(hours=1))
    if dist.get_rank() == 1:
        time.sleep(3600)  # the missing rank
    threading.Timer(seconds, os.abort).start()
    dist.barrier(group)
    return out.logprobs


recipe = Recipe("ended_waiter", data, [use(nodes.sft_view, actor), patient, use(nodes.sft_train, actor)])
