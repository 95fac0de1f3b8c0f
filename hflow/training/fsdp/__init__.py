"""The torch backend: training and inference with Hugging Face models, sharded by FSDP2 over ranks.

Importing this package does not import torch, as planning reads its descriptor.
"""
