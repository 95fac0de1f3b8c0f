"""Training and inference with Hugging Face models in torch: packed, sharded by FSDP2 over several ranks.

Importing this package does not import torch, as planning reads its descriptor.
"""
