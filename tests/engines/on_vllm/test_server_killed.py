"""A server that is killed during a swap of an adapter, or between two, is started again with the
newest one, and every request that it owed an answer gets one."""

import json
import os
import signal
import sys
import threading
import time

import pytest
from drills import prompts
from served import Server, adapter_arguments
from shapes import Trainer, build

from deltawire.store import open_bucket

QUESTIONS = prompts(3, seed=5)
CACHED = 64
"""Tokens of a question that fill blocks of the cache."""


class Load:
    """Clients that ask without a pause until the server fails them."""

    def __init__(self):
        self.answers = {}
        self.owed = []
        self._lock = threading.Lock()
        self._asked = 0
        self._clients = []

    def start(self, server, clients=3):
        """Go on asking, now this server."""
        self._clients = [
            threading.Thread(target=self._ask, args=(server,), daemon=True) for _ in range(clients)
        ]
        for client in self._clients:
            client.start()

    def wait_for(self, count):
        """Wait until so many more are answered."""
        wanted, deadline = len(self.answers) + count, time.monotonic() + 120
        while len(self.answers) < wanted:
            assert time.monotonic() < deadline, f"{len(self.answers)} of {wanted} are answered"
            time.sleep(0.02)

    def join(self):
        """Wait until each client was failed."""
        for client in self._clients:
            client.join(150)  # A request gives up after 120 s.
            assert not client.is_alive()

    def ask_again(self, server):
        """Ask again each question that the last server did not answer."""
        for number in self.owed:
            self.answers[number] = server.answer(QUESTIONS[number % len(QUESTIONS)], tokens=24)
        self.owed.clear()

    def _ask(self, server):
        while True:
            with self._lock:
                number = self._asked
                self._asked += 1
            try:
                self.answers[number] = server.answer(QUESTIONS[number % len(QUESTIONS)], tokens=24)
            except (OSError, ValueError):  # Refused, cut off, or an error in place of an answer.
                self.owed.append(number)
                return

    @property
    def complete(self):
        """True if each request has its answer."""
        return not self.owed and sorted(self.answers) == list(range(self._asked))


@pytest.fixture
def trainer(tmp_path, family):
    bucket = open_bucket(str(tmp_path / "bucket"), create=True)
    trainer = Trainer(bucket, build(family, tmp_path / "model"), adapter=True, anchor_every=10)
    yield trainer
    trainer.close()


@pytest.fixture
def serve(trainer, tmp_path, ranks):
    """``serve()`` starts a server that follows the run with its adapter in a slot."""
    arguments = adapter_arguments(trainer.publisher.bucket.url)
    started = []

    def start():
        server = Server(
            trainer.model, tmp_path / f"log-{len(started)}", *arguments,
            "--tensor-parallel-size", str(ranks), "--enable-prompt-tokens-details",
            "--worker-extension-cls", "planting.PlantingWorker",
        )  # fmt: skip
        started.append(server)
        return server.__enter__()

    yield start
    for server in started:
        server.end()


def kill_in_a_swap(server, trainer, ranks):
    """The whole process group, when half of a version is written."""
    assert {"planted": "kill-scatter"} in server.rank_calls(
        "plant_failure", ranks - 1, "kill-scatter"
    )
    trainer.publish()
    assert server.process.wait(120) == -signal.SIGKILL


def kill_between_swaps(server, trainer, ranks):
    """The whole process group."""
    server.end()


def kill_a_rank(server, trainer, ranks):
    """One process; the others find that out, or are ended like it."""
    os.kill(server.rank_calls("process")[ranks - 1]["pid"], signal.SIGKILL)


KILLS = {"swap": kill_in_a_swap, "between": kill_between_swaps, "rank": kill_a_rank}


def reached(server, version):
    """The server's status once it serves ``version``."""
    deadline = time.monotonic() + 120
    while (status := server.engine_call("deltawire_status"))["version"] != version:
        assert time.monotonic() < deadline, status
        time.sleep(0.05)
    return status


def whole(version, tokens):
    return [(str(version), 0, tokens)]


def test_a_killed_server_continues_with_the_newest_adapter(request, trainer, serve, ranks):
    kills = request.config.getoption("kills").split(",")
    load, server, question = Load(), serve(), QUESTIONS[0]
    versions, cached = 0, 0
    for kill in kills:
        # Between two swaps, and with an answer to compare with.
        held = trainer.version
        reached(server, held)
        before = server.generate(question, tokens=24)
        assert before[1] == whole(held, 24)
        load.start(server)
        load.wait_for(6)
        KILLS[kill](server, trainer, ranks)
        load.join()
        server.end()
        for _, spans, _ in load.answers.values():
            assert all(int(version) <= held for version, _, _ in spans), "a torn version answered"
        if kill == "swap":
            trainer.publish()  # The trainer did not notice.
        server = serve()
        status = server.engine_call("deltawire_status")
        assert status["version"] == trainer.version
        assert status["digest"] == trainer.publisher.digest.hex()
        assert server.engine_call("deltawire_attest")["sound"]
        if trainer.version == held:
            assert server.generate(question, tokens=24) == before
        load.ask_again(server)
        # One at a time: the first request after a swap finds no prefix, and the second its own.
        for _ in range(3):
            version = trainer.publish()
            status = reached(server, version)
            assert status["digest"] == trainer.publisher.digest.hex()
            assert status["failure"] == ""
            first, again = (server.answer(question) for _ in range(2))
            assert (first[1], first[2]) == (whole(version, 12), 0)
            assert again[1] == whole(version, 12)
            assert again[2] >= CACHED
            assert again[0] == first[0]
            versions, cached = versions + 1, cached + 1
        assert server.engine_call("deltawire_attest")["sound"]
    assert load.complete
    figures = {
        "kills": kills,
        "versions_after_restarts": versions,
        "requests": len(load.answers),
        "requests_with_a_cached_prefix": cached + sum(one[2] > 0 for one in load.answers.values()),
    }
    sys.stdout.write(json.dumps(figures) + "\n")
