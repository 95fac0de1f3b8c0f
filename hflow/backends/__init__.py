"""Training backends and generation engines.

`interface` defines what they implement. `common` has the parts that training backends share; `torch_model`
and `megatron` are training backends, and `embedded_engine` is a generation engine. `packed_attention`,
`hf_config` and `device` are used by all of them. `vllm_engine` has only a descriptor: it can be planned but
not run yet.
"""
