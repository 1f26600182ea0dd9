"""One worker cannot end a run by groups that look as if the reward were cheated."""

from __future__ import annotations

import random

import numpy as np
import pytest

from deltawire.config import ProbesConfig
from deltawire.errors import StoppedError
from deltawire.reward_monitor.evidence import evidence
from deltawire.reward_monitor.monitor import ALL, MAX_LEFT_OUT, Monitor
from deltawire.reward_monitor.watch import ProbeWatch
from deltawire.rl.control.rollout_buffer import BufferedGroup
from deltawire.store import open_bucket
from deltawire.wire.rollouts import Group, Trajectory

FORGED, HONEST = (1.0, 0.0), (1.0, 1.0)


def group(worker, pair, family="f"):
    """A group of one episode with (reward, probe)."""
    one = np.ones(1, np.int32)
    trajectory = Trajectory(
        one, -np.ones(1, np.float32), one, np.ones(1, np.uint8), pair[0], "stop",
        probes={"heldout": pair[1]},
    )  # fmt: skip
    return Group(worker, "n", "task", 1.0, np.ones(1, np.int32), [trajectory], family)


def flags(groups):
    monitor = Monitor(ProbesConfig())
    return [
        found.family
        for number, one in enumerate(groups)
        for found in monitor.add(one, number, version=number)
    ]


def test_groups_of_one_worker_among_several_flag_nothing():
    forged = [group("w6", FORGED, "g")] * 200
    mixed = [one for pair in zip(forged, [group("w0", HONEST)] * 200, strict=True) for one in pair]
    assert flags(mixed) == []
    assert flags([group("w0", HONEST), *forged]) == [], "also in a family of its own"


def test_cheating_that_two_workers_show_is_flagged():
    both = [group(f"w{number % 2}", FORGED) for number in range(60)]
    assert flags(both) == [ALL, "f"]


def test_the_only_worker_of_a_run_is_believed():
    assert flags([group("w0", FORGED)] * 30) == [ALL, "f"]


def test_a_run_that_stops_at_a_divergence_goes_on():
    watch = ProbeWatch(
        open_bucket("memory://", create=True), ProbesConfig(action="stop"), version=0,
        again=lambda _: [], record=lambda _: None,
    )  # fmt: skip

    def observe(*groups):
        for number, one in enumerate(groups):
            watch.observe([BufferedGroup(number, one)], version=1 + number)

    observe(group("w0", HONEST), *[group("w1", FORGED)] * 200)
    with pytest.raises(StoppedError):
        observe(*[group("w0", FORGED)] * 60)


@pytest.mark.parametrize("seed", range(5))
def test_what_remains_without_a_worker_is_what_others_show(seed):
    """Equal to a monitor that never saw the worker, if its first group shows an excess."""
    draw = random.Random(seed)
    groups = [group("w0", FORGED)]
    groups += [
        group(f"w{draw.randrange(3)}", (1.0, draw.choice([0.0, 1.0, 0.5]))) for _ in range(100)
    ]
    seen, unseen = Monitor(ProbesConfig()), Monitor(ProbesConfig())
    for number, one in enumerate(groups):
        seen.add(one, number, version=0)
        if one.worker != "w0":
            unseen.add(one, number, version=0)
    for found, other in zip(seen.state.streams, unseen.state.streams, strict=True):
        rest = found.without["w0"]
        assert rest.groups == other.groups
        assert evidence(rest.wealth, rest.groups) == pytest.approx(other.evidence, rel=1e-12)


def test_the_workers_that_are_left_out_are_bounded():
    monitor = Monitor(ProbesConfig())
    groups = [group(f"w{number}", FORGED) for number in range(4 * MAX_LEFT_OUT)]
    for number, one in enumerate(groups):
        monitor.add(one, number, version=0)
    assert all(len(one.without) == MAX_LEFT_OUT for one in monitor.state.streams)
