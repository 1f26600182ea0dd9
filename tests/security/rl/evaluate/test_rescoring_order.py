"""Log-probabilities are computed from version to version: going back would load an anchor again."""

import msgspec
import pytest
from granted_groups import made_up_group

from deltawire.config import RunConfig, TrainConfig
from deltawire.errors import RetryError
from deltawire.rl.control.rollout_buffer import BufferedGroup
from deltawire.rl.control.worker_guard import Verdict
from deltawire.rl.evaluate import rescoring as module
from deltawire.rl.evaluate.rescoring import Rescoring

LAG = 2
ARRIVALS = [(5,), (4,), (5, 6), (4, 5), (7,), (6,), (8,), (7, 8), (6, 8), (9,), (8, 10), (11,)]
"""The versions of each group's tokens, as two workers' groups arrive."""


class Scorer:
    """Says of each group which versions of the weights it asked for."""

    unjudged = ()

    def __init__(self, fault=None):
        self.loaded = []
        self.fault = fault

    def check_episodes(self, buffered, **_):
        return Verdict(buffered.group.worker, buffered.sequence)

    def logprobs(self, group, version):
        if self.fault is not None:
            raise self.fault
        if self.loaded[-1:] != [version]:
            self.loaded.append(version)
        return []

    def check_logprobs(self, buffered, found):
        return Verdict(buffered.group.worker, buffered.sequence, str(sorted(found)))

    def fails_here(self, worker, cause):
        return "failure", cause, False


def group_of(number, versions):
    group = made_up_group(number)
    for t in group.trajectories:
        t.versions_T[:] = versions[0]
        t.versions_T[len(t.versions_T) // 2 :] = versions[-1]
    return BufferedGroup(number, group)


def judged(monkeypatch, scorer, arrivals, *, idle_s=0.3):
    monkeypatch.setattr(Rescoring, "_open", lambda _: scorer)
    monkeypatch.setattr(module, "IDLE_S", idle_s)
    train = msgspec.structs.replace(TrainConfig(), max_staleness=LAG)
    rescoring = Rescoring(None, None, RunConfig(name="order", train=train))
    found = []
    try:
        for number, versions in enumerate(arrivals):
            assert rescoring.submit(group_of(number, versions), 0, number, "")
        for _ in range(1200):
            found += rescoring.verdicts()
            if len(found) == len(arrivals):
                break
            rescoring._closed.wait(0.1)
    finally:
        rescoring.close()
    return {verdict.sequence: verdict for verdict in found}, rescoring.error


def test_the_weights_move_forward_only(monkeypatch):
    scorer = Scorer()
    found, error = judged(monkeypatch, scorer, ARRIVALS)
    assert not error
    assert scorer.loaded == list(range(4, 12))
    assert {n: one.kind for n, one in found.items()} == {
        n: str(sorted(set(versions))) for n, versions in enumerate(ARRIVALS)
    }


def test_groups_are_judged_before_the_run_is_idle(monkeypatch):
    arrivals = [(n,) for n in range(8)]
    scorer = Scorer()
    monkeypatch.setattr(Rescoring, "_open", lambda _: scorer)
    train = msgspec.structs.replace(TrainConfig(), max_staleness=LAG)
    rescoring = Rescoring(None, None, RunConfig(name="order", train=train))
    found = []
    try:
        for number, versions in enumerate(arrivals):
            rescoring.submit(group_of(number, versions), 0, number, "")
        for _ in range(600):
            found += rescoring.verdicts()
            if len(found) == 8 - LAG:
                break
            rescoring._closed.wait(0.1)
    finally:
        rescoring.close()
    assert [verdict.sequence for verdict in found] == list(range(8 - LAG))


@pytest.mark.parametrize(
    ("fault", "kind"), [(ValueError("odd"), "failure"), (RetryError("no answer"), "[1]")]
)
def test_a_group_that_breaks_the_model_is_doubtful_and_a_silent_store_is_not(
    monkeypatch, fault, kind
):
    found, error = judged(monkeypatch, Scorer(fault), [(1,)])
    assert found[0].kind == kind
    assert str(fault) in error
