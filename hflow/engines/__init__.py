"""Generation engines, behind `interface`: `embedded` and `vllm`. `driver` runs one on a thread of its own."""
