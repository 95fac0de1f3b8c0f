"""From a recipe and a configuration to a plan."""
