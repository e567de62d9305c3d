"""A Hub on loopback that the real huggingface_hub client can upload to and download from.

    with Hub() as hub:
        HfApi(endpoint=hub.url, token=hub.TOKEN).create_repo("org/name")

It never keeps a login: requests are recorded as method, path, body and whether the right one came.
"""

import contextlib
import json
import re
import socket
import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from tests.hub_protocol import Request, State, route


@dataclass(frozen=True, kw_only=True)
class Seen:
    """A request, without its login."""

    method: str
    path: str
    authorised: bool
    body: bytes


@dataclass(kw_only=True)
class Failure:
    """Answer the next `times` requests whose `METHOD path` matches with this status; 0 drops the connection."""

    match: str
    status: int
    times: int
    headers: dict[str, str]
    after: bool
    """do what was asked first, so that only the answer is lost"""
    cut: int
    """drop the connection when so many bytes of the body have come; 0 = read it whole"""


class Hub:
    """The server; use as a context manager."""

    TOKEN = "hf_" + "tEsToNlY" * 4

    def __init__(self, *, chunk_bytes: int = 0) -> None:
        self.seen: list[Seen] = []
        self.failures: list[Failure] = []
        self.connections: list[socket.socket] = []
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (_Handler,), {"hub": self}))
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.state = State(url=self.url, chunk_bytes=chunk_bytes)

    def __enter__(self) -> "Hub":
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()
        for connection in self.connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def fail(
        self, match: str, status: int, times: int = 1, *, after: bool = False, cut: int = 0, **headers: str
    ) -> None:
        """Make the next `times` requests that match the pattern (`METHOD /path`) fail; for `cut`, see Failure."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        self.failures.append(Failure(match=match, status=status, times=times, headers=named, after=after, cut=cut))


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # one packet an answer, or each waits for the other side's delayed acknowledgement
    disable_nagle_algorithm = True

    def setup(self) -> None:
        """Remember the connection, so that closing the Hub closes it too."""
        super().setup()
        self.hub.connections.append(self.connection)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
        """Quiet."""

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def do_PUT(self) -> None:
        self._answer()

    def do_DELETE(self) -> None:
        self._answer()

    def _answer(self) -> None:
        split = urlsplit(self.path)
        path = unquote(split.path)
        line = f"{self.command} {path}"
        failure = self._failure(line)
        body = self.rfile.read(failure.cut) if failure and failure.cut else self._read()
        authorised = self.headers.get("authorization") == f"Bearer {Hub.TOKEN}"
        self.hub.seen.append(Seen(method=self.command, path=path, authorised=authorised, body=body))
        if failure and not failure.after:
            self._fail(failure)
            return
        # LFS hrefs carry their own right to write, as the Hub's signed URLs do
        if not authorised and not path.startswith("/lfs/"):
            self._send(401, {"error": "login"}, {"X-Error-Message": "Invalid credentials in Authorization header"})
            return
        answer = route(self.hub.state, Request(body=body, query=parse_qs(split.query)), line)
        if failure:
            self._fail(failure)
        else:
            self._send(*answer)

    def _read(self) -> bytes:
        if self.headers.get("transfer-encoding", "").lower() == "chunked":
            data = b""
            while size := int(self.rfile.readline().strip() or b"0", 16):
                data += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return data
        return self.rfile.read(int(self.headers.get("content-length") or 0))

    def _failure(self, request: str) -> Failure | None:
        for failure in self.hub.failures:
            if failure.times > 0 and re.search(failure.match, request):
                failure.times -= 1
                return failure
        return None

    def _fail(self, failure: Failure) -> None:
        if failure.status:
            self._send(failure.status, {"error": f"told to fail with {failure.status}"}, failure.headers)
        else:
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)

    def _send(self, status: int, data: Any, headers: dict[str, str]) -> None:
        body = data if isinstance(data, bytes) else json.dumps(data).encode()
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **headers}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
