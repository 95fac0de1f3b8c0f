"""One moment of a run on disk."""
