"""An engine that is a real process but no model: health, version, and what the arguments ask of it.

python -m tests.fake_server [--die-at-start] [--never-healthy] [--spawn] ... --port N
"""

import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        healthy = self.path != "/health" or "--never-healthy" not in sys.argv
        body = b'{"version": "9.9"}'
        self.send_response(200 if healthy else 503)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class names it
        return


if __name__ == "__main__":
    if "--die-at-start" in sys.argv:
        sys.exit("RuntimeError: no memory for the cache")
    if "--spawn" in sys.argv:  # like vLLM, whose engine core is a child
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        print(f"child {child.pid}", flush=True)
    if "--deaf" in sys.argv:
        import signal

        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    port = int(sys.argv[sys.argv.index("--port") + 1])
    server = HTTPServer(("127.0.0.1", port), Handler)
    server.serve_forever()
    time.sleep(0)
