"""How data moves between the nodes of a plan: rules, minibatches, moves, and an estimate of the traffic."""
