"""Images of samples: reading them, and preparing them for a model."""
