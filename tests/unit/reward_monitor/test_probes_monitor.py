"""Rewards held against probes: per family, per episode, kept in the bucket, acted upon."""

import json
import random

import numpy as np
import pytest

from deltawire.cli.main import main
from deltawire.config import ProbesConfig, parse_config
from deltawire.errors import CorruptError, InputError, RetryError
from deltawire.events import Diverged
from deltawire.reward_monitor import watch as watching
from deltawire.reward_monitor.monitor import ALL, MAX_EXAMPLES, MAX_POINTS, Monitor, excess
from deltawire.reward_monitor.watch import LOOK_BACK, ProbeWatch, read_probes
from deltawire.rl.control.rollout_buffer import BufferedGroup
from deltawire.store import open_bucket
from deltawire.wire import keys
from deltawire.wire.objects import encode_json
from deltawire.wire.rollouts import Group, Trajectory


def trajectory(reward, probes, *, episode=-1, cause=""):
    one = np.ones(1, np.int32)
    return Trajectory(
        one,
        -np.ones(1, np.float32),
        one,
        np.ones(1, np.uint8),
        reward,
        "stop",
        episode=episode,
        cause=cause,
        probes=probes,
    )


def group(pairs, family="f", worker="w", name="heldout"):
    """A group of episodes, each of (reward, probe)."""
    return Group(
        worker,
        "n",
        "task",
        1.0,
        np.ones(1, np.int32),
        [trajectory(reward, {name: probe}) for reward, probe in pairs],
        family,
    )


def stream(monitor, family, probe="heldout"):
    (found,) = [s for s in monitor.state.streams if (s.family, s.probe) == (family, probe)]
    return found


HONEST = [(1.0, 1.0), (0.0, 0.0), (1.0, 1.0), (0.0, 0.0)]
CHEATING = [(1.0, 0.0)] * 4


@pytest.mark.parametrize(
    ("name", "reward", "probe", "expected"),
    [
        ("heldout", 1.0, 1.0, 0.0),
        ("heldout", 1.0, 0.0, 1.0),
        ("heldout", 0.0, 1.0, 0.0),
        ("heldout", -3.0, -9.0, 1.0),
        ("alarm.tampered", 1.0, 1.0, 1.0),
        ("alarm.tampered", 0.0, 1.0, 0.0),
        ("alarm.tampered", 0.5, 0.5, 0.25),
        ("alarm.tampered", 1.0, -4.0, 0.0),
    ],
)
def test_the_excess_of_one_episode(name, reward, probe, expected):
    assert excess(name, reward, probe, 1.0) == expected


def test_a_family_that_cheats_is_flagged_and_named_and_no_other():
    monitor = Monitor(ProbesConfig())
    flagged = []
    for number in range(12):
        flagged += monitor.add(group(HONEST, "honest"), 2 * number, version=number + 1)
        flagged += monitor.add(group(CHEATING, "bad"), 2 * number + 1, version=number + 1)
    assert {s.family for s in flagged} == {"bad", ALL}
    bad = stream(monitor, "bad")
    assert bad.flagged_after <= 5
    assert bad.flagged_at == bad.flagged_after
    assert [e.name for e in bad.examples] == [f"w/{2 * n + 1}#0" for n in range(7, 12)]
    assert stream(monitor, "honest").flagged_at is None
    assert stream(monitor, "honest").examples == []
    assert monitor.suspect("bad")
    assert not monitor.suspect("honest")
    assert stream(monitor, "bad").means == (1.0, 0.0, 1.0)
    assert stream(monitor, "honest").means == (0.5, 0.5, 0.0)


def test_honest_policies_raise_no_alarm_over_many_seeds():
    """200 runs of 120 groups in four families, two probes; tasks of all difficulties, 3 % of the
    rewarded episodes miss the held-out tests, and 2 % pass only those. At a false-alarm rate of
    0.01 two of the runs may be flagged."""
    alarms = 0
    for seed in range(200):
        rng = random.Random(seed)
        monitor = Monitor(ProbesConfig())
        for number in range(120):
            ability = rng.random()
            pairs = []
            for _ in range(4):
                solved = rng.random() < ability
                missed = rng.random() < (0.03 if solved else 0.02)
                pairs.append((float(solved), float(solved != missed)))
            task = group(pairs, rng.choice("abcd"))
            alarms += bool(monitor.add(task, number, version=number))
    assert alarms <= 2


