"""The vLLM generation engine, and vLLM's server. vLLM runs in processes of its own, children of the worker.

`engine` is an engine (`engines/process/`), whose process steps vLLM by `stepper`. `api_server` is the side of
`hflow serve`; its process runs `api_server_main`. `launch_options` says what vLLM is started with. Each
tensor rank of vLLM imports `rank`, which receives weights; `hf_mapping` finds their place. Only `stepper`,
`rank`, `hf_mapping` and `api_server_main` import vLLM.
"""
