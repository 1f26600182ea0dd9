"""A server with vLLM's ``/collective_rpc`` in front of an engine of the tests."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import msgspec


class Server:
    """Serves an engine's ``/collective_rpc`` on a free port, for those who send ``token``."""

    def __init__(self, engine, token=""):
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                asked = msgspec.json.decode(body)
                allowed = self.headers.get("Authorization", "") == (token and f"Bearer {token}")
                known = self.path == "/collective_rpc"
                self.send_response((200 if allowed else 401) if known else 404)
                self.end_headers()
                if known and allowed:
                    found = engine.collective_rpc(asked["method"], args=asked["args"])
                    self.wfile.write(msgspec.json.encode({"results": found}))

            def log_message(self, *_):
                pass

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"127.0.0.1:{self._server.server_port}"
        self.url = f"http://{self.address}"
        run = {"poll_interval": 0.01}
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs=run)
        self._thread.start()

    def close(self):
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
