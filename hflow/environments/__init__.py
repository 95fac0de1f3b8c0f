"""Environments that were written outside hflow, each in a process with an interpreter of its own.

    episode ── Session ══ socket ══ process of the episode ── the environment
                               Host ── server ──┘

- `interface.py` has what an adapter declares, and the registry of adapters. Each adapter is a folder, with
  the node that recipes use, and `remote.py`, which runs in the other interpreter.
- `host.py` is the server in the other interpreter. It imports the package once, and serves each episode in
  a process that it forks, or all in its own.
- `client.py` starts servers and sends requests; `interpreters.py` finds or makes the interpreter.
"""
