"""Requests for parts of an object: neighbors are joined, large ones come in parallel."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from hypothesis import given
from hypothesis import strategies as st
from obstore.store import HTTPStore

from deltawire.errors import RetryError
from deltawire.store import Bucket
from deltawire.store.ranges import NEAR_BYTES, REQUEST_BYTES, range_requests
from deltawire.store.request_limit import limit_of

MIB = 1 << 20


@given(
    st.lists(st.tuples(st.integers(0, 64 * MIB), st.integers(1, 12 * MIB)), min_size=1, max_size=40)
)
def test_requests_cover_every_range_and_little_else(ranges):
    requests = range_requests(ranges)
    assert sorted(number for one in requests for number in one.ranges) == list(range(len(ranges)))
    for one in requests:
        for number in one.ranges:
            start, length = ranges[number]
            assert one.start <= start
            assert start + length <= one.start + one.length
        largest = max(ranges[number][1] for number in one.ranges)
        assert one.length <= max(REQUEST_BYTES, largest)
        # No byte is further from a wanted one than the gap that is worth a request.
        covered = one.start
        for number in sorted(one.ranges, key=lambda number: ranges[number]):
            start, length = ranges[number]
            assert start - covered <= NEAR_BYTES
            covered = max(covered, start + length)
        assert covered == one.start + one.length
    assert [one.start for one in requests] == sorted(one.start for one in requests)


def test_neighbors_share_a_request_and_a_large_object_has_several():
    near = [(0, 10), (NEAR_BYTES + 10, 10), (2 * NEAR_BYTES + 21, 10)]
    assert [(one.start, one.length) for one in range_requests(near)] == [
        (0, NEAR_BYTES + 20), (2 * NEAR_BYTES + 21, 10)
    ]  # fmt: skip
    whole = [(at * REQUEST_BYTES, REQUEST_BYTES) for at in range(4)]
    assert [(one.start, one.length) for one in range_requests(whole)] == whole


class Server(ThreadingHTTPServer):
    """Serves ranges of one object, and remembers which."""

    daemon_threads = True

    def __init__(self, data, together):
        super().__init__(("127.0.0.1", 0), Handler)
        self.data, self.seen = data, []
        self.together = threading.Barrier(together)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        first, _, last = self.headers["Range"].removeprefix("bytes=").partition("-")
        self.server.seen.append((int(first), int(last)))
        self.server.together.wait(60)  # Nobody is answered before all have asked.
        body = self.server.data[int(first) : int(last) + 1]
        self.send_response(206)
        self.send_header("Content-Length", str(len(body)))
        total = len(self.server.data)
        self.send_header("Content-Range", f"bytes {first}-{int(first) + len(body) - 1}/{total}")
        self.send_header("Last-Modified", "Mon, 01 Jan 2024 00:00:00 GMT")
        self.send_header("ETag", '"1"')
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments):
        pass


@pytest.fixture
def served():
    opened = []

    def serve(data, *, together):
        server = Server(data, together)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        opened.append((server, thread))
        url = f"http://127.0.0.1:{server.server_port}/"
        store = HTTPStore.from_url(url, client_options={"allow_http": True})
        limit_of(url).window.size = together  # As after some answers.
        return server, Bucket(store, url, local=False)

    yield serve
    for server, thread in opened:
        server.shutdown()
        server.server_close()
        thread.join()


def test_ranges_that_touch_are_read_over_several_connections(served):
    data = bytes(range(256)) * (4 * REQUEST_BYTES // 256)
    server, bucket = served(data, together=4)
    wanted = [(at * REQUEST_BYTES, REQUEST_BYTES) for at in range(4)]
    parts = bucket.read_ranges("object", wanted)
    assert b"".join(parts) == data
    assert sorted(server.seen) == [(start, start + length - 1) for start, length in wanted]


def test_parts_are_cut_from_joined_requests_in_the_order_asked_for(served):
    data = bytes(range(256)) * 4096
    server, bucket = served(data, together=2)
    wanted = [(900_000, 50), (7, 3), (100, 20), (8, 1)]
    parts = bucket.read_ranges("object", wanted)
    assert [bytes(part) for part in parts] == [data[s : s + n] for s, n in wanted]
    assert sorted(server.seen) == [(7, 119), (900_000, 900_049)]


def test_a_response_that_is_cut_short_is_an_error_and_is_not_padded(served):
    server, bucket = served(b"x" * 100, together=1)
    bucket.size = lambda key: 300  # The object is whole; the answer was not.
    with pytest.raises(RetryError):
        bucket.read_ranges("object", [(50, 100)])
    assert server.seen
