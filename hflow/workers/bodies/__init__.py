"""How a worker runs the bodies of nodes.

- `EncodeRunner`: encode bodies, on one thread.
- `ComputeRunner`: compute bodies that are called per sample or per group, in the processes of a `Pool`.
- `BatchNodeRunner`: nodes that are called on a whole batch: infer, train, update, and compute on batches.

Generate bodies are run by `hflow.workers.generation`.
"""
