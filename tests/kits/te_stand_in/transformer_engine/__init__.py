"""A stand-in for Transformer Engine, which needs CUDA: megatron's wrappers of it run on CPUs in tests.

It is NOT Transformer Engine and has none of its kernels. It has the modules that megatron-core 0.16.1 derives
its layers from, with the arguments that it passes, the parameters and attributes that they have there, and
the collectives of tensor and sequence parallelism, computed by torch. Arguments and attributes are those in
the sources of Transformer Engine 2.9.0 and 2.11.0. In FP8 it rounds inputs, weights and gradients to torch's
dtypes with the recipe's scales, refuses what the package refuses of sizes, and multiplies in fp32. Fused
optimizers are left out, so that megatron uses its own functions of torch for gradient norms.

A process uses it if this file's grandparent directory is in `sys.path` before megatron is imported.
"""

from transformer_engine import common, pytorch

__all__ = ["common", "pytorch"]
__version__ = "2.10.0"
