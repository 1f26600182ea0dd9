"""S3: configuration by the environment, and the translation of its errors."""

import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace

import pytest

from deltawire.errors import (
    CorruptError,
    DeltawireError,
    InputError,
    RetryError,
    ThrottledError,
)
from deltawire.store import Bucket, check_create_if_absent, open_bare_bucket
from deltawire.store.aws_profile import read_profile
from deltawire.testing.proxy import FaultyProxy
from deltawire.testing.tiny import start_publisher

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
    monkeypatch.setenv("AWS_CONFIG_FILE", "/none")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/none")
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
    bucket = open_bare_bucket(f"{scheme}://drills/from/{name}/{scheme}")
    assert bucket.create("a/b", b"1")
    assert not bucket.create("a/b", b"2")
    assert bucket.list("") == ["a/b"]
    assert not bucket.local
    whole = s3_server.open_bare("s3://drills")
    assert whole.get(f"from/{name}/{scheme}/a/b", limit=1) == b"1"


def test_options_come_before_the_environment(s3_server, environment):
    environment.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(RetryError):
        open_bare_bucket("s3://drills/x", retry_config={"max_retries": 0}).put("k", b"")
    open_bare_bucket("s3://drills/x", endpoint=s3_server.endpoint).put("k", b"")
    environment.setenv("AWS_ENDPOINT_URL_S3", s3_server.endpoint)
    open_bare_bucket("s3://drills/x").put("k", b"")


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb != "exists"])
@pytest.mark.parametrize("server", ["s3_server", "moto_server"])
def test_a_missing_bucket_is_not_a_missing_object(request, server, verb):
    """Otherwise a reader of a misspelled bucket would wait forever for its first version."""
    bucket = request.getfixturevalue(server).open("s3://drillz/run")
    with pytest.raises(InputError, match="no such bucket") as caught:
        VERBS[verb](bucket)
    assert caught.value.run == "s3://drillz/run"


def test_a_key_that_names_the_error_is_a_missing_object(new_bucket):
    assert new_bucket("s3").get("rollouts/NoSuchBucket/1", limit=1) is None


@pytest.fixture
def answering():
    """``answering(status, body)`` starts an endpoint that gives every request this answer."""
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


def test_a_delete_is_one_request(s3_server):
    """The store's library repeats other requests; of a repeated delete, the first may still be
    under way when the second is answered."""
    with FaultyProxy(s3_server.endpoint, rates={"lose": 1.0}) as proxy:
        bucket = s3_server.open_bare("s3://drills/once", endpoint=proxy.endpoint)
        for attempts in (1, 2):
            with pytest.raises(RetryError):
                bucket.delete("k")
            assert proxy.requests == attempts


def test_a_bucket_connects_again(s3_server):
    bucket = s3_server.open_bare("s3://drills/again")
    bucket.put("k", b"1")
    before = bucket.store
    bucket.reconnect()
    assert bucket.store is not before
    assert bucket.get("k", limit=1) == b"1"


def opened(server, endpoint):
    return server.open_bare("s3://drills/run", endpoint=endpoint, retry_config={"max_retries": 0})


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (403, InputError),
        (401, InputError),
        (400, InputError),
        (405, InputError),
        (413, InputError),
        (500, RetryError),
        (503, ThrottledError),
        (408, RetryError),
        (429, ThrottledError),
    ],
)
def test_errors_by_status(s3_server, answering, verb, status, kind):
    bucket = opened(s3_server, answering(status, b"<Error><Code>X</Code></Error>"))
    with pytest.raises(DeltawireError) as caught:
        VERBS[verb](bucket)
    assert type(caught.value) is kind
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("status", "code", "kind", "words"),
    [
        (403, "RequestTimeTooSkewed", InputError, "clock"),
        (403, "SignatureDoesNotMatch", InputError, "secret key"),
        (400, "EntityTooLarge", InputError, "larger than the store allows"),
        (400, "ExpiredToken", RetryError, "expired"),
        (403, "ExpiredToken", RetryError, "expired"),
    ],
)
def test_errors_by_code(s3_server, answering, status, code, kind, words):
    body = f"<Error><Code>{code}</Code></Error>".encode()
    with pytest.raises(DeltawireError, match=words) as caught:
        opened(s3_server, answering(status, body)).put("k", b"1")
    assert type(caught.value) is kind


class Scripted:
    """Answers each request with the status, headers and body of ``answer(command, path)``."""

    def __init__(self, answer):
        class Handler(BaseHTTPRequestHandler):
            def do(self):
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                status, headers, body = answer(self.command, self.path)
                self.send_response(status)
                for name, value in {"Content-Length": str(len(body)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

            do_GET = do_PUT = do_HEAD = do_DELETE = do

            def log_message(self, *_):
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))

    def __enter__(self):
        self.thread.start()
        return f"http://127.0.0.1:{self.server.server_port}"

    def __exit__(self, *_):
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


