"""The process of `VllmApiServer`: vLLM's server, ended by the process that started it, or with it.

    python -m hflow.engines.vllm.api_server_main FD --model PATH ...

FD is a socket whose other end the parent holds open for as long as the server shall run.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading


def _end_with_parent(connection: socket.socket) -> None:
    """Ask this process to end when the other end of the connection is closed."""
    connection.recv(1)
    os.kill(os.getpid(), signal.SIGTERM)


def main() -> None:
    """Run vLLM's server with the arguments behind FD."""
    connection = socket.socket(fileno=int(sys.argv.pop(1)))
    threading.Thread(target=_end_with_parent, args=(connection,), daemon=True).start()
    # Not vLLM's command line, which fails in the build for CPUs, as its distribution has another name.
    from vllm.entrypoints.launchers.api_server.entry import main as run_server

    run_server()


if __name__ == "__main__":
    main()
