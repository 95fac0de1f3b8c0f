"""An HTTP server with OpenAI's API in front of an engine.

- `EndpointServer` speaks HTTP: keys, routes, errors, streams. A `Responder` completes the requests of a key.
- `parse_chat` and `parse_text` read requests and refuse what no responder can do; `Reply` becomes JSON.
- `EpisodeEndpoint` is the responder of an episode: it turns requests into turns of trajectories.

`hflow.launch.checkpoints.serve` has another responder, for a checkpoint.
"""
