"""A server with OpenAI's chat completions API that grades additions: a stand-in for a judge.

    python recipes/custom/judge_server.py --port 8000

It looks for a sum such as `07+45=052` at the end of the last message. It replies 10 if the sum is right,
else 0.
"""

import argparse
import json
import re
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def grade(question: str) -> str:
    """Return the judge's reply to a question."""
    match = re.search(r"(\d+)\+(\d+)=(\d+)\s*$", question)
    is_right = match is not None and int(match[1]) + int(match[2]) == int(match[3]) and len(match[3]) == 3
    return "10" if is_right else "0"


class Handler(BaseHTTPRequestHandler):
    """Answers `POST /v1/chat/completions`."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        """Reply to the last message."""
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path != "/v1/chat/completions":
            self.send_error(404)
            return
        self.reply(self.grade(request["messages"][-1]["content"]), request["model"])

    def grade(self, question: str) -> str:
        """Return the reply to a question. Tests override it."""
        return grade(question)

    def reply(self, text: str, model: str) -> None:
        """Send one completion."""
        message = {"role": "assistant", "content": text}
        choices = [{"index": 0, "message": message, "finish_reason": "stop"}]
        payload = json.dumps({"object": "chat.completion", "model": model, "choices": choices}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def log_message(self, *_: object) -> None:
        """Write no log of requests."""


class JudgeServer(ThreadingHTTPServer):
    """A server with one thread per connection."""

    request_queue_size = 512
    daemon_threads = True


def main() -> None:
    """Serve until interrupted."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=8000)
    port = parser.parse_args().port
    with JudgeServer(("127.0.0.1", port), Handler) as server:
        sys.stdout.write(f"judging at http://127.0.0.1:{port}/v1\n")
        sys.stdout.flush()
        server.serve_forever()


if __name__ == "__main__":
    main()
