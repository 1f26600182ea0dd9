"""Drills that each engine that follows a run must pass.

Each engine's folder imports these tests. Its fixtures are ``engine``, which answers by
`generate(prompts, tokens=N)`, `status`, `reach`, `fail`, `attest` and `plant`, ``trainer``,
``ranks``, and ``start``, which starts another engine on a trainer's run.
"""

from __future__ import annotations

import itertools
import json
import sys
import threading
import time

import numpy as np
import pytest
from faults import STAGES
from shapes import VOCABULARY, Trainer, build

from deltawire.store import open_bucket


def prompts(count, *, length=70, seed=0):
    """Prompts of random tokens, long enough to fill blocks of the cache."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCABULARY, length).tolist() for _ in range(count)]


def whole(answer, version):
    """True if a single version made the answer."""
    return answer.spans == ((version, 0, len(answer.tokens)),)


def cover(answer):
    """True if the answer's spans cover its tokens in order."""
    return (
        answer.spans[0][1] == 0
        and answer.spans[-1][2] == len(answer.tokens)
        and all(a[2] == b[1] for a, b in itertools.pairwise(answer.spans))
    )


def test_no_prompt_uses_the_cache_of_older_weights(engine, trainer):
    if not engine.caches:
        pytest.skip("the engine caches no prefixes for this model here")
    question = prompts(1, seed=1)
    engine.generate(question)
    assert engine.generate(question)[0].cached >= 60
    version = trainer.publish()
    engine.reach(version)
    after = engine.generate(question)[0]
    assert after.cached == 0
    assert whole(after, version)
    assert engine.generate(question)[0].cached >= 60


def test_a_corrupt_blob_is_never_served_and_the_next_anchor_is_followed(engine, trainer):
    bucket = trainer.publisher.bucket
    engine.reach(trainer.version)
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


@pytest.mark.parametrize("stage", list(STAGES))
def test_a_failing_rank_holds_all_back_and_the_next_try_succeeds(engine, trainer, ranks, stage):
    engine.reach(trainer.version)
    question = prompts(2, seed=3)
    before, held = engine.generate(question), trainer.version
    weights = engine.plant("weigh")
    engine.plant("plant_failure", ranks - 1, stage)
    version = trainer.publish()
    engine.fail()
    status = engine.status()
    if status["version"] == held:
        assert engine.plant("weigh") == weights
        same = engine.generate(question, tokens=2)
        if all(whole(answer, held) for answer in same):
            assert [a.tokens for a in same] == [a.tokens[:2] for a in before]
    engine.reach(version)
    assert engine.plant("weigh") != weights


def test_one_flipped_bit_is_found_on_the_rank_that_holds_it(engine, trainer, ranks):
    engine.reach(trainer.version)
    weights = engine.plant("weigh")
    for seed in range(4):
        number = seed % ranks
        planted = next(answer for answer in engine.plant("plant_bit", number, seed) if answer)
        assert engine.plant("weigh") != weights
        found = engine.attest()
        assert not found["sound"]
        assert [answer["sound"] for answer in found["ranks"]] == [n != number for n in range(ranks)]
        assert planted["tensor"] in found["ranks"][number]["failure"]
        assert engine.plant("weigh") == weights
        assert engine.attest()["sound"]


def test_a_swap_finds_a_flipped_bit_where_it_writes_and_repairs_it(engine, trainer, ranks):
    for seed in range(100, 103):
        engine.plant("plant_bit", ranks - 1, seed)
    version = trainer.publish()
    engine.reach(version)
    # Bits that no swap has touched are the full attestation's to find.
    engine.attest()
    assert engine.attest()["sound"]


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
                assert cover(answer)
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
    assert engine.attest()["sound"]
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


@pytest.mark.parametrize("stage", ["die-prepare", "die-scatter", "die-readback"])
def test_a_killed_rank_costs_the_engine_and_the_next_one_serves_the_newest(
    stage, start, family, ranks, adapter, tmp_path
):
    bucket = open_bucket(str(tmp_path / "bucket"), create=True)
    trainer = Trainer(bucket, build(family, tmp_path / "model"), adapter=adapter)
    questions = prompts(2)
    engine = start(trainer)
    held = trainer.version
    right = engine.generate(questions)
    engine.plant("plant_failure", ranks - 1, stage)
    trainer.publish()
    given = []

    def go_on():
        for _ in range(1000):
            given.extend(zip(right, engine.generate(questions), strict=True))

    ends = r"(?i)dead|died|EngineCore|cancelled|refused|remote|reset|broken"
    with pytest.raises(Exception, match=ends):
        go_on()
    # Whatever was still answered, the old weights answered, and as they had before.
    for before, answer in given:
        assert whole(answer, held)
        assert (answer.tokens, answer.logprobs) == (before.tokens, before.logprobs)
    engine.abandon()
    following = start(trainer)
    try:
        status = following.status()
        assert status["version"] == trainer.version
        assert status["digest"] == trainer.publisher.digest.hex()
        assert following.attest()["sound"]
        assert following.generate(questions)[0].spans[0][0] == trainer.version
    finally:
        following.close()
        trainer.close()
