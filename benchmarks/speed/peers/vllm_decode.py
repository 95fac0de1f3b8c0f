"""Tokens a second of vLLM by itself on one model directory; each line of stdin is a number of sequences."""

from __future__ import annotations

import json
import os
import sys
import time

os.environ.update(
    HF_HUB_OFFLINE="1",
    VLLM_NO_USAGE_STATS="1",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    TORCHDYNAMO_DISABLE="1",
)
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")


GROUP = 8


def main(model: str, max_sequences: int, prompt_tokens: int, max_tokens: int) -> None:
    import torch
    from vllm import SamplingParams
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    args = EngineArgs(
        model,
        dtype="float32",
        max_model_len=512,
        enforce_eager=True,
        kv_cache_memory_bytes=256 << 20,
        disable_log_stats=True,
        skip_tokenizer_init=True,
        max_num_seqs=max_sequences,
        max_num_batched_tokens=16 * max_sequences,
        enable_chunked_prefill=False,  # with seeds, vLLM cannot divide prompts on a CPU
        logprobs_mode="processed_logprobs",
    )
    engine = LLMEngine.from_engine_args(args, enable_multiprocessing=False)
    print(json.dumps({"ready": True, "threads": torch.get_num_threads()}), flush=True)
    count = 0
    for line in sys.stdin:
        start = time.process_time()
        for sequence in range(int(line)):
            ids = [4 + (sequence // GROUP * 31 + i * 7) % 12 for i in range(prompt_tokens)]
            params = SamplingParams(
                max_tokens=max_tokens, ignore_eos=True, logprobs=0, detokenize=False, seed=count
            )
            engine.add_request(str(count), {"prompt_token_ids": ids}, params)
            count += 1
        tokens = 0
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    tokens += len(output.outputs[0].token_ids)
        seconds = time.process_time() - start
        print(json.dumps({"tokens_per_second": tokens / seconds, "tokens": tokens}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], *(int(a) for a in sys.argv[2:5]))
