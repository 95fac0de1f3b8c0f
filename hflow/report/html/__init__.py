"""Pages that commands write: of a plan, and of a run."""
