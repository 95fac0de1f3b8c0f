"""The planner: from a graph and a request to a plan, which decides all that a run does."""
