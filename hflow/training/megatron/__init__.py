"""The megatron backend: data, tensor and pipeline parallelism by megatron-core, on HF weights.

megatron-core supports CUDA only. `device.prepare` makes it importable on this process's device, with
`cpu_shim` for the CPU. Call it before importing any other module of this package, as they import megatron.
"""
