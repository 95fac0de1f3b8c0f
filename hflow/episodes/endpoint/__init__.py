"""An HTTP server in front of an engine, with the APIs of OpenAI, Anthropic and vLLM.

- `EndpointServer` speaks HTTP: keys, routes, errors, streams. A `Responder` completes the requests of a key.
- A `Dialect` is one API: it reads requests, refuses what no responder can do, and writes replies.
- `EpisodeEndpoint` is the responder of an episode: it turns requests into turns of trajectories.

`hflow.launch.checkpoints.serve` has another responder, for a checkpoint.
"""
