"""The vLLM generation engine. It can be planned but not run yet."""
