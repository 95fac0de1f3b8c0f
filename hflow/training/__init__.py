"""Training backends, behind `interface`: `fsdp` and `megatron`. `loop` is what they share."""