CONFLICT = (409, {}, b"<Error><Code>ConditionalRequestConflict</Code></Error>")


@pytest.mark.parametrize(("conflicts", "then", "made"), [(2, 200, True), (1, 412, False)])
def test_a_conflict_is_tried_again(s3_server, conflicts, then, made):
    """A conflict decides nothing: taken as "exists", it would lose a commit that no one made."""
    asked = []

    def answer(command, path):
        asked.append(command)
        return CONFLICT if len(asked) <= conflicts else (then, {"ETag": '"1"'}, b"")

    with Scripted(answer) as endpoint:
        assert opened(s3_server, endpoint).create("k", b"1") is made
    assert len(asked) == conflicts + 1


def test_a_conflict_for_ever_is_a_retry_error(s3_server, monkeypatch):
    impatient = SimpleNamespace(**vars(time) | {"sleep": lambda _: None})
    monkeypatch.setattr("deltawire.store.bucket.time", impatient)
    with Scripted(lambda *_: CONFLICT) as endpoint, pytest.raises(RetryError, match="in progress"):
        opened(s3_server, endpoint).create("k", b"1")


def test_azure_says_by_a_409_that_an_object_exists():
    """Taken as a conflict, a create of what exists would be tried again without end."""
    asked = []

    def answer(command, path):
        asked.append(command)
        body = b"<Error><Code>BlobAlreadyExists</Code><Message>There is one.</Message></Error>"
        return 409, {"Content-Type": "application/xml"}, body

    with Scripted(answer) as endpoint:
        bucket = open_bare_bucket(
            "az://drills/run",
            account_name="account",
            account_key="a2V5",
            endpoint=endpoint,
            client_options={"allow_http": True},
        )
        assert bucket.create("k", b"1") is False
    assert asked == ["PUT"]


@pytest.mark.parametrize(("size", "kind"), [(100_000, RetryError), (100, CorruptError)])
def test_a_coalesced_range_that_comes_back_short(s3_server, size, kind):
    """obstore panics, and a panic is not an Exception: the reader's thread would just end."""

    def answer(command, path):
        headers = {"Last-Modified": "Sun, 22 Nov 2026 12:00:00 GMT", "ETag": '"1"'}
        if command == "HEAD":
            return 200, {**headers, "Content-Length": str(size)}, b""
        return 206, {**headers, "Content-Range": f"bytes 0-249/{size}"}, b"x" * 100

    with Scripted(answer) as endpoint, pytest.raises(DeltawireError) as caught:
        opened(s3_server, endpoint).read_ranges("k", [(0, 10), (200, 50)])
    assert type(caught.value) is kind


def test_a_listing_names_an_invalid_key(s3_server):
    """Another program put it there; its name tells the user what to remove."""
    one = "<Contents><Key>{}</Key><LastModified>2026-11-22T12:00:00.000Z</LastModified>"
    one += '<ETag>"1"</ETag><Size>1</Size></Contents>'
    body = "<ListBucketResult><Name>b</Name><Prefix></Prefix><KeyCount>1</KeyCount>"
    body += "<MaxKeys>1000</MaxKeys><IsTruncated>false</IsTruncated>"
    body += one.format("run/a//b") + "</ListBucketResult>"
    with (
        Scripted(lambda *_: (200, {}, body.encode())) as endpoint,
        pytest.raises(InputError, match="remove it") as caught,
    ):
        opened(s3_server, endpoint).list("")
    assert "a//b" in str(caught.value)


@pytest.mark.parametrize("server", ["s3_server", "moto_server"])
def test_large_objects_go_in_parts(request, server, monkeypatch):
    monkeypatch.setattr("deltawire.store.bucket.MULTIPART_BYTES", 1 << 20)
    monkeypatch.setattr("deltawire.store.bucket.PART_BYTES", 5 << 20)
    bucket = request.getfixturevalue(server).open("s3://drills/parts")
    data = bytes(range(256)) * (11 << 12)
    bucket.put("large", data)
    assert bucket.get("large", limit=len(data)) == data


class Overwriting(Bucket):
    """A store that ignores If-None-Match."""

    def create(self, key, data):
        self.put(key, data)
        return True


def test_a_store_that_overwrites_is_refused_by_writers():
    good = open_bare_bucket("memory://")
    remote = Bucket(good.store, "s3://good", local=False)
    check_create_if_absent(remote)
    with pytest.raises(InputError, match="ignores If-None-Match"):
        check_create_if_absent(Overwriting(good.store, "s3://bad", local=False))
    assert good.list("") == []
    with pytest.raises(InputError, match="ignores If-None-Match"):
        start_publisher(Overwriting(good.store, "s3://bad", local=False))


