"""Tensor, pipeline and data parallelism by megatron-core, on HF weights and packed sequences.

megatron-core knows CUDA only. `device.prepare` makes this process ready for it, on the CPU by the shim
in `shim.py`, and must run before any other module of this package is imported: they import megatron.
"""
