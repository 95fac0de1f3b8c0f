"""Optimizers, and what the optimizers of all training backends share."""