def test_a_profile_gives_what_the_environment_does_not(s3_server, environment, tmp_path):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION"):
        environment.delenv(name)
    (tmp_path / "credentials").write_text(
        "[default]\naws_access_key_id = no\naws_secret_access_key = no\n"
        "[mine]\naws_access_key_id = key\naws_secret_access_key = secret\n"
    )
    (tmp_path / "config").write_text(
        f"[profile mine]\nregion = us-east-1\nendpoint_url = {s3_server.endpoint}\n"
    )
    environment.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    environment.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    environment.setenv("AWS_PROFILE", "mine")
    assert read_profile() == {
        "access_key_id": "key",
        "secret_access_key": "secret",
        "region": "us-east-1",
        "endpoint": s3_server.endpoint,
    }
    assert open_bare_bucket("s3://drills/profile").create("k", b"1")
    environment.setenv("AWS_ACCESS_KEY_ID", "other")
    assert "secret_access_key" not in read_profile()
    environment.setenv("AWS_PROFILE", "none")
    assert read_profile() == {}


@pytest.mark.parametrize(
    "lines",
    [
        "role_arn = arn:aws:iam::1:role/r\nsource_profile = base\n",
        "credential_process = /bin/tool\n",
        "sso_session = me\nsso_account_id = 1\n",
    ],
)
def test_a_profile_that_only_the_aws_tools_understand_is_refused(environment, tmp_path, lines):
    """The store's client would ask a metadata server that is not there, and say so."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        environment.delenv(name)
    (tmp_path / "config").write_text(f"[profile mine]\n{lines}")
    environment.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    environment.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    environment.setenv("AWS_PROFILE", "mine")
    with pytest.raises(InputError, match=f"the profile mine .* by {lines.split(' ')[0]}") as caught:
        open_bare_bucket("s3://drills/profile")
    assert "aws configure export-credentials --profile mine" in caught.value.hint
    # Credentials in the environment come first, as they do for the AWS tools.
    environment.setenv("AWS_ACCESS_KEY_ID", "key")
    environment.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    open_bare_bucket("s3://drills/profile")


@pytest.mark.parametrize("body", [b"", b"no xml", b"<?xml version='1.0'?><a>", b"\xff" * 2000])
def test_an_invalid_listing_is_an_error(s3_server, answering, body):
    """The page of a captive portal, for example, is not taken for an empty bucket."""
    with pytest.raises(RetryError):
        opened(s3_server, answering(200, body)).list("a/")


def test_without_credentials_the_error_says_what_is_missing(environment, answering):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        environment.delenv(name)
    environment.setenv("AWS_METADATA_ENDPOINT", answering(404))
    bucket = open_bare_bucket("s3://drills/run", retry_config={"max_retries": 0})
    with pytest.raises(DeltawireError, match="set AWS_ACCESS_KEY_ID") as caught:
        bucket.put("k", b"1")
    assert type(caught.value) is RetryError


@pytest.mark.parametrize("server", ["s3_server", "moto_server"])
def test_a_key_with_an_empty_segment_hides_no_other(request, server):
    """Another program put objects there whose keys no client of this library can name."""
    import boto3
    from botocore.config import Config

    place = request.getfixturevalue(server)
    client = boto3.client(
        "s3",
        endpoint_url=place.endpoint,
        aws_access_key_id="test",
        aws_secret_access_key="test",
        region_name="us-east-1",
        config=Config(s3={"addressing_style": "path"}),
    )
    bucket = place.open("s3://drills/slashes")
    keys = ["a.json", "weights/0000.json", "weights/b/1", "weights/b/2", "weights/c/d/3", "z"]
    for key in keys:
        bucket.put(key, b"1")
    for odd in ("weights//junk", "weights/c//junk", "weights/c/d//"):
        client.put_object(Bucket="drills", Key=f"slashes/{odd}", Body=b"x")
        assert bucket.list("") == keys
        assert bucket.list("weights/", after="weights/b/1") == keys[3:5]
        assert list(bucket.list_prefixes("weights/")) == ["b", "c"]
        assert list(bucket.list_prefixes("weights/c/")) == ["d"]
        client.delete_object(Bucket="drills", Key=f"slashes/{odd}")
    # Of two in one folder's tree, the error names one, to be removed first.
    for odd in ("weights//junk", "weights/c//junk"):
        client.put_object(Bucket="drills", Key=f"slashes/{odd}", Body=b"x")
    with pytest.raises(InputError, match=r"//junk.*remove it"):
        bucket.list("")
