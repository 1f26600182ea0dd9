"""A delete on S3 asks for one object by ``DELETE``, which all servers have."""

from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest

from deltawire.store import open_bucket


class Deletes(BaseHTTPRequestHandler):
    """Knows ``DELETE`` only, and notes its path."""

    def do_DELETE(self):
        self.server.deleted.append(self.path)
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    with HTTPServer(("127.0.0.1", 0), Deletes) as at:
        at.deleted = []
        thread = Thread(target=at.serve_forever, args=(0.01,))
        thread.start()
        yield at
        at.shutdown()
        thread.join()


ACCESS = {"access_key_id": "k", "secret_access_key": "s", "region": "us-east-1"}


def test_a_delete_asks_for_one_object(server, monkeypatch):
    monkeypatch.setenv("AWS_DISABLE_BULK_DELETE", "")
    bucket = open_bucket("s3://b/run", endpoint=f"http://127.0.0.1:{server.server_port}", **ACCESS)
    bucket.delete("a/b")
    assert server.deleted == ["/b/run/a/b"]


def test_a_caller_may_choose_the_request_for_many():
    for options in ({"config": {"aws_disable_bulk_delete": False}}, {"disable_bulk_delete": False}):
        assert open_bucket("s3://b/run", **options, **ACCESS).url == "s3://b/run"
