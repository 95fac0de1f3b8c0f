"""SmolVLM."""
