"""The passes that make a plan of a graph and a request."""
