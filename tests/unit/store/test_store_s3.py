"""S3 as people set it up: by the environment; and what its refusals become."""

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from deltawire.errors import DeltawireError, InputError, RetryError
from deltawire.store import open_bucket

VERBS = {
    "get": lambda bucket: bucket.get("k", limit=1),
    "put": lambda bucket: bucket.put("k", b""),
    "create": lambda bucket: bucket.create("k", b""),
    "exists": lambda bucket: bucket.exists("k"),
    "list": lambda bucket: bucket.list("k"),
    "delete": lambda bucket: bucket.delete("k"),
}


@pytest.fixture
def environment(s3_server, monkeypatch):
    """The server's variables, less its endpoint, and no others."""
    for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT", "AWS_ALLOW_HTTP"):
        monkeypatch.delenv(name, raising=False)
    for name, value in s3_server.environment.items():
        if name != "AWS_ENDPOINT_URL":
            monkeypatch.setenv(name, value)
    return monkeypatch


@pytest.mark.parametrize("name", ["AWS_ENDPOINT_URL", "AWS_ENDPOINT", "AWS_ENDPOINT_URL_S3"])
@pytest.mark.parametrize("scheme", ["s3", "s3a"])
def test_all_from_the_environment(s3_server, environment, name, scheme):
    environment.setenv(name, s3_server.endpoint)
    bucket = open_bucket(f"{scheme}://drills/from/{name}/{scheme}")
    assert bucket.create("a/b", b"1")
    assert not bucket.create("a/b", b"2")
    assert bucket.list("") == ["a/b"]
    assert not bucket.local
    whole = s3_server.open("s3://drills")
    assert whole.get(f"from/{name}/{scheme}/a/b", limit=1) == b"1"


def test_what_is_said_comes_before_the_environment(s3_server, environment):
    environment.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(RetryError):
        open_bucket("s3://drills/x", retry_config={"max_retries": 0}).put("k", b"")
    open_bucket("s3://drills/x", endpoint=s3_server.endpoint).put("k", b"")
    environment.setenv("AWS_ENDPOINT_URL_S3", s3_server.endpoint)
    open_bucket("s3://drills/x").put("k", b"")


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb != "exists"])
@pytest.mark.parametrize("server", ["s3_server", "moto_server"])
def test_a_bucket_that_is_not_there_is_no_missing_object(request, server, verb):
    """Else a reader of a misspelt bucket would wait for its first version for ever."""
    bucket = request.getfixturevalue(server).open("s3://drillz/run")
    with pytest.raises(InputError, match="no such bucket") as caught:
        VERBS[verb](bucket)
    assert caught.value.run == "s3://drillz/run"


def test_a_key_that_names_the_error_is_a_missing_object(new_bucket):
    assert new_bucket("s3").get("rollouts/NoSuchBucket/1", limit=1) is None


@pytest.fixture
def answering():
    """``answering(status, body)``: an endpoint that says the same to everybody."""
    servers = []

    def start(status, body=b""):
        class Handler(BaseHTTPRequestHandler):
            def answer(self):
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

            do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = answer

            def log_message(self, *_):
                pass

        server = HTTPServer(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        servers.append((server, thread))
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server, thread in servers:
        server.shutdown()
        thread.join()
        server.server_close()


def opened(server, endpoint):
    return server.open("s3://drills/run", endpoint=endpoint, retry_config={"max_retries": 0})


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize(
    ("status", "kind"), [(403, InputError), (401, InputError), (500, RetryError), (429, RetryError)]
)
def test_what_a_status_becomes(s3_server, answering, verb, status, kind):
    bucket = opened(s3_server, answering(status, b"<Error><Code>X</Code></Error>"))
    with pytest.raises(DeltawireError) as caught:
        VERBS[verb](bucket)
    assert type(caught.value) is kind
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("body", [b"", b"no xml", b"<?xml version='1.0'?><a>", b"\xff" * 2000])
def test_a_listing_that_is_none(s3_server, answering, body):
    """A captive portal's page, say: never taken for an empty bucket."""
    with pytest.raises(RetryError):
        opened(s3_server, answering(200, body)).list("a/")


def test_without_credentials_the_error_says_what_is_missing(environment, answering):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        environment.delenv(name)
    environment.setenv("AWS_METADATA_ENDPOINT", answering(404))
    bucket = open_bucket("s3://drills/run", retry_config={"max_retries": 0})
    with pytest.raises(DeltawireError, match="set AWS_ACCESS_KEY_ID") as caught:
        bucket.put("k", b"1")
    assert type(caught.value) is RetryError
