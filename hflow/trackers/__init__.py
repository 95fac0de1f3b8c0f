"""Observers that log a run to a tracker, as the configuration asks."""
