"""How a worker generates: engines draw tokens, episodes run bodies that ask engines for them.

One sample is one *episode*: one call of a generate node's body, from its first token to its last.

- `EngineManager` gives the worker's engines new weights, and wakes and sleeps them.
- `EngineDriver` (`engines/`) drives one engine on a thread, and answers the requests of all episodes. It also
  resumes requests that an interruption of the engine left unfinished, so that episodes do not notice it.
- `EpisodeLoop` holds the event loop of all episodes: it starts, retries, cancels and detaches them.
- `GenerateRunner` runs the episodes of one node: it calls the body and stores what it returns.
- `EpisodeEngine` (`episodes/`) is the `Engine` that a body receives. It encodes prompts and builds
  trajectories.
- `RecordedEffects` performs everything that an episode does to the outside (completions, calls of tools,
  random numbers, times) and records it in the episode's journal. `Sandboxes` (`sandboxes/`) run sandboxed
  tools.
- `Journal` is the record of an episode's effects and their outcomes. An episode that starts with a journal is
  replayed: its body runs from the beginning, and effects that are in the journal return the recorded outcome
  without being performed again; a completion that was cut off continues behind its recorded tokens.

An episode is replayed from its journal when it is retried after a failure, and when it moves: while the
engines are interrupted, `EpisodeLoop.detach_groups` stops episodes and returns their journals, with which
another worker continues them.
"""
