"""A server that dies at any write loses nothing that it acknowledged, and does nothing twice."""

import asyncio
import contextlib
import threading

import pytest
import tinker_requests as ask
from tinker_serving import make_model

from deltawire.errors import InputError
from deltawire.runtime import process
from deltawire.store import DelegatingBucket, open_bare_bucket
from deltawire.sync import load_mirror, read_history, read_run
from deltawire.sync.maintain.fsck import check_run
from deltawire.tinker import models, samplers
from deltawire.tinker.samplers import SamplerOptions
from deltawire.tinker.server import TinkerOptions, TinkerServer
from deltawire.train.client import client as training_client
from deltawire.train.client import ranks as trainer_ranks
from deltawire.train.client import session as training_session

WRITES = ("put", "create")


class Life:
    """How many writes of tinker's objects and of weights and states are left, in all buckets."""

    def __init__(self, writes=None):
        self.left, self.done, self.dead = writes, 0, threading.Event()
        self.lock = threading.Lock()

    def bucket(self, inner):
        return DyingBucket(inner, self)

    def write(self, key):
        with self.lock:
            if not key.startswith(("tinker/", "weights/", "checkpoints/", "run.json")):
                return  # Heartbeats come when they come.
            if self.left is not None and self.done >= self.left:
                self.dead.set()
                return
            self.done += 1


class DyingBucket(DelegatingBucket):
    """Does nothing any more once its life is over."""

    def __init__(self, inner, life):
        super().__init__(inner)
        self.life = life

    def _call(self, verb, key, operation):
        if verb in WRITES:
            self.life.write(key)
        if self.life.dead.is_set():
            raise InputError("the process was killed", key=key)
        return operation()


class Client:
    """Sends requests as Tinker's client does: it repeats what was not acknowledged, and asks for
    every result until it has it."""

    def __init__(self):
        self.session = self.model = None
        self.acknowledged, self.results = {}, {}

    def requests(self):
        name = self.model
        return [
            ("forward_backward", ask.forward_backward(name, 1)),
            ("optim_step", ask.optim_step(name, 2)),
            ("save_weights_for_sampler", ask.save_sampler(name, 3, 0)),
            ("forward_backward", ask.forward_backward(name, 4)),
            ("save_weights", ask.save(name, 5, "with-gradients")),
            ("forward_backward", ask.forward_backward(name, 6, texts=[list(b"xyzxyz")])),
            ("optim_step", ask.optim_step(name, 7)),
            ("forward_backward", ask.forward_backward(name, 8)),
            ("optim_step", ask.optim_step(name, 9)),
            ("save_weights_for_sampler", ask.save_sampler(name, 10, 1)),
            ("forward_backward", ask.forward_backward(name, 11, forward_only=True)),
        ]

    async def work(self, server, life):
        if self.session is None:
            self.session = (await server.create_session(b"{}"))["session_id"]
        if 0 not in self.acknowledged:
            body = ask.create_model(self.session)
            self.acknowledged[0] = (await server.submit("create_model", body))["request_id"]
            self.model = self.acknowledged[0].rpartition(":")[0]
        await self.receive(server, life, 0)
        for number, (kind, body) in enumerate(self.requests(), 1):
            if number not in self.acknowledged:
                self.acknowledged[number] = (await server.submit(kind, body))["request_id"]
            if number % 3 == 0:
                await self.receive_all(server, life)
        await self.receive_all(server, life)

    async def receive_all(self, server, life):
        for number in sorted(self.acknowledged):
            await self.receive(server, life, number)

    async def receive(self, server, life, number):
        if number in self.results:
            return
        while (found := await server.retrieve(self.acknowledged[number], hold_s=0.1)) is None:
            if life.dead.is_set():
                raise InputError("the connection is lost")
        if life.dead.is_set():  # A process that is dead answers nothing.
            raise InputError("the connection is lost")
        assert found.kind != "error", found.body
        body = found.body.replace(self.model.encode(), b"M").replace(self.session.encode(), b"S")
        self.results[number] = body


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("models"))


def live(url, model, client, life, monkeypatch):
    """One life of the server."""

    def opened(location, **options):
        return life.bucket(open_bare_bucket(location, **options))

    for module in (models, samplers, training_client, trainer_ranks):
        monkeypatch.setattr(module, "open_bucket", opened)
    trusted = training_session.open_trusted
    monkeypatch.setattr(
        training_session, "open_trusted", lambda location: life.bucket(trusted(location))
    )
    # A dead server's heartbeat does not move: do not wait seconds for that.
    monkeypatch.setattr(process, "HEARTBEAT_S", 0.02)

    async def main():
        options = TinkerOptions(
            directory=model, checkpoint_every=2, sampling=SamplerOptions(context=32, slots=2)
        )
        server = TinkerServer(opened(url, create=True), options)
        try:
            await server.start()
            await client.work(server, life)
        except InputError:
            if not life.dead.is_set():
                raise
        finally:
            with contextlib.suppress(InputError):
                await server.close()

    asyncio.run(main())


def outcome(url, client):
    bucket = open_bare_bucket(url)
    found = check_run(bucket)
    assert found.whole, found.faults
    run = read_run(bucket)
    digests = [one.digest for one in read_history(bucket, run)]
    return client.results, digests, load_mirror(bucket, run).version


def test_nothing_that_was_acknowledged_is_lost(tmp_path, model, monkeypatch):
    whole, life = Client(), Life()
    live(str(tmp_path / "whole"), model, whole, life, monkeypatch)
    expected = outcome(str(tmp_path / "whole"), whole)
    assert len(whole.results) == 12
    assert life.done > 30
    for writes in range(0, life.done, 4):
        url, client = str(tmp_path / str(writes)), Client()
        first = Life(writes)
        live(url, model, client, first, monkeypatch)
        assert first.dead.is_set()
        live(url, model, client, Life(), monkeypatch)
        results, digests, version = outcome(url, client)
        assert results == expected[0], writes
        # The same versions, each once.
        assert digests == expected[1], writes
        assert version == expected[2]


def test_the_server_may_die_again_while_it_repeats(tmp_path, model, monkeypatch):
    whole = Client()
    live(str(tmp_path / "whole"), model, whole, Life(), monkeypatch)
    expected = outcome(str(tmp_path / "whole"), whole)
    client, lives = Client(), 0
    while len(client.results) < len(expected[0]):
        live(str(tmp_path / "many"), model, client, Life(9), monkeypatch)
        lives += 1
        assert lives < 30
    live(str(tmp_path / "many"), model, client, Life(), monkeypatch)
    assert lives > 3
    assert outcome(str(tmp_path / "many"), client)[:2] == expected[:2]
