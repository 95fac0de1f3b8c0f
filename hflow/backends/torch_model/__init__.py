"""Training and inference with HF models in torch: packed, sharded by FSDP2 over several ranks."""

from hflow.backends.torch_model.backend import TorchModel

__all__ = ["TorchModel"]
