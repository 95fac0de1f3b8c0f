"""GRPO of Qwen2.5-7B-Instruct on GSM8K, on eight GPUs of 80 GB.

    hflow run recipes/gsm8k/grpo_7b.py

The same as `grpo.py` with `setup=qwen2.5-7b-8x80g`. To keep settings of your own under a name, write two
files like this one and its YAML.
"""

from grpo import recipe

__all__ = ["recipe"]
