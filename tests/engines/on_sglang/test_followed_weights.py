"""An SGLang server that follows a run serves the trainer's bits, whatever fails."""

import json
import sys
import threading
import time

import pytest
from drills import (  # noqa: F401  (its tests are run here too)
    cover,
    prompts,
    test_a_corrupt_blob_is_never_served_and_the_next_anchor_is_followed,
    test_a_failing_rank_holds_all_back_and_the_next_try_succeeds,
    test_a_swap_finds_a_flipped_bit_where_it_writes_and_repairs_it,
    test_no_prompt_uses_the_cache_of_older_weights,
    test_one_flipped_bit_is_found_on_the_rank_that_holds_it,
    test_swaps_every_second_under_load_lose_no_request,
    whole,
)
from server import Server
from shapes import Trainer, build

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
def engine(server):
    """The server, as `drills` calls it."""
    return server


@pytest.fixture(scope="module")
def server(trainer, arguments, request):
    with Server(
        trainer.model, "--load-format", "dummy", *arguments,
        run=trainer.publisher.bucket.url, in_flight=request.config.getoption("in_flight"),
    ) as server:  # fmt: skip
        yield server


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
                found = server.attest()
                assert found["sound"], found["ranks"]
                attested += 1
            load.wait_for(lambda v=version: any(a.spans[-1][0] == v for a in load.answers))
    seconds = time.monotonic() - began
    first = {}
    for answer in load.answers:
        assert len(answer.tokens) == 16
        assert cover(answer)
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
    if mixed.spans[0][0] != trainer.version:
        assert later.cached <= 40 + 200
        again = server.answer([*question, *mixed.tokens[:150]])
        assert again.tokens == later.tokens


def test_calls_that_would_write_other_weights_are_refused_by_name(server, trainer):
    server.reach(trainer.version)
    digest = server.status()["digest"]
    status, text = server.ask("/update_weights_from_disk", {"model_path": str(trainer.model)})
    assert status == 400
    assert "follows a deltawire run" in json.loads(text)["message"]
    status, text = server.ask("/weights_checker", {"action": "reset_tensors"})
    assert status == 400
    assert "follows a deltawire run" in json.loads(text)["message"]
    for path, body in {
        "/update_weight_version": {"new_version": "9999", "abort_all_requests": False},
        "/release_memory_occupation": {},
    }.items():
        status, text = server.ask(path, body)
        assert status == 409
        assert "follows a deltawire run" in json.loads(text)["error"]
    assert server.attest()["sound"]
    assert server.status()["digest"] == digest


def test_the_readiness_call_says_whether_the_run_is_followed(server, trainer):
    server.reach(trainer.version)
    assert server.ask("/deltawire", method="GET")[0] == 200
    server.engine_call("deltawire_want", 9999)
    assert "9999" in server.fail()
    status, text = server.ask("/deltawire", method="GET")
    assert status == 503
    assert json.loads(text)["version"] == trainer.version
    server.engine_call("deltawire_want", trainer.version)
    server.reach(trainer.publish())
    assert server.ask("/deltawire", method="GET")[0] == 200


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
