"""Rewards against probes in the live view, on the last screen, in the report, and read again."""

import json
import random
import re
from html.parser import HTMLParser

import numpy as np
import pytest
from rich.console import Console

from deltawire.config import ProbesConfig
from deltawire.dashboard.live import LiveView, screen
from deltawire.dashboard.probes import LIVE_ROWS, flags, whole
from deltawire.dashboard.probes_card import MAX_ROWS, probes_card
from deltawire.dashboard.report import page, write_report
from deltawire.dashboard.state import RunState
from deltawire.dashboard.summary import summarize
from deltawire.errors import RetryError
from deltawire.events import Diverged, Published, Step
from deltawire.launch.watching import ProbeTail
from deltawire.reward_monitor.monitor import ALL, Monitor, Point, ProbeState, ProbeStream
from deltawire.reward_monitor.watch import figures_of
from deltawire.store import open_bucket
from deltawire.wire import keys
from deltawire.wire.objects import encode_json
from deltawire.wire.rollouts import Group, Trajectory

HOSTILE = "<script>alert(1)</script>&\"'[red]\x1b[31m"


def group(rng, family, *, cheats, worker="w0"):
    """Four episodes whose probes are a held-out check and an alarm."""
    one = np.ones(1, np.int32)
    trajectories = []
    for _ in range(4):
        solved = float(rng.random() < 0.5)
        reward = 1.0 if cheats else solved
        probes = {"heldout_tests": solved, "alarm.tests_edited": float(cheats)}
        trajectories.append(
            Trajectory(
                one, -np.ones(1, np.float32), one, np.ones(1, np.uint8), reward, "stop",
                probes=probes,
            )
        )  # fmt: skip
    return Group(worker, "n", f"{family}-task", 1.0, one, trajectories, family)


