"""A chat model over real HTTP that answers as a test wants, and notes what it was asked and when."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = str | int | tuple[int, dict[str, str]] | float
"""The text of a reply; a status, with headers or without; or seconds before the usual reply."""
USAGE = {"prompt_tokens": 100, "completion_tokens": 20, "total_tokens": 120}


class ChatStub:
    """An OpenAI-compatible chat endpoint.

    Args:
        reply: makes the usual answer from the messages of a request.

    Attributes:
        first: answers to give before it.
        requests: the body of each request.
        times: monotonic times of requests.
        most_open: the most requests under way at once.
        usage: the `usage` of each reply; None leaves it out.
    """

    def __init__(self, reply: Callable[[list[dict[str, Any]]], Answer]) -> None:
        self.reply = reply
        self.first: list[Answer] = []
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.times: list[float] = []
        self.most_open = self._num_open = 0
        self.usage: dict[str, int] | None = USAGE
        self._lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with outer.open_request(body, dict(self.headers)) as answer:
                    if isinstance(answer, float):
                        time.sleep(answer)
                        answer = outer.reply(body["messages"])
                    status, headers, text = 200, dict[str, str](), ""
                    if isinstance(answer, str):
                        reply = {"choices": [{"message": {"role": "assistant", "content": answer}}]}
                        text = json.dumps(reply | ({"usage": outer.usage} if outer.usage else {}))
                    elif isinstance(answer, tuple):
                        status, headers = answer
                    else:
                        status = int(answer)
                    self.send_response(status)
                    for name, value in {**headers, "Content-Length": str(len(text.encode()))}.items():
                        self.send_header(name, value)
                    self.end_headers()
                    self.wfile.write(text.encode())

            def log_message(self, *_: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            request_queue_size = 512
            daemon_threads = True

        self._server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"

    @contextmanager
    def open_request(self, body: dict[str, Any], headers: dict[str, str]) -> Iterator[Answer]:
        with self._lock:
            self.requests.append(body)
            self.headers.append(headers)
            self.times.append(time.monotonic())
            self._num_open += 1
            self.most_open = max(self.most_open, self._num_open)
            answer = self.first.pop(0) if self.first else self.reply(body["messages"])
        try:
            yield answer
        finally:
            with self._lock:
                self._num_open -= 1

    def __enter__(self) -> ChatStub:
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
