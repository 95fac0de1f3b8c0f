"""Asynchronous GRPO on GSM8K: engines on devices of their own keep generating while the policy trains.

    hflow run recipes/gsm8k/grpo_async.py setup=qwen2.5-7b-8x80g

The recipe is that of `grpo.py`. The YAML gives three of eight devices to the engines and lets them run ahead
of training, so that samples are up to two weight syncs old.
"""

from grpo import recipe

__all__ = ["recipe"]