def monitored(families, *, cheat="", after=20, groups=60, worker="w0"):
    """The events of a trainer's monitor in a run in which one family's groups start to cheat."""
    rng = random.Random(3)
    monitor = Monitor(ProbesConfig())
    for number in range(groups):
        family = families[number % len(families)]
        made = group(rng, family, cheats=family == cheat and number >= after, worker=worker)
        monitor.add(made, number, version=1 + number // 4)
    return monitor.state


def state_with(probes):
    state = RunState()
    for version in range(16):
        state.add([
            Published(
                process="trainer", at=10.0 + version, version=version, bytes_delta=1000,
                bytes_full=50_000, bytes_anchor=0, changed=10, elements=1000, blocked_ms=2.0,
                encode_ms=5.0, upload_ms=9.0,
            ),
            Step(
                process="trainer", at=10.0 + version, version=version + 1, groups=4, dropped=0,
                reward_mean=0.5, loss=0.1, grad_norm=1.0, k3=1e-4, ratio_max=1.1, clipped=0.0,
                staleness=[0, 1], tokens=100, seconds=1.0,
            ),
        ])  # fmt: skip
    state.probes = None if probes is None else figures_of(probes)
    return state


def summary_of(state):
    return summarize(
        state, workers=[], wall_s=16.0, bound=4, target_versions=16, name="run-3", seed=0
    )


def drawn(renderable, width=100):
    console = Console(width=width, height=30, record=True, force_terminal=True)
    with console.capture() as capture:
        console.print(renderable)
    return re.sub(r"\x1b\[[0-9;]*m", "", capture.get())


@pytest.fixture(scope="module")
def cheated():
    return monitored(["strings", "numbers", "lists"], cheat="strings", groups=120)


@pytest.fixture(scope="module")
def honest():
    return monitored(["strings", "numbers", "lists"])


def test_what_came_apart_is_first_with_rollouts_to_look_at(cheated):
    state = state_with(cheated)
    (stream,) = [s for s in cheated.streams if (s.family, s.probe) == ("strings", "heldout_tests")]
    newest = stream.examples[-1]
    html = page(summary_of(state), state)
    live = drawn(LiveView(16, 4, name="run-3", clock=lambda: 30.0).render(state))
    last = drawn(screen(summary_of(state), report="r.html"), 200)
    flag = stream.flagged_at
    assert re.search(rf"strings +heldout_tests .*APART at {flag}\b", live)
    assert f"strings heldout_tests since {flag}" in last
    assert f"strings, heldout_tests: look at {newest.name}" in live
    assert live.index("APART") < live.index("process")
    assert f"rollouts/{newest.worker}/{newest.sequence}</code>, episode {newest.episode}" in html
    assert html.index("Rewards came apart from probes") < html.index("<h2>Held-out accuracy</h2>")
    assert f"apart since version {stream.flagged_at}" in html


def test_only_what_came_apart_is_said_to_be(cheated):
    rows = dict(re.findall(r"<tr><td>([^<]*)</td><td><code>heldout_tests<.*?<td>(<span.*?)</td>",
        probes_card(figures_of(cheated))))  # fmt: skip
    assert "apart" in rows["strings"]
    assert "apart" in rows["all tasks"]
    assert "together" in rows["numbers"]
    assert "together" in rows["lists"]


def test_an_honest_run_raises_no_alarm_anywhere(honest):
    state = state_with(honest)
    summary = summary_of(state)
    view = LiveView(16, 4, name="run-3", clock=lambda: 30.0)
    assert not summary.probes.flagged
    for text in (drawn(view.render(state)), view.plain_line(state), page(summary, state)):
        assert "APART" not in text
        assert "came apart" not in text
        assert "rewards apart" not in text
    assert "rewards came apart from none, in 8 pairs" in drawn(screen(summary, report="r"))
    assert page(summary, state).count("</span> together</td>") == 8


def test_a_run_without_probes_shows_none(tmp_path):
    state = state_with(None)
    summary = summary_of(state)
    write_report(summary, state, tmp_path)
    assert json.loads((tmp_path / "report.json").read_bytes())["probes"] is None
    assert "against probes" not in page(summary, state)
    assert "probe" not in drawn(LiveView(16, 4, clock=lambda: 30.0).render(state))
    assert "probe" not in drawn(screen(summary, report="r"))


def test_the_line_for_a_log_names_what_came_apart(cheated):
    line = LiveView(16, 4, clock=lambda: 30.0).plain_line(state_with(cheated))
    assert line.isprintable()
    assert "rewards apart from probes: strings alarm.tests_edited since" in line
    assert len(flags(figures_of(cheated))) == 4


def test_report_json_has_what_the_command_prints(cheated, tmp_path):
    state = state_with(cheated)
    write_report(summary_of(state), state, tmp_path)
    probes = json.loads((tmp_path / "report.json").read_bytes())["probes"]
    assert probes["flagged"] == 4
    (row,) = [
        r for r in probes["streams"] if (r["family"], r["probe"]) == ("strings", "heldout_tests")
    ]
    assert row["groups"] == 40
    assert row["reward"] - row["value"] == pytest.approx(row["excess"])
    assert row["examples"][-1]["worker"] == "w0"
    assert "wealth" not in row


@pytest.mark.parametrize("width", [80, 100, 200])
def test_many_families_do_not_fill_the_screen(width):
    families = [f"a family with quite a long name, number {n}" for n in range(60)]
    state = state_with(monitored(families, cheat=families[7], after=0, groups=600))
    text = drawn(LiveView(16, 4, clock=lambda: 30.0).render(state), width)
    assert max(map(len, text.splitlines())) <= width
    assert f"and {122 - LIVE_ROWS} more" in text
    html = probes_card(summary_of(state).probes)
    assert html.count("<tr>") == MAX_ROWS + 1
    assert f"And {122 - MAX_ROWS} more" in html


class _Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.open = []
        self.seen = set()

    def handle_starttag(self, tag, attrs):
        self.seen.add(tag)
        assert not any(name.startswith("on") or name in ("src", "href") for name, _ in attrs)
        if tag != "path":
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.add(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_hostile_names_and_figures_stay_text():
    probes = monitored([HOSTILE], cheat=HOSTILE, after=0, groups=30, worker=HOSTILE)
    probes.streams[0].reward = probes.streams[0].value = -1.7e308
    probes.streams[0].points = [
        Point(version=1, groups=0, reward=1.0),
        Point(version=1, groups=1, reward=1.7e308, probe=-1.7e308, excess=1e300),
        Point(version=2, groups=10**30, reward=1.0),
    ]
    state = state_with(probes)
    card = probes_card(state.probes)
    audit = _Tags()
    audit.feed(card)
    assert audit.open == []
    assert "script" not in audit.seen
    assert "&lt;script&gt;" in card
    assert "nan" not in card
    assert "inf" not in card.replace("info", "")
    for text in (
        card,
        drawn(LiveView(16, 4, clock=lambda: 30.0).render(state)),
        LiveView(16, 4, clock=lambda: 30.0).plain_line(state),
        drawn(whole(state.probes)),
    ):
        assert "\x1b" not in text


def test_curves_are_drawn_of_groups_not_of_points():
    """A point that holds three groups is three times as wide as one that holds one."""
    one = ProbeStream(family=ALL, probe="p", number=1, groups=4, reward=1.0, excess=1.0)
    one.points = [Point(version=1, groups=3), Point(version=2, groups=1, reward=1.0, excess=1.0)]
    card = probes_card(figures_of(ProbeState(streams=[one])))
    (area,) = re.findall(r'<path d="(.*?)" fill="var\(--apart\)"', card)
    assert area == "M0.0,37.0L0.0,37.0L180.0,37.0L180.0,1.0L240.0,1.0L240.0,37.0Z"


class _Deaf:
    """A bucket that does not answer."""

    def get(self, key, *, limit):
        raise RetryError("cannot read", key=key)


def test_probes_are_read_again_and_neither_damage_nor_silence_ends_the_view(cheated):
    bucket = open_bucket("memory://")
    tail = ProbeTail(bucket)
    tail.read(now=True)
    assert tail.newest is None
    bucket.put(keys.PROBES, encode_json(ProbeState()))
    tail.read(now=True)
    assert tail.newest is None  # An environment that declares none.
    bucket.put(keys.PROBES, encode_json(cheated))
    tail.read()
    assert tail.newest is None  # Not yet time to.
    tail.read(now=True)
    assert tail.newest.flagged == 4
    tail._bucket = _Deaf()
    tail.read(now=True)
    assert tail.newest.flagged == 4
    tail._bucket = bucket
    bucket.put(keys.PROBES, encode_json(cheated)[:-9])
    tail.read(now=True)
    assert tail.newest is None


def test_the_event_identifies_its_process_as_the_trainer():
    state = RunState()
    state.add([
        Diverged(
            process="t", at=1.0, version=1, family="f", probe="p", groups=4, reward=1.0, value=0.0,
            excess=1.0, evidence=1e3,
        )
    ])  # fmt: skip
    assert state.processes["t"].role == "trainer"
