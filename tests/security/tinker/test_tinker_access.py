"""Clients of `deltawire tinker` gain nothing without its key, or by hostile requests."""

import asyncio
import io
import json

import pytest
import tinker_requests as ask
from aiohttp.test_utils import TestClient, TestServer
from tinker_serving import make_model

from deltawire.errors import InputError
from deltawire.store import open_bucket
from deltawire.tinker.app import build_app
from deltawire.tinker.server import TinkerOptions, TinkerServer

KEY = "tml-secret"
HEADERS = {"X-API-Key": KEY}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("models"))


def against(tmp_path, model, run):
    """Runs ``run(client, app)`` against the application on a socket."""

    async def main():
        bucket = open_bucket(str(tmp_path / "bucket"), create=True)
        app = build_app(TinkerServer(bucket, TinkerOptions(directory=model)), token=KEY)
        async with TestClient(TestServer(app)) as client:
            return await run(client, app)

    return asyncio.run(main())


def test_nothing_but_health_answers_without_the_key(tmp_path, model):
    async def run(client, app):
        tried = 0
        for route in app.router.routes():
            if route.method not in ("GET", "POST", "DELETE"):
                continue
            path = route.resource.canonical
            for headers in ({}, {"X-API-Key": "tml-wrong"}, {"Authorization": f"Bearer {KEY}"}):
                answer = await client.request(route.method, path, headers=headers)
                expected = 200 if path.endswith("/healthz") else 401
                assert answer.status == expected, path
                assert KEY not in await answer.text()
            tried += 1
        assert tried >= 20

    against(tmp_path, model, run)


def test_a_key_that_no_client_sends_is_refused(tmp_path, model):
    server = TinkerServer(open_bucket("memory://"), TinkerOptions(directory=model))
    with pytest.raises(InputError, match="does not begin with tml-"):
        build_app(server, token="secret")


def test_hostile_requests_are_refused_and_change_nothing(tmp_path, model):
    async def run(client, app):
        async def post(path, body, **headers):
            answer = await client.post(f"/api/v1/{path}", data=body, headers=HEADERS | headers)
            return answer.status, await answer.text()

        session = json.loads((await post("create_session", b"{}"))[1])["session_id"]
        status, text = await post("create_model", ask.create_model(session))
        name = json.loads(text)["model_id"]
        for body in (b"", b"{", b"[]", b"\xff" * 40, b"[" * 100_000):
            for path in ("create_model", "optim_step", "asample", "retrieve_future", "get_info"):
                status, _ = await post(path, body)
                assert status == 400, (path, body[:10])
            status, _ = await post("forward_backward", body)
            assert status in (200, 400)
        for path in ("../../run", "a/b", "x" * 600, "\x00"):
            body = ask.save(name, 1, path)
            status, text = await post("save_weights", body)
            if status == 200:
                future = json.dumps({"request_id": json.loads(text)["request_id"]}).encode()
                assert json.loads((await post("retrieve_future", future))[1])["category"] == "user"
        assert (await post("get_info", json.dumps({"model_id": "../../x"}).encode()))[0] == 404
        huge = io.BytesIO(b"x" * (64 * 2**20 + 1))
        assert (await post("forward_backward", huge))[0] == 413
        sparse = hostile_matrix(name, 2)
        status, text = await post("forward_backward", sparse)
        future = json.dumps({"request_id": json.loads(text)["request_id"]}).encode()
        assert "not a sparse matrix" in (await post("retrieve_future", future))[1]
        status, text = await post("forward_backward", large_matrix(name, 3))
        future = json.dumps({"request_id": json.loads(text)["request_id"]}).encode()
        assert "is sent in 16 bytes" in (await post("retrieve_future", future))[1]

    against(tmp_path, model, run)
    stored = {str(one.relative_to(tmp_path)) for one in tmp_path.rglob("*") if one.is_file()}
    assert all(one.startswith("bucket/") for one in stored)


def large_matrix(name, number):
    """A sparse matrix of one row without an element: 16 bytes, or 256 MiB."""
    import numpy as np

    found = ask.schema.parse("ForwardBackwardRequest", ask.forward_backward(name, number))
    tensor = found.data[0].loss_fn_inputs["weights"]
    tensor.sparse_csr.crow_indices = np.zeros(2, np.int64).tobytes()
    del tensor.shape[:]
    tensor.shape.extend([1, 1 << 26])
    return found.SerializeToString()


def hostile_matrix(name, number):
    """A sparse matrix whose column lies outside of it."""
    import numpy as np

    found = ask.schema.parse("ForwardBackwardRequest", ask.forward_backward(name, number))
    tensor = found.data[0].loss_fn_inputs["weights"]
    tensor.sparse_csr.values = np.ones(1, np.float32).tobytes()
    tensor.sparse_csr.crow_indices = np.asarray([0, 1], np.int64).tobytes()
    tensor.sparse_csr.col_indices = np.asarray([10**9], np.int64).tobytes()
    del tensor.shape[:]
    tensor.shape.extend([1, 4])
    return found.SerializeToString()
