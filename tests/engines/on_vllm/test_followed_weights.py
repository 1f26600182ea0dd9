"""A vLLM that follows a run serves the trainer's bits, whatever fails."""

import itertools
import json
import shutil
import sys
import time

import pytest
from drills import (  # noqa: F401  (its tests are run here too)
    prompts,
    test_a_corrupt_blob_is_never_served_and_the_next_anchor_is_followed,
    test_a_failing_rank_holds_all_back_and_the_next_try_succeeds,
    test_a_swap_finds_a_flipped_bit_where_it_writes_and_repairs_it,
    test_no_prompt_uses_the_cache_of_older_weights,
    test_one_flipped_bit_is_found_on_the_rank_that_holds_it,
    test_swaps_every_second_under_load_lose_no_request,
    whole,
)
from engine import Engine
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
    question = prompts(1, seed=4)[0]
    began, answers = time.monotonic(), {}
    for _ in range(request.config.getoption("versions")):
        version = trainer.publish()
        deadline = time.monotonic() + 60
        while engine.status()["version"] != version:
            assert time.monotonic() < deadline, engine.status()
            answers |= engine.step_under_load(question)
        found = engine.attest()
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
    assert not engine.caches or cached
    figures = {
        "versions": request.config.getoption("versions"),
        "seconds": round(seconds, 1),
        "requests": len(answers),
        "requests_with_a_cached_prefix": cached,
        "versions_that_began_with_a_stale_prefix": len(stale),
        "requests_of_several_versions": sum(len(one.spans) > 1 for one in answers.values()),
    }
    sys.stdout.write(json.dumps(figures) + "\n")


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
