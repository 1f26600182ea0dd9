"""A vLLM that follows a run serves the trainer's bits, whatever fails."""

import itertools
import json
import shutil
import sys
import threading
import time

import pytest
from engine import Engine, prompts
from shapes import Trainer, build

from deltawire.store import open_bucket

pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture(scope="module")
def trainer(tmp_path_factory, family, parallel):
    folder = tmp_path_factory.mktemp("trainer")
    bucket = open_bucket(str(folder / "bucket"), create=True)
    trainer = Trainer(
        bucket, build(family, folder / "model"), adapter=parallel["adapter"], anchor_every=10
    )
    trainer.publish(10)  # The first anchor starts the thread that stores them, which no test ends.
    yield trainer
    trainer.close()


@pytest.fixture(scope="module")
def engine(trainer, ranks, parallel):
    engine = Engine(trainer.model, ranks=ranks, run=trainer.publisher.bucket.url, **parallel)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def fresh(trainer, ranks, parallel, tmp_path_factory):
    """``fresh(…)`` weighs an engine newly loaded from the trainer's checkpoint, and has it
    answer question by question."""
    folders = tmp_path_factory.mktemp("checkpoints")
    kept = []

    def ask(questions):
        written = trainer.write(folders / str(trainer.version))
        other = Engine(written, ranks=ranks, **parallel)
        try:
            return other.call("weigh"), one_by_one(other, questions)
        finally:
            if ranks > 1:
                other.close()
            else:  # It shares its process, and what closing takes down, with the one under test.
                kept.append(other)
            shutil.rmtree(written)

    return ask


def one_by_one(engine, questions):
    """Answers that share no step with another request: with the core in another process, chance
    decides which requests share a step, and some kernels round differently by what it holds."""
    return [answer for question in questions for answer in engine.generate([question])]


def whole(answer, version):
    """True if a single version made the answer."""
    return answer.spans == ((version, 0, len(answer.tokens)),)


def test_random_versions_land_while_serving_bit_for_bit(engine, trainer, fresh, request):
    questions = prompts(3)
    last = trainer.version + request.config.getoption("versions")
    seen = set()
    for count in itertools.cycle((1, 5, 2)):  # one step, or several at once
        trainer.publish(min(count, last - trainer.version))
        for answer in engine.generate(questions, tokens=12):
            assert [start for _, start, _ in answer.spans][:1] == [0]
            assert answer.spans[-1][2] == len(answer.tokens)
            assert all(a[2] == b[1] for a, b in itertools.pairwise(answer.spans))
            seen.update(version for version, _, _ in answer.spans)
        status = engine.reach(trainer.version)
        if trainer.version == last:
            break
    assert status["failure"] == ""
    assert status["digest"] == trainer.publisher.digest.hex()
    assert len(seen) > 3
    weights, answers = fresh(questions)
    live = engine.call("weigh")
    odd = [
        (rank, name)
        for rank, held in enumerate(live)
        for name, weight in held.items()
        if weight != weights[rank][name]
    ]
    assert odd == []
    assert live == weights
    served = one_by_one(engine, questions)
    assert all(whole(answer, last) for answer in served)
    assert [(a.tokens, a.logprobs) for a in served] == [(a.tokens, a.logprobs) for a in answers]


