"""An SGLang server that follows a run serves the trainer's bits, whatever fails."""

import itertools
import json
import sys
import threading
import time

import numpy as np
import pytest
from server import Server
from shapes import VOCABULARY, Trainer, build

from deltawire.store import open_bucket

pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture(scope="module")
def trainer(tmp_path_factory, family):
    folder = tmp_path_factory.mktemp("trainer")
    bucket = open_bucket(str(folder / "bucket"), create=True)
    trainer = Trainer(bucket, build(family, folder / "model"), anchor_every=10)
    trainer.publish(10)
    yield trainer
    trainer.close()


@pytest.fixture(scope="module")
def server(trainer, arguments, request):
    with Server(
        trainer.model, "--load-format", "dummy", *arguments,
        run=trainer.publisher.bucket.url, in_flight=request.config.getoption("in_flight"),
    ) as server:  # fmt: skip
        yield server


def prompts(count, *, length=70, seed=0):
    """Prompts of random tokens."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCABULARY, length).tolist() for _ in range(count)]


def whole(answer, version):
    """True if a single version made the answer."""
    return answer.spans == ((str(version), 0, len(answer.tokens)),)


class Load:
    """Clients that ask the same question without a pause."""

    def __init__(self, server, question, *, clients=4, tokens=16):
        self.answers = []
        self.failures = []
        self._server, self._question, self._tokens = server, question, tokens
        self._ended = threading.Event()
        self._clients = [threading.Thread(target=self._ask, daemon=True) for _ in range(clients)]

    def __enter__(self):
        for client in self._clients:
            client.start()
        return self

    def __exit__(self, *_):
        self._ended.set()
        for client in self._clients:
            client.join(150)
            assert not client.is_alive()

    def wait_for(self, condition):
        """Wait until ``condition`` holds."""
        deadline = time.monotonic() + 120
        while not condition():
            assert not self.failures, self.failures
            assert time.monotonic() < deadline, f"after {len(self.answers)} answers"
            time.sleep(0.01)

    def _ask(self):
        while not self._ended.is_set():
            try:
                self.answers.append(self._server.answer(self._question, tokens=self._tokens))
            except Exception as error:
                self.failures.append(repr(error))
                return


def test_each_version_is_attested_while_requests_run(server, trainer, request):
    """One version at a time under load: its digest and live bits, and no prefix of an older one."""
    question = prompts(1, seed=4)[0]
    count = request.config.getoption("versions")
    began, attested, pauses = time.monotonic(), 0, []
    with Load(server, question) as load:
        load.wait_for(lambda: len(load.answers) > 4)
        for number in range(count):
            version = trainer.publish()
            status = server.reach(version)
            assert status["digest"] == trainer.publisher.digest.hex()
            assert status["failure"] == ""
            pauses.append(status["last_swap"]["engine_ms"])
            if number % 5 == 0:
                found = server.engine_call("deltawire_attest")
                assert found["sound"], found["ranks"]
                attested += 1
            load.wait_for(lambda v=str(version): any(a.spans[-1][0] == v for a in load.answers))
    seconds = time.monotonic() - began
    first = {}
    for answer in load.answers:
        assert len(answer.tokens) == 16
        assert answer.spans[0][1] == 0
        assert answer.spans[-1][2] == 16
        assert all(a[2] == b[1] for a, b in itertools.pairwise(answer.spans))
        first.setdefault(answer.spans[0][0], []).append(answer)
    figures = {
        "versions": count,
        "seconds": round(seconds, 1),
        "requests": len(load.answers),
        "requests_with_a_cached_prefix": sum(a.cached > 0 for a in load.answers),
        "requests_of_several_versions": sum(len(a.spans) > 1 for a in load.answers),
        "pause_ms_median": round(sorted(pauses)[len(pauses) // 2], 1),
        "pause_ms_max": round(max(pauses), 1),
        "attested": attested,
    }
    sys.stdout.write(json.dumps(figures) + "\n")
    assert figures["requests_with_a_cached_prefix"] > 0


def test_a_served_version_answers_as_a_server_newly_loaded_with_it(
    server, trainer, arguments, tmp_path
):
    version = trainer.publish()
    server.reach(version)
    questions = prompts(3)
    served = [server.answer(question) for question in questions]
    assert all(whole(answer, version) for answer in served)
    with Server(trainer.write(tmp_path / "checkpoint"), *arguments) as fresh:
        expected = [fresh.answer(question) for question in questions]
        assert fresh.ask("/deltawire", method="GET")[0] == 404, "it follows no run"
    assert [(a.tokens, a.logprobs) for a in served] == [(a.tokens, a.logprobs) for a in expected]


def test_no_prompt_uses_the_cache_of_older_weights(server, trainer):
    (question,) = prompts(1, seed=1)
    server.answer(question)
    assert server.answer(question).cached >= 60
    server.reach(trainer.publish())
    after = server.answer(question)
    assert after.cached == 0
    assert whole(after, trainer.version)
    assert server.answer(question).cached >= 60


def test_a_sequence_kept_over_a_swap_shares_nothing_with_later_ones(server, trainer):
    (question,) = prompts(1, seed=2, length=40)
    with Load(server, question, clients=1, tokens=200) as load:
        while not any(len(answer.spans) > 1 for answer in load.answers):
            trainer.publish()
            server.reach(trainer.version)
            assert not load.failures
    mixed = next(answer for answer in load.answers if len(answer.spans) > 1)
    later = server.answer([*question, *mixed.tokens[:150]])
    assert whole(later, trainer.version)
    if mixed.spans[0][0] != str(trainer.version):
        assert later.cached <= 40 + 200
        again = server.answer([*question, *mixed.tokens[:150]])
        assert again.tokens == later.tokens


def test_a_corrupt_blob_is_never_served_and_the_next_anchor_is_followed(server, trainer):
    bucket = trainer.publisher.bucket
    server.reach(trainer.version)
    held = trainer.version
    before = server.answer(prompts(1)[0])
    known = set(bucket.list("weights/blobs/"))
    trainer.publish()
    damaged = held + 1
    fresh_blobs = set(bucket.list("weights/blobs/")) - known
    assert fresh_blobs
    for key in fresh_blobs:
        blob = bytearray(bucket.get(key, limit=1 << 30))
        blob[len(blob) // 2] ^= 16
        bucket.put(key, bytes(blob))
    assert str(damaged) in server.fail()
    status, text = server.ask("/deltawire", method="GET")
    assert status == 503
    assert json.loads(text)["version"] == held
    assert server.answer(prompts(1)[0]).tokens == before.tokens
    while trainer.version % 10:
        trainer.publish()
    server.reach(trainer.version)
    assert server.ask("/deltawire", method="GET")[0] == 200


def test_calls_that_would_write_other_weights_are_refused_by_name(server, trainer):
    server.reach(trainer.version)
    digest = server.status()["digest"]
    status, text = server.ask("/update_weights_from_disk", {"model_path": str(trainer.model)})
    assert status == 400
    assert "follows a deltawire run" in json.loads(text)["message"]
    for path, body in {
        "/update_weight_version": {"new_version": "9999", "abort_all_requests": False},
        "/release_memory_occupation": {},
    }.items():
        status, text = server.ask(path, body)
        assert status == 409
        assert "follows a deltawire run" in json.loads(text)["error"]
    assert server.engine_call("deltawire_attest")["sound"]
    assert server.status()["digest"] == digest


def test_its_own_calls_keep_working(server, trainer):
    """A swap while generation is paused, and the calls that read."""
    assert server.call("/model_info", method="GET")["weight_version"]
    server.call("/pause_generation", {"mode": "in_place"})
    version = trainer.publish()
    server.reach(version)
    server.call("/continue_generation", {})
    assert whole(server.answer(prompts(1, seed=9)[0]), version)
    assert server.ask("/flush_cache")[0] == 200
    assert server.call("/model_info", method="GET")["weight_version"] == str(version)
