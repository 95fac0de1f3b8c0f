"""The sizes of models and of their replicas: `ModelShape`, read from a configuration, and `Layout`."""
