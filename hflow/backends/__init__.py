"""Training backends and generation engines.

`interface` defines what they implement. `common` has the parts that training backends share; `torch_model`
and `megatron` are training backends, `embedded_engine` and `vllm_engine` are generation engines.
`packed_attention`, `hf_config`, `device` and `generation_request` are used by several of them.
"""
