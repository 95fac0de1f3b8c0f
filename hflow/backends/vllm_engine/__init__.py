"""The vLLM generation engine. vLLM runs in a process of its own, a child of the worker.

`engine` is the worker's side, and `engine_process` starts and ends the child. The child runs `process`, which
steps vLLM (`stepper`). vLLM imports `rank` in each of its tensor ranks, which receives weights; `hf_mapping`
finds their place. Only `stepper`, `rank` and `hf_mapping` import vLLM.
"""
