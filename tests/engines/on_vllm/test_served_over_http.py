"""``vllm serve``, driven over its own weight-transfer calls, and following by itself."""

import json
import threading
import time
import urllib.error

import pytest
from drills import prompts
from served import Server, adapter_arguments
from shapes import Trainer, build

from deltawire.store import open_bucket


@pytest.fixture(scope="module")
def trainer(tmp_path_factory, family):
    folder = tmp_path_factory.mktemp("trainer")
    bucket = open_bucket(str(folder / "bucket"), create=True)
    trainer = Trainer(bucket, build(family, folder / "model"))
    yield trainer
    trainer.close()


def test_a_server_is_moved_by_vllms_own_calls(trainer, tmp_path):
    run = trainer.publisher.bucket.url
    transfer = json.dumps({"backend": "deltawire"})
    question = prompts(1)[0]
    with Server(trainer.model, tmp_path / "log", "--weight-transfer-config", transfer) as server:
        server.call("/init_weight_transfer_engine", {"init_info": {"run": run, "follow": False}})
        first, spans = server.generate(question)
        assert spans == [(str(trainer.version), 0, 12)]
        for _ in range(3):
            version = trainer.publish(2)
            server.move(version)
            tokens, spans = server.generate(question)
            assert spans == [(str(version), 0, 12)]
        assert server.engine_call("deltawire_attest")["sound"]
        status = server.engine_call("deltawire_status")
        assert (status["version"], status["digest"]) == (version, trainer.publisher.digest.hex())
        # One that is not there is refused, and nothing has changed.
        server.call("/start_weight_update", {})
        with pytest.raises(urllib.error.HTTPError):
            server.call("/update_weights", {"update_info": {"version": version + 5}})
        assert server.generate(question)[0] == tokens
        # Back to an older one, led from outside.
        server.engine_call("deltawire_want", str(version - 6))
        deadline = time.monotonic() + 60
        while server.engine_call("deltawire_status")["version"] != version - 6:
            assert time.monotonic() < deadline, server.engine_call("deltawire_status")
            time.sleep(0.05)
        again, spans = server.generate(question)
        assert spans == [(str(version - 6), 0, 12)]
        assert again == first


@pytest.mark.parametrize("in_flight", ["recompute", "drain"])
def test_a_server_follows_and_treats_requests_in_flight_as_configured(trainer, tmp_path, in_flight):
    run = trainer.publisher.bucket.url
    told = json.dumps({"deltawire": {"run": run, "in_flight": in_flight}})
    with Server(trainer.model, tmp_path / "log", "--additional-config", told) as server:
        answers, stop = [], threading.Event()

        def ask(seed):
            question = prompts(1, seed=seed)[0]
            while not stop.is_set():
                answers.append(server.generate(question, tokens=64))

        threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for _ in range(4):
            version = trainer.publish()
            deadline = time.monotonic() + 60
            while server.engine_call("deltawire_status")["version"] != version:
                assert time.monotonic() < deadline, server.engine_call("deltawire_status")
                time.sleep(0.05)
        stop.set()
        for thread in threads:
            thread.join(60)
        assert all(spans[-1][2] == 64 == len(tokens) for tokens, spans in answers)
        mixed = [spans for _, spans in answers if len(spans) > 1]
        assert (mixed == []) == (in_flight == "drain")
        assert {span[0] for _, spans in answers for span in spans} >= {str(version)}
        assert server.engine_call("deltawire_attest")["sound"]


def test_a_server_refuses_log_probabilities_of_prompts_with_an_adapter_of_the_head(
    family, tmp_path
):
    """vLLM's own answer to two such requests in one step would be its end."""
    bucket = open_bucket(str(tmp_path / "bucket"), create=True)
    trainer = Trainer(bucket, build(family, tmp_path / "model"), adapter=True)
    question = prompts(1)[0]
    wanted = {"temperature": 0.0, "max_tokens": 4, "prompt_logprobs": 1, "detokenize": False}
    with Server(trainer.model, tmp_path / "log", *adapter_arguments(bucket.url)) as server:
        before = server.generate(question)
        for _ in range(2):
            with pytest.raises(urllib.error.HTTPError, match="500"):
                server.call(
                    "/inference/v1/generate",
                    {"token_ids": question, "sampling_params": wanted, "model": ""},
                )
        assert server.generate(question) == before
    trainer.close()
