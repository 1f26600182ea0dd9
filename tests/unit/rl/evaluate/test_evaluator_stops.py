"""An evaluator that is asked to stop gives up what it measures, which may take minutes more."""

import asyncio
from functools import partial

import pytest

from deltawire.rl.evaluate.evaluator import _beat
from deltawire.rl.rollout.episode import play_all
from deltawire.runtime.process import Process, StopAskedError
from deltawire.store import open_bucket


class EndlessEngine:
    def __init__(self, process):
        self.process, self.steps = process, 0

    async def advance(self):
        self.steps += 1
        if self.steps == 3:
            self.process.stop()
        if self.steps > 100:
            raise AssertionError("it goes on")
        await asyncio.sleep(0)


def test_a_measurement_ends_after_the_step_in_which_it_is_asked_to_stop():
    process = Process(open_bucket("memory:///"), "evaluator", "evaluator", supervised=False)
    engine = EndlessEngine(process)

    async def endless():
        await asyncio.Event().wait()

    with pytest.raises(StopAskedError):
        asyncio.run(
            play_all(
                engine,
                [endless] * 4,
                concurrent=2,
                after_step=partial(_beat, process, "evaluate"),
            )
        )
    assert engine.steps == 3
