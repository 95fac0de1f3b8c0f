"""A small generation engine over a Hugging Face decoder: KV cache and continuous batching.

Importing this package does not import torch, as planning reads its descriptor.
"""
