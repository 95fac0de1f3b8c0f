"""The vLLM generation engine, and vLLM's server. vLLM runs in processes of its own, children of the worker.

`engine` is the worker's side of an engine, and `engine_process` calls its process, which runs `engine_main`.
That steps vLLM (`stepper`). `api_server` is the side of `hflow serve`; its process runs `api_server_main`.
`child_process` starts and ends both kinds, and `launch_options` says what vLLM is started with. vLLM imports
`rank` in each of its tensor ranks, which receives weights; `hf_mapping` finds their place. Only `stepper`,
`rank`, `hf_mapping` and `api_server_main` import vLLM.
"""
