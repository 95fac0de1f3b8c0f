"""How often Muon iterates."""

NUM_ITERATIONS = 5
"""Newton-Schulz iterations of a step, each with three products."""
