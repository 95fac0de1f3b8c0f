"""Using what runs saved: evaluate, export, serve."""