def test_segments_count_once_and_failed_episodes_not_at_all():
    monitor = Monitor(ProbesConfig())
    rows = [
        trajectory(1.0, {"heldout": 0.0}, episode=0),
        trajectory(1.0, {"heldout": 0.0}, episode=0),
        trajectory(1.0, {"heldout": 1.0}, episode=1),
        trajectory(0.0, {"heldout": 0.0}, episode=2, cause="the environment hung"),
        trajectory(1.0, {}, episode=3),
    ]
    prompt = np.ones(1, np.int32)
    monitor.add(Group("w", "n", "t", 1.0, prompt, rows, "f"), 0, version=1)
    assert stream(monitor, "f").means == (1.0, 0.5, 0.5)
    monitor.add(Group("w", "n", "t", 1.0, prompt, rows[4:], "f"), 1, version=1)
    assert stream(monitor, "f").groups == 1


def test_state_stays_small_however_long_the_run_and_however_many_the_names(monkeypatch):
    monitor = Monitor(ProbesConfig())
    for number in range(1000):
        monitor.add(group(CHEATING), number, version=number)
    found = stream(monitor, "f")
    assert len(found.points) <= MAX_POINTS
    assert sum(point.groups for point in found.points) == found.groups == 1000
    assert len(found.examples) == MAX_EXAMPLES
    monkeypatch.setattr("deltawire.reward_monitor.monitor.MAX_STREAMS", 10)
    for number in range(20):
        monitor.add(group(HONEST, f"family {number}"), number, version=1)
    assert len(monitor.state.streams) == 10
    assert monitor.state.untracked == 12


def test_downweighting_withholds_the_stated_share_of_one_family_only():
    monitor = Monitor(ProbesConfig(action="downweight", keep=0.25))
    assert not any(monitor.withholds(group(CHEATING, "bad"), n) for n in range(100))
    for number in range(10):
        monitor.add(group(CHEATING, "bad"), number, version=1)
        monitor.add(group(HONEST, "good"), number, version=1)
    cheated = [monitor.withholds(group(CHEATING, "bad"), n) for n in range(1000)]
    assert 700 < sum(cheated) < 800
    assert cheated == [monitor.withholds(group(HONEST, "bad"), n) for n in range(1000)]
    assert not any(monitor.withholds(group(CHEATING, "good"), n) for n in range(1000))
    for action in ("warn", "stop"):
        other = Monitor(ProbesConfig(action=action), monitor.state)
        assert not any(other.withholds(group(CHEATING, "bad"), n) for n in range(100))


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def watch(bucket, config, *, version=0, steps=None, record=None, clock=None):
    steps = steps or {}
    return ProbeWatch(
        bucket,
        config,
        version=version,
        again=steps.get,
        record=record or (lambda event: None),
        clock=clock or Clock(),
    )


def buffered(groups, start=0):
    return [BufferedGroup(start + n, g, "") for n, g in enumerate(groups)]


def test_a_restarted_trainer_continues_the_evidence():
    """At whatever step it dies, and however old the state in the bucket: as if it had not."""
    steps = {
        n: buffered([group(CHEATING if n % 3 == 0 else HONEST, "ab"[n % 2])], n)
        for n in range(1, 31)
    }
    whole = watch(open_bucket("memory://"), ProbesConfig())
    for step, taken in steps.items():
        whole.observe(taken, version=step)
    for death in (1, 7, 8, 20, 30):
        bucket, clock = open_bucket("memory://"), Clock()
        first = watch(bucket, ProbesConfig(), clock=clock)
        for step in range(1, death + 1):
            clock.now += 2.0
            first.observe(steps[step], version=step)
        stored = read_probes(bucket)
        assert stored is None or stored.version < death
        second = watch(bucket, ProbesConfig(), version=death, steps=steps)
        for step in range(death + 1, 31):
            second.observe(steps[step], version=step)
        assert encode_json(second.monitor.state) == encode_json(whole.monitor.state)


def test_state_of_a_step_that_was_never_committed_is_not_used():
    bucket = open_bucket("memory://")
    ahead = watch(bucket, ProbesConfig())
    ahead.observe(buffered([group(CHEATING)]), version=5)
    ahead.close()
    assert read_probes(bucket).version == 5
    back = watch(bucket, ProbesConfig(), version=4)
    assert back.monitor.state.streams == []
    assert watch(bucket, ProbesConfig(tolerance=0.1), version=5).monitor.state.streams == []


def test_groups_that_are_gone_leave_the_watch_standing():
    bucket = open_bucket("memory://")

    def again(step):
        raise CorruptError("a version has been pruned")

    found = ProbeWatch(bucket, ProbesConfig(), version=500, again=again, record=lambda event: None)
    assert found.monitor.state.version == 500
    assert found.monitor.state.since == 500 - LOOK_BACK


