"""A worker that dies ends the engine without a wrong token, and a new engine continues."""

import pytest
from engine import Engine, prompts
from shapes import Trainer, build

from deltawire.store import open_bucket


@pytest.mark.parametrize("stage", ["die-prepare", "die-scatter", "die-readback"])
def test_a_killed_worker_costs_the_engine_and_the_next_one_serves_the_newest(
    stage, family, ranks, parallel, tmp_path
):
    bucket = open_bucket(str(tmp_path / "bucket"), create=True)
    trainer = Trainer(bucket, build(family, tmp_path / "model"), adapter=parallel["adapter"])
    questions = prompts(2)
    engine = Engine(trainer.model, ranks=ranks, run=bucket.url, **parallel)
    held = trainer.version
    right = engine.generate(questions)
    engine.call("plant_failure", ranks - 1, stage)
    trainer.publish()
    given = []

    def go_on():
        for _ in range(1000):
            given.extend(zip(right, engine.generate(questions), strict=True))

    with pytest.raises(Exception, match=r"(?i)dead|died|EngineCore|cancelled"):
        go_on()
    # Whatever was still answered, the old weights answered, and as they had before.
    for before, answer in given:
        assert answer.spans == ((held, 0, len(answer.tokens)),)
        assert (answer.tokens, answer.logprobs) == (before.tokens, before.logprobs)
    engine.abandon()
    following = Engine(trainer.model, ranks=ranks, run=bucket.url, **parallel)
    try:
        status = following.status()
        assert status["version"] == trainer.version
        assert status["digest"] == trainer.publisher.digest.hex()
        assert following.call("deltawire_attest")[0]["sound"]
        assert following.generate(questions)[0].spans[0][0] == trainer.version
    finally:
        following.close()
        trainer.close()


def test_an_engine_that_cannot_open_its_run_reports_it_and_ends(family, ranks, tmp_path):
    """vLLM's own client would wait forever for a core that ended while starting."""
    empty = open_bucket(str(tmp_path / "empty"), create=True)
    with pytest.raises(Exception, match="there is no run"):
        Engine(build(family, tmp_path / "model"), ranks=ranks, run=empty.url)