def test_each_version_is_attested_while_requests_run(engine, trainer, request):
    """One version at a time under load: its digest and live bits, and no prefix of an older one."""
    caching = engine.llm.llm_engine.vllm_config.cache_config.enable_prefix_caching
    question = prompts(1, seed=4)[0]
    began, answers = time.monotonic(), {}
    for _ in range(request.config.getoption("versions")):
        version = trainer.publish()
        deadline = time.monotonic() + 60
        while engine.status()["version"] != version:
            assert time.monotonic() < deadline, engine.status()
            answers |= engine.step_under_load(question)
        found = engine.call("deltawire_attest")[0]
        assert found["sound"], found["ranks"]
        assert found["version"] == version
        status = engine.status()
        assert status["digest"] == trainer.publisher.digest.hex()
        assert status["failure"] == ""
        while not any(answer.spans[0][0] == version for answer in answers.values()):
            answers |= engine.step_under_load(question)
    seconds = time.monotonic() - began
    answers |= engine.finish_load()
    first, cached = {}, 0
    for number in sorted(answers):
        answer = answers[number]
        assert len(answer.tokens) == 16
        cached += answer.cached > 0
        first.setdefault(answer.spans[0][0], answer)
    assert sorted(answers) == list(range(min(answers), max(answers) + 1)), "no request was lost"
    stale = [version for version, answer in first.items() if answer.cached]
    assert stale == []
    assert not caching or cached
    figures = {
        "versions": request.config.getoption("versions"),
        "seconds": round(seconds, 1),
        "requests": len(answers),
        "requests_with_a_cached_prefix": cached,
        "versions_that_began_with_a_stale_prefix": len(stale),
        "requests_of_several_versions": sum(len(one.spans) > 1 for one in answers.values()),
    }
    sys.stdout.write(json.dumps(figures) + "\n")


def test_no_prompt_uses_the_cache_of_older_weights(engine, trainer):
    if not engine.llm.llm_engine.vllm_config.cache_config.enable_prefix_caching:
        pytest.skip("vLLM caches no prefixes for this model here")
    question = prompts(1, seed=1)
    engine.generate(question)
    again = engine.generate(question)[0]
    assert again.cached >= 64
    version = trainer.publish()
    engine.reach(version)
    after = engine.generate(question)[0]
    assert after.cached == 0
    assert whole(after, version)
    assert engine.generate(question)[0].cached >= 64


def test_a_sequence_kept_over_a_swap_shares_nothing_with_later_ones(engine, trainer):
    """Kept keys and values are of several versions, so no other request may use them."""
    question = prompts(1, seed=2, length=40)
    before = trainer.version
    trainer.publish()
    mixed = engine.generate(question, tokens=120)[0]
    engine.reach(trainer.version)
    assert {version for version, _, _ in mixed.spans} <= {before, trainer.version}
    longer = [[*question[0], *mixed.tokens[:100]]]
    later = engine.generate(longer)[0]
    assert whole(later, trainer.version)
    assert later.cached == 0 or mixed.spans[0][0] == trainer.version


