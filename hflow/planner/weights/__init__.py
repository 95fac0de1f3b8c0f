"""How weights move from training to generation: shards of tensors, routes, and the slices of each route."""
