"""A loopback server that answers /v1/chat/completions with token ids, remembers what it was asked, and fails on demand.

It stands in for an engine where a test is about our side: ledger, retries, kills. Engines are tested
for real elsewhere.
"""

import hashlib
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.tiny import tokenizer


@dataclass
class Fake:
    """The server's settings and memory."""

    url: str = ""
    asked: list[str] = field(default_factory=list)
    """canonical JSON of each request's messages that was answered with 200"""
    failures: list[int] = field(default_factory=list)
    """HTTP codes to give first, one a request"""
    length: int = 24
    delay_s: float = 0.0
    without_ids: bool = False


@contextmanager
def openai_server(**settings: Any) -> Iterator[Fake]:
    fake, tok, lock = Fake(**settings), tokenizer(), threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._send(200, {"data": [{"id": "target"}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                failing = fake.failures.pop(0) if fake.failures else 0
            if failing:
                return self._send(failing, {"error": "as told"})
            time.sleep(fake.delay_s)
            with lock:
                fake.asked.append(json.dumps(body["messages"], sort_keys=True))
            return self._send(200, reply(body))

        def _send(self, code: int, value: Any) -> None:
            data = json.dumps(value).encode()
            self.send_response(code)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class names it
            return

    def reply(body: dict[str, Any]) -> dict[str, Any]:
        rendered = tok.apply_chat_template(body["messages"], tokenize=False, add_generation_prompt=True)
        prompt_ids = tok(rendered, add_special_tokens=False).input_ids
        seed = hashlib.sha256(rendered.encode()).digest()
        output = [40 + seed[i % 32] % 200 for i in range(min(fake.length, body["max_tokens"]))]
        finish = "length"
        if seed[0] % 2:
            output[-1], finish = 2, "stop"
        text = tok.decode(output, skip_special_tokens=True)
        return {
            "prompt_token_ids": None if fake.without_ids else prompt_ids,
            "choices": [{"token_ids": output, "finish_reason": finish, "message": {"content": text}}],
        }

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    fake.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield fake
    finally:
        server.shutdown()
        server.server_close()
