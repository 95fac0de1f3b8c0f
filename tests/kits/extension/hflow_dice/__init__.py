"""A package that adds an environment to hflow: a die, in any interpreter."""
