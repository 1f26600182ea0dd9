"""A server that follows a run as ``vllm serve`` with deltawire's plugin does, as far as its HTTP
calls show: health, models, and deltawire's methods. It holds real weights and digests them."""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from deltawire.store import open_bucket
from deltawire.sync import Subscriber, load_mirror, newest_version, read_run


class FollowingServer:
    """Use it as a context. ``unhealthy_until_run``: like vLLM, it answers once it has the run."""

    def __init__(self, run: str, *, follows: bool = True) -> None:
        self.run = run
        self.follows = follows
        self.failure = ""
        self.wrong_digest = False
        self.wanted = -1
        self.health_asked: list[int] = []
        """The newest version in the bucket at each question for its health, -1 without a run."""
        self.served: list[int] = []
        self.mirror: Any = None
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._follower = threading.Thread(target=self._follow, name="following")
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._listener = threading.Thread(target=self._http.serve_forever, name="listening")
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"

    def __enter__(self) -> FollowingServer:
        self._follower.start()
        self._listener.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._http.shutdown()
        self._http.server_close()
        self._follower.join()
        self._listener.join()

    def status(self) -> dict[str, Any]:
        with self._lock:
            mirror = self.mirror
            digest = "" if mirror is None else mirror.compute_held().hex()
            return {
                "version": -1 if mirror is None else mirror.version,
                "phase": "serving",
                "failure": self.failure,
                "digest": "0" * 32 if self.wrong_digest else digest,
            }

    def _follow(self) -> None:
        subscriber = None
        while not self._ended.is_set():
            time.sleep(0.02)
            if subscriber is None:
                try:
                    bucket = open_bucket(self.run)
                except Exception:
                    continue
                if newest_version(bucket) is None:
                    continue
                run = read_run(bucket)
                mirror = load_mirror(bucket, run)
                subscriber = Subscriber(bucket, run, mirror)
                with self._lock:
                    self.mirror = mirror
                    self.served.append(mirror.version)
            if self.failure or not (self.follows or self.wanted > self.mirror.version):
                continue
            update = subscriber.prepare()
            if update is not None:
                with self._lock:
                    subscriber.commit(update)
                    self.served.append(update.version)


def _handler(server: FollowingServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

        def _answer(self, status: int, body: Any = None) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self) -> None:
            if self.path == "/health":
                version = server.status()["version"]
                server.health_asked.append(version)
                self._answer(200 if version >= 0 else 503)
            elif self.path == "/v1/models":
                self._answer(200, {"data": [{"id": "policy", "max_model_len": 64}]})
            else:
                self._answer(404)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or b"{}")
            if self.path != "/collective_rpc":
                self._answer(404)
                return
            if body["method"] == "deltawire_want":
                server.wanted = int(body["args"][0])
            self._answer(200, {"results": [server.status()]})

    return Handler
