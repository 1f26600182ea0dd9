"""A request that is larger than what the server reads is refused, and its number is used."""

import asyncio
import json

import msgspec
import pytest
import tinker_requests as ask
from aiohttp.test_utils import TestClient, TestServer
from tinker_serving import TOKEN, make_model

from deltawire.errors import InputError
from deltawire.store import open_bucket
from deltawire.tinker import app as of_http
from deltawire.tinker import requests
from deltawire.tinker.samplers import SamplerOptions
from deltawire.tinker.server import TinkerOptions, TinkerServer

LIMIT = 4000
HEADERS = {"X-API-Key": TOKEN}


async def retrieved(client, future):
    asked = {"request_id": future["request_id"]}
    answer = await client.post("/api/v1/retrieve_future", json=asked, headers=HEADERS)
    return answer.content_type, await answer.read()


def test_its_number_is_used(tmp_path, monkeypatch):
    monkeypatch.setattr(of_http, "MAX_BODY_BYTES", LIMIT)
    monkeypatch.setattr(of_http, "EDGE_BYTES", 200)
    model = make_model(tmp_path)

    async def main():
        bucket = open_bucket(str(tmp_path / "bucket"), create=True)
        options = TinkerOptions(directory=model, sampling=SamplerOptions(context=64))
        server = TinkerServer(bucket, options)
        client = TestClient(TestServer(of_http.build_app(server, token=TOKEN)))
        async with client:

            async def post(call, data):
                answer = await client.post(f"/api/v1/{call}", data=data, headers=HEADERS)
                return answer.status, await answer.json()

            session = (await server.create_session(b"{}"))["session_id"]
            _, future = await post("create_model", ask.create_model(session))
            name = json.loads((await retrieved(client, future))[1])["model_id"]
            bodies = [
                ("forward_backward", ask.forward_backward(name, 1, texts=[ask.TEXT] * 99)),
                ("optim_step", json.dumps({"model_id": name, "seq_id": 2, "x": "y" * LIMIT})),
                ("a_later_call", json.dumps({"x": "y" * LIMIT, "model_id": name, "seq_id": 3})),
            ]
            for call, data in bodies:
                assert len(data) > LIMIT
                for _ in range(2):  # The client repeats what failed on the way.
                    status, future = await post(call, data)
                    assert status == 200
                    kind, told = await retrieved(client, future)
                    assert kind == "application/json"
                    assert json.loads(told)["category"] == "user"
                    assert b"MiB that this server reads" in told
            assert (await post("optim_step", "y" * 2 * LIMIT))[0] == 413
            unknown = ask.forward_backward(f"{session}:train:7", 1, texts=[ask.TEXT] * 99)
            assert (await post("forward_backward", unknown))[0] == 413
            _, future = await post("forward_backward", ask.forward_backward(name, 4))
            assert (await retrieved(client, future))[0] == "application/x-protobuf"

    asyncio.run(main())


@pytest.mark.parametrize("number", [1, 127, 128, 2**31 - 1])
def test_the_first_bytes_tell_whose_it_is(number):
    name = f"{'a' * 32}:train:12"
    body = ask.forward_backward(name, number)
    told = requests.oversize("forward_backward", body[:100], b"", 70 << 20)
    assert msgspec.json.decode(told) == {"model_id": name, "seq_id": number, "bytes": 70 << 20}


@pytest.mark.parametrize("head", [b"", b"\x0a", b"\x0a\xff", b"\x0a\x05abc", b"\x1a" * 99])
def test_damaged_ones_are_refused(head):
    for kind in ("forward_backward", "optim_step"):
        with pytest.raises(InputError, match="MiB that this server reads"):
            requests.oversize(kind, head, head, 70 << 20)