def test_a_corrupt_blob_is_never_served_and_the_next_anchor_is_followed(engine, trainer):
    bucket = trainer.publisher.bucket
    held = trainer.version
    before = engine.generate(prompts(2))
    known = set(bucket.list("weights/blobs/"))
    trainer.publish()
    damaged = held + 1
    fresh_blobs = set(bucket.list("weights/blobs/")) - known
    assert fresh_blobs
    for key in fresh_blobs:
        blob = bytearray(bucket.get(key, limit=1 << 30))
        blob[len(blob) // 2] ^= 16
        bucket.put(key, bytes(blob))
    assert str(damaged) in engine.fail()
    assert engine.status()["version"] == held
    assert [a.tokens for a in engine.generate(prompts(2))] == [a.tokens for a in before]
    while trainer.version % 10:
        trainer.publish()
    engine.reach(trainer.version)


@pytest.mark.parametrize("stage", ["prepare", "swap", "scatter", "readback"])
def test_a_failing_rank_holds_all_back_and_the_next_try_succeeds(engine, trainer, ranks, stage):
    question = prompts(2, seed=3)
    before, held = engine.generate(question), trainer.version
    weights = engine.call("weigh")
    engine.call("plant_failure", ranks - 1, stage)
    version = trainer.publish()
    engine.fail()
    status = engine.status()
    if status["version"] == held:
        assert engine.call("weigh") == weights
        same = engine.generate(question, tokens=2)
        if all(whole(answer, held) for answer in same):
            assert [a.tokens for a in same] == [a.tokens[:2] for a in before]
    engine.reach(version)
    assert engine.call("weigh") != weights


def test_one_flipped_bit_is_found_on_the_rank_that_holds_it(engine, trainer, ranks):
    engine.reach(trainer.version)
    weights = engine.call("weigh")
    for seed in range(4):
        number = seed % ranks
        planted = next(answer for answer in engine.call("plant_bit", number, seed) if answer)
        assert engine.call("weigh") != weights
        found = engine.call("deltawire_attest")[0]
        assert not found["sound"]
        assert [answer["sound"] for answer in found["ranks"]] == [n != number for n in range(ranks)]
        assert planted["tensor"] in found["ranks"][number]["failure"]
        assert engine.call("weigh") == weights
        assert engine.call("deltawire_attest")[0]["sound"]


def test_a_swap_finds_a_flipped_bit_where_it_writes_and_repairs_it(engine, trainer, ranks):
    for seed in range(100, 103):
        engine.call("plant_bit", ranks - 1, seed)
    version = trainer.publish()
    engine.reach(version)
    # Bits that no swap has touched are the full attestation's to find.
    engine.call("deltawire_attest")
    assert engine.call("deltawire_attest")[0]["sound"]


def test_swaps_every_second_under_load_lose_no_request(engine, trainer, request):
    """Long variant: ``--load-seconds 600 -s``. Then memory must be flat too, in every process, and
    the figures are printed."""
    seconds = request.config.getoption("load_seconds")
    stop, failure = threading.Event(), []
    swaps = engine.status()["swaps"]

    def publish():
        try:
            while not stop.wait(1):
                trainer.publish()
        except BaseException as error:
            failure.append(error)

    resident, first = [], trainer.version
    publisher = threading.Thread(target=publish)
    publisher.start()
    began, asked, answered, seen = time.monotonic(), 0, 0, set()
    try:
        while time.monotonic() - began < seconds:
            questions = prompts(8, seed=asked, length=40)
            asked += len(questions)
            for answer in engine.generate(questions, tokens=48):
                assert len(answer.tokens) == 48
                assert answer.spans[0][1] == 0
                assert answer.spans[-1][2] == 48
                assert all(a[2] == b[1] for a, b in itertools.pairwise(answer.spans))
                assert all(a[0] < b[0] for a, b in itertools.pairwise(answer.spans))
                seen.update(span[0] for span in answer.spans)
                answered += 1
            resident.append(resident_bytes())
    finally:
        stop.set()
        publisher.join()
    assert failure == []
    assert answered == asked
    status = engine.reach(trainer.version)
    assert status["failure"] == ""
    assert engine.call("deltawire_attest")[0]["sound"]
    assert len(seen) > 1
    if seconds >= 60:
        half = len(resident) // 2
        growth = {
            process: max(held[process] for held in resident[half:])
            - max(held[process] for held in resident[:half])
            for process in resident[0]
        }
        figures = {
            "seconds": round(time.monotonic() - began),
            "versions": trainer.version - first,
            "versions_that_made_tokens": len(seen),
            "swaps": status["swaps"] - swaps,
            "requests": answered,
            "resident_mib_at_start_middle_end": {
                process: [resident[at][process] >> 20 for at in (0, half, -1)]
                for process in resident[0]
            },
            "growth_mib": {process: round(grown / 2**20, 1) for process, grown in growth.items()},
        }
        sys.stdout.write(json.dumps(figures, indent=1) + "\n")
        assert all(held.keys() == resident[0].keys() for held in resident)
        assert max(growth.values()) < 64 << 20


def resident_bytes():
    """The memory of this process and of each process that it started."""
    import psutil

    own = psutil.Process()
    return {
        f"{process.pid} {' '.join(process.cmdline())[:40]}": process.memory_info().rss
        for process in [own, *own.children(recursive=True)]
        if process.status() != psutil.STATUS_ZOMBIE
    }