def test_a_divergence_is_recorded_once_with_rollouts_to_look_at():
    events = []
    found = watch(open_bucket("memory://"), ProbesConfig(), record=events.append)
    for step in range(1, 20):
        found.observe(buffered([group(CHEATING)], step), version=step)
    assert [(e.family, e.probe) for e in events] == [("*", "heldout"), ("f", "heldout")]
    assert all(isinstance(e, Diverged) for e in events)
    assert events[0].examples == [f"w/{n}#0" for n in range(1, events[0].version + 1)][-5:]
    assert events[0].excess == 1.0


def test_stopping_states_the_reason_and_lasts_until_cleared():
    bucket = open_bucket("memory://")
    found = watch(bucket, ProbesConfig(action="stop"))
    for step in range(1, 3):
        found.observe(buffered([group(CHEATING)], step), version=step)
    said = r"probe 'heldout' in all tasks together, for example in w/3#0, w/4#0, w/5#0"
    with pytest.raises(InputError, match=said):
        found.observe(buffered([group(CHEATING)] * 3, 3), version=3)
    found.close()
    version = read_probes(bucket).version
    with pytest.raises(InputError, match=r"probes\.action"):
        watch(bucket, ProbesConfig(action="stop"), version=version)
    assert watch(bucket, ProbesConfig(action="warn"), version=version).monitor.state.flagged


def test_a_store_that_does_not_answer_holds_nothing_up(monkeypatch):
    bucket, clock = open_bucket("memory://"), Clock()
    found = watch(bucket, ProbesConfig(), clock=clock)
    found.observe(buffered([group(HONEST)]), version=1)
    with monkeypatch.context() as patched:
        patched.setattr(
            type(bucket), "put", lambda *_: (_ for _ in ()).throw(RetryError("no answer"))
        )
        clock.now = 100.0
        found.observe(buffered([group(HONEST)]), version=2)
    assert read_probes(bucket) is None
    clock.now = 200.0
    found.observe(buffered([group(HONEST)]), version=3)
    assert read_probes(bucket).version == 2


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b'{"version": -1}',
        b'{"streams": [{"family": "f", "probe": "p", "number": 2}]}',
        b'{"streams": [{"family": "f", "probe": "p", "number": 1, "wealth": [1]}]}',
        b'{"format": 99}',
        b"[" * 100_000,
    ],
)
def test_a_damaged_state_is_reported_to_readers_and_replaced_by_the_trainer(data):
    bucket = open_bucket("memory://")
    bucket.put(keys.PROBES, data)
    with pytest.raises(CorruptError, match=keys.PROBES):
        read_probes(bucket)
    assert watch(bucket, ProbesConfig()).monitor.state.streams == []


def test_the_command_shows_families_examples_and_an_exit_code(tmp_path, capsys, monkeypatch):
    url = str(tmp_path)
    bucket = open_bucket(url, create=True)
    assert main(["probes", url]) == 2
    assert "there is no run" in capsys.readouterr().err
    monkeypatch.setattr("deltawire.launch.probes.read_run", lambda bucket: object())
    assert main(["probes", url]) == 2
    assert "no probes yet" in capsys.readouterr().err
    found = watch(bucket, ProbesConfig())
    found.observe(buffered([group(HONEST, "good"), group(HONEST, "odd\x1b[31m")]), version=1)
    found.close()
    assert main(["probes", url, "--json"]) == 0
    capsys.readouterr()
    for step in range(2, 20):
        found.observe(buffered([group(CHEATING, "bad"), group(HONEST, "good")], step), version=step)
    found.close()
    assert main(["probes", url]) == watching_exit_code()
    shown = capsys.readouterr().out
    assert "\x1b[31m" not in shown
    assert "APART at" in shown
    assert "rollouts/w/19, episode 0: reward 1, probe 0" in " ".join(shown.split())
    assert main(["probes", url, "--json"]) == watching_exit_code()
    plain = json.loads(capsys.readouterr().out)
    rows = {row["family"]: row for row in plain["streams"]}
    assert rows["bad"]["flagged_at"] is not None
    assert rows["good"]["flagged_at"] is None
    assert rows["bad"]["excess"] == 1.0
    assert plain["flagged"] == 2


def watching_exit_code():
    from deltawire.cli.probes import FLAGGED

    return FLAGGED


def test_the_section_is_checked():
    config = parse_config({"name": "r", "probes": {"action": "downweight"}}, source="t")
    assert config.probes == ProbesConfig(action="downweight")
    for key, value in (("action", "drop"), ("false_alarm", 0), ("tolerance", 1), ("keep", 0)):
        with pytest.raises(InputError, match=key):
            parse_config({"name": "r", "probes": {key: value}}, source="t")
    assert watching.WRITE_EVERY_S > 0
