"""Credentials of a container (ECS, EKS): which variables the store's library reads, and that a
worker which removed its variables renews them."""

import json
import threading
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from deltawire.errors import RetryError
from deltawire.rl.rollout.hardening import CREDENTIALS
from deltawire.store import open_bucket


class _Provider(BaseHTTPRequestHandler):
    """The container's provider of credentials, which have expired when they arrive, and a store
    that takes any; the endpoint of instances refuses."""

    tokens: list[str | None] = []  # noqa: RUF012

    def do_GET(self):
        answer, status = b"hello", 200
        if self.path == "/credentials":
            self.tokens.append(self.headers.get("Authorization"))
            now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            found = {"AccessKeyId": "a", "SecretAccessKey": "s", "Token": "t", "Expiration": now}
            answer = json.dumps(found).encode()
        elif self.path.startswith("/latest/"):
            status = 403
        self.send_response(status)
        for name, value in (
            ("Content-Length", str(len(answer))),
            ("ETag", '"e"'),
            ("Last-Modified", "Wed, 21 Oct 2015 07:28:00 GMT"),
        ):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(answer)

    do_PUT = do_GET

    def log_message(self, *arguments):
        """Prints nothing."""


@pytest.fixture
def provider(monkeypatch):
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Provider)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    for name in CREDENTIALS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", url)
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", url)
    monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{url}/credentials")
    monkeypatch.setattr(_Provider, "tokens", [])
    yield _Provider
    server.shutdown()
    server.server_close()


def test_a_worker_renews_what_a_token_file_gives(provider, monkeypatch, tmp_path):
    token = tmp_path / "token"
    token.write_text("first")
    monkeypatch.setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", str(token))
    bucket = open_bucket("s3://bucket/run")
    assert bucket.get("key", limit=10) == b"hello"
    for name in CREDENTIALS:  # As `protect_credentials` removes them.
        monkeypatch.delenv(name, raising=False)
    token.write_text("second")
    assert bucket.get("key", limit=10) == b"hello"
    assert (provider.tokens[0], provider.tokens[-1]) == ("first", "second")


def test_the_library_does_not_read_a_token_from_its_variable(provider, monkeypatch):
    """Once it does, docs/STORES.md must say what a worker then loses."""
    monkeypatch.setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN", "secret")
    bucket = open_bucket("s3://bucket/run", retry_config={"max_retries": 0})
    with pytest.raises(RetryError, match="there are no credentials"):
        bucket.get("key", limit=10)
    assert provider.tokens == []
