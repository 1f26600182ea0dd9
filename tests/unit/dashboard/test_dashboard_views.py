"""The summary, the screens and the report of a made-up run."""

import json
import random
import re
import subprocess
import sys
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from deltawire.dashboard import plots
from deltawire.dashboard.figures import BY_NAME, FIGURES
from deltawire.dashboard.live import LiveView, screen
from deltawire.dashboard.plots import bars
from deltawire.dashboard.report import page, write_report
from deltawire.dashboard.state import RunState
from deltawire.dashboard.status import RunStatus
from deltawire.dashboard.summary import FrozenBase, Summary, WorkerVerdict, summarize
from deltawire.events import (
    Evaluated,
    Event,
    Generated,
    Life,
    Published,
    Span,
    Step,
    Swapped,
    WarmStep,
)

HOSTILE = "<script>alert(1)</script>$x^2$&\"'[red]\x1b[31m"
FULL = 54_000_000
ROOT = Path(__file__).parents[3]


def trainer_events(versions: int, workers: list[str], chance: random.Random) -> list[Event]:
    events: list[Event] = [Life(process="trainer", at=0.0, role="trainer", what="started")]
    events += [
        WarmStep(process="trainer", at=float(n), step=n, loss=3 / (n + 1), accuracy=0.01 * n)
        for n in range(30)
    ]
    now = 35.0
    events.append(Span(process="trainer", activity="start", start=0.0, end=3.0))
    events.append(Span(process="trainer", activity="train", start=3.0, end=now))
    for version in range(versions + 1):
        bytes_delta = int(1.4e6 * chance.lognormvariate(0, 0.12)) if version else 0
        if version:
            waited, trained = chance.uniform(0, 0.4), chance.uniform(1.6, 2.4)
            events += [
                Span(process="trainer", activity="wait", start=now, end=now + waited),
                Span(
                    process="trainer", activity="train",
                    start=now + waited, end=now + waited + trained,
                ),
            ]  # fmt: skip
            now += waited + trained
            stale = [min(4, int(chance.expovariate(0.8))) for _ in range(16)]
            reward = 0.7 - 0.5 * 0.985**version + chance.gauss(0, 0.04)
            events.append(
                Step(
                    process="trainer", at=now, version=version, groups=16,
                    dropped=int(chance.random() < 0.05), reward_mean=reward, loss=0.02,
                    grad_norm=0.7, k3=chance.lognormvariate(-8, 0.5), ratio_max=1.4, clipped=0.01,
                    staleness=stale, tokens=18_000, seconds=trained, workers={workers[0]: 16},
                )
            )  # fmt: skip
        events.append(
            Published(
                process="trainer", at=now + 0.1, version=version, bytes_delta=bytes_delta,
                bytes_full=FULL, bytes_anchor=0 if version % 50 else 36_000_000, changed=300_000,
                elements=27_000_000, blocked_ms=chance.uniform(8, 14), encode_ms=30.0,
                upload_ms=55.0,
            )
        )  # fmt: skip
        events.append(Span(process="trainer", activity="publish", start=now, end=now + 0.12))
        now += 0.12
    return events


def worker_events(
    name: str, start: float, end: float, versions: int, chance: random.Random, *, supervised: bool
) -> list[Event]:
    events: list[Event] = [
        Life(process=name, at=start, role="worker", what="started", supervised=supervised),
        Span(process=name, activity="start", start=start, end=start + 8),
    ]
    now, sequence = start + 8, 0
    while now < end:
        version = min(versions, max(0, int((now - 35) / 2.32)))
        for activity, length in (
            ("sample", chance.uniform(1.2, 3)), ("swap", 0.015), ("wait", chance.uniform(0, 0.3)),
        ):  # fmt: skip
            events.append(Span(process=name, activity=activity, start=now, end=now + length))
            now += length
        events.append(
            Swapped(
                process=name, at=now, version=version, running=12,
                swap_ms=chance.uniform(3, 6), prepare_ms=chance.uniform(40, 70),
            )
        )  # fmt: skip
        for _ in range(6):
            events.append(
                Generated(
                    process=name, at=now, sequence=sequence, versions=[version], reward_mean=0.5,
                    tokens=1100,
                )
            )  # fmt: skip
            sequence += 1
    events.append(
        Life(
            process=name, at=now, role="worker", what="stopped" if supervised else "died",
            supervised=supervised,
        )
    )  # fmt: skip
    return events


def evaluator_events(versions: int, chance: random.Random) -> list[Event]:
    events: list[Event] = [Life(process="evaluator", at=2.0, role="evaluator", what="started")]
    for version in range(0, versions + 1, 10):
        at = 36 + version * 2.32
        accuracy = 0.78 - 0.5 * 0.984**version + chance.gauss(0, 0.012)
        events += [
            Span(process="evaluator", activity="evaluate", start=at, end=at + 9),
            Span(process="evaluator", activity="wait", start=at + 9, end=at + 23),
            Evaluated(
                process="evaluator", at=at + 9, version=version, accuracy=accuracy, problems=512,
                seconds=9.0,
            ),
        ]  # fmt: skip
    return events


def made_up_run(versions: int = 40, workers=("worker-0", "worker-1"), guest: str = HOSTILE):
    """A run as one would look, from second 0; ``guest`` joins by hand for the middle of it."""
    chance = random.Random(7)
    length = 35 + versions * 2.32
    events = trainer_events(versions, list(workers), chance)
    for name in workers:
        events += worker_events(name, 4.0, length, versions, chance, supervised=True)
    third = length / 3
    events += worker_events(guest, third, 2 * third, versions, chance, supervised=False)
    events += evaluator_events(versions, chance)
    state = RunState()
    state.add(events)
    verdicts = [
        *(
            WorkerVerdict(
                id=name, version=versions, bit_identical=True, supervised=True,
                groups=state.processes[name].groups,
            )
            for name in workers
        ),
        WorkerVerdict(id=guest, version=12, bit_identical=None, supervised=False, groups=40),
    ]  # fmt: skip
    summary = summarize(
        state, workers=verdicts, wall_s=length, bound=4, target_versions=versions,
        name="countdown-27m", seed=17,
        configuration={"learning rate": "1e-6", "groups a step": "16", "environment": "countdown"},
    )  # fmt: skip
    return state, summary


@pytest.fixture(scope="module")
def run() -> tuple[RunState, Summary]:
    return made_up_run()


def drawn(renderable, width: int) -> str:
    console = Console(width=width, height=30, record=True, force_terminal=True)
    with console.capture() as capture:
        console.print(renderable)
    return re.sub(r"\x1b\[[0-9;]*m", "", capture.get())


def test_report_json_holds_the_contract(run, tmp_path):
    state, summary = run
    write_report(summary, state, tmp_path / "report")
    data = json.loads((tmp_path / "report" / "report.json").read_bytes())
    assert data["format"] == 1
    assert data.keys() >= {
        "format", "wall_s", "versions", "heldout", "bytes", "staleness", "idle", "workers",
    }  # fmt: skip
    assert data["heldout"].keys() >= {"first", "last"}
    assert data["bytes"].keys() >= {"full", "delta_mean"}
    assert data["staleness"].keys() >= {"max", "mean", "bound"}
    assert data["idle"].keys() == {"trainer", "workers"}
    for worker in data["workers"]:
        assert worker.keys() >= {"id", "version", "bit_identical"}
    assert data["versions"] == 40
    assert data["bytes"]["full"] == FULL
    assert data["heldout"]["first"] == data["heldout"]["curve"][0][1]
    assert data["heldout"]["last"] == state.evaluated[40].accuracy
    sizes = [state.published[version].bytes_delta for version in range(1, 41)]
    assert data["bytes"]["delta_mean"] == pytest.approx(sum(sizes) / 40)
    assert 0 < data["idle"]["trainer"] < 0.3


def test_the_report_shows_the_base_and_the_layers_that_packing_changed_most(run):
    state, summary = run
    errors = {f"model.layers.{number}.mlp.experts.up_proj": number / 100 for number in range(20)}
    base = FrozenBase(digest="ab" * 16, packed="int4-g32", native=3, errors=errors)
    shown = page(msgspec.structs.replace(summary, base=base), state)
    assert "ab" * 16 in shown
    assert "3, without loss" in shown
    assert "layers.19.mlp" in shown
    assert "19.0 %" in shown
    assert "layers.11.mlp" not in shown
    assert "Frozen base" not in page(summary, state)


def test_the_report_draws_the_pairs_of_a_run_that_trains_on_them():
    """Of the eighth version no figure is known."""
    state, summary = made_up_run()
    assert "<h2>Pairs</h2>" not in page(summary, state)
    for version, step in state.steps.items():
        pairs = None if version == 8 else version % 7
        state.steps[version] = msgspec.structs.replace(step, pairs=pairs)
    shown = page(summary, state)
    assert "<h2>Pairs</h2>" in shown
    assert 'aria-label="Pairs"' in shown


def test_an_empty_run_has_a_summary_a_screen_and_a_report(tmp_path):
    state = RunState()
    summary = summarize(
        state, workers=[], wall_s=0.0, bound=4, target_versions=10, name="empty", seed=0
    )
    write_report(summary, state, tmp_path)
    data = json.loads((tmp_path / "report.json").read_bytes())
    assert data["heldout"]["first"] is None
    assert data["idle"] == {"trainer": None, "workers": None}
    assert "empty" in drawn(screen(summary, report="r"), 80)
    assert "starting" in drawn(LiveView(10, 4).render(state), 80)


class _Audit(HTMLParser):
    """Collects what a page could load or run."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.handlers: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value)
            if name in {"src", "href", "xlink:href", "srcset", "data", "action"}:
                self.links.append(value)
            if name.startswith("on"):
                self.handlers.append(name)


def test_report_html_refers_to_nothing_outside_and_runs_nothing(run):
    html = page(run[1], run[0])
    audit = _Audit()
    audit.feed(html)
    assert not audit.tags & {"script", "link", "iframe", "img", "object", "embed", "image"}
    assert not audit.handlers
    assert len(audit.ids) == len(set(audit.ids))
    assert audit.links
    assert all(link.startswith("#") and link[1:] in audit.ids for link in audit.links)
    assert "://" not in html
    assert set(re.findall(r"url\((.)", html)) <= {"#"}
    assert "@import" not in html
    assert html.count("<svg ") == 4
    assert len(html) < 1_000_000


def test_report_html_escapes_a_hostile_worker_id(run):
    html = page(run[1], run[0])
    assert "<script" not in html
    assert html.count("&lt;script&gt;") >= 2  # the table of workers and the timeline
    assert "\x1b" not in html


def test_placeholder_colors_are_all_replaced(run):
    assert "#fe00" not in page(run[1], run[0])


@pytest.mark.parametrize("width", [80, 100, 200])
def test_live_view_and_screen_fit_the_terminal(run, width):
    state, summary = run
    view = LiveView(40, 4, FULL, name="countdown-27m", clock=lambda: 130.0)
    live = drawn(view.render(state), width)
    for text in (live, drawn(screen(summary, report="/r.html"), width)):
        assert max(map(len, text.splitlines())) <= width
        assert len(text.splitlines()) <= 30
        assert "countdown-27m" in text
        assert re.search(r"\b\d\dx smaller", text)
        assert "<script>" in text  # as it is: neither markup nor an escape sequence
        assert "\x1b" not in text
    assert "by hand" in live


def test_live_view_shows_the_warm_start_before_training():
    state = RunState()
    state.add([WarmStep(process="trainer", at=1.0, step=120, loss=0.5, accuracy=0.43)])
    view = LiveView(300, 4, name="run", warm_steps=400, clock=lambda: 61.0)
    assert "warm start 120/400" in drawn(view.render(state), 80)
    assert view.plain_line(state) == "[1:00] warm start 120/400  loss 0.500  accuracy 43.0 %"


def test_both_views_say_why_a_process_keeps_dying_and_for_how_long():
    state = RunState()
    reason = "exit code 1: AttributeError: \x1b[31mno such name"
    lives = [("died", 1.0), ("restarted", 2.0), ("died", 3.0), ("restarted", 4.0)]
    state.add(
        [
            Life(process="trainer", at=at, role="trainer", what=what, detail=reason)
            for what, at in lives
        ]
    )
    view = LiveView(300, 4, name="run", clock=lambda: 10.0)
    said = "trainer died 2 times: exit code 1: AttributeError: "
    assert view.plain_line(state).startswith(f"[0:09] starting  {said}")
    for text in (view.plain_line(state), drawn(view.render(state), 200)):
        assert said in text
        assert "\x1b" not in text
    later = LiveView(300, 4, name="run", clock=lambda: 64.0)
    assert later.plain_line(state) == "[1:03] starting"


def test_plain_line_is_one_line_without_escapes(run):
    line = LiveView(40, 4, FULL, clock=lambda: 130.0).plain_line(run[0])
    assert line.isprintable()
    assert line.startswith("[2:10] version 40/40  held-out ")


def test_timeline_bars_keep_the_shares_of_spans_too_short_to_draw():
    spans = [
        Span(process="w", activity="sample", start=0.0, end=50.0),
        *(Span(process="w", activity="sample", start=50 + n, end=50.5 + n) for n in range(50)),
        *(Span(process="w", activity="wait", start=50.5 + n, end=51.0 + n) for n in range(50)),
    ]
    assert [tuple(bar) for bar in bars(spans, 0.0, 100.0, 10)] == [
        ("sample", 0, 5, 0.0, 1.0),
        ("sample", 5, 10, 0.0, 0.5),
        ("wait", 5, 10, 0.5, 1.0),
    ]


def test_importing_the_views_loads_neither_matplotlib_nor_torch():
    code = (
        "import sys, deltawire.dashboard.live, deltawire.dashboard.report; "
        "sys.exit(any(name in sys.modules for name in ('matplotlib', 'torch')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_rewards_have_their_own_axis_of_plain_numbers(run):
    state, _ = run
    drawn_figures = []
    real = plots._svg
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            plots, "_svg", lambda figure, name: drawn_figures.append(figure) or real(figure, name)
        )
        plots._accuracy(state)
    accuracy, reward = drawn_figures[0].axes
    assert accuracy.yaxis.get_major_formatter()(0.5) == "50 %"
    assert reward.yaxis.get_major_formatter()(0.5) == "0.5"
    assert len(accuracy.lines) == 1  # The curve of the accuracy, and nothing of the reward's.


@pytest.mark.parametrize("level", [0.0, 1.0])
def test_the_axis_of_accuracy_has_no_label_outside_0_to_100_percent(level):
    from matplotlib.figure import Figure

    axes = Figure().add_subplot()
    axes.plot([0, 1], [level, level])
    axes.margins(y=0.1)
    plots._keep_to_shares(axes)
    low, high = axes.get_ylim()
    assert low < level < high
    assert low > -0.01
    assert high < 1.01
    formatter = axes.yaxis.get_major_formatter()
    assert [formatter(value) for value in (-0.02, 0.0, 1.0, 1.02)] == ["", "0 %", "100 %", ""]


def test_version_marks_of_a_resumed_run_do_not_touch(run):
    """A run that slept for days has all its versions at the two ends of the timeline."""
    from matplotlib.figure import Figure

    state = RunState()
    for version in range(1, 41):
        at = 10.0 * version + (200_000.0 if version > 20 else 0.0)
        state.add(
            [
                Published(
                    process="trainer", at=at, version=version, bytes_delta=1, bytes_full=9,
                    bytes_anchor=0, changed=1, elements=9, blocked_ms=1.0, encode_ms=1.0,
                    upload_ms=1.0,
                )
            ]
        )  # fmt: skip
    axes = Figure().add_subplot()
    axes.set_xlim(0, 200_410)
    plots._mark_versions(axes, state, 0.0)
    ticks = sorted(axes.child_axes[0].get_xticks())
    assert len(ticks) >= 2
    room = plots.LABEL_SHARE * 200_410
    assert all(right - left >= room for left, right in pairwise(ticks))


def test_every_figure_of_the_table_is_written_exported_or_tracked():
    """A row that no view uses would be dead, and two rows of one name would shadow each other."""
    assert len(BY_NAME) == len(FIGURES)
    fields = set(RunStatus.__struct_fields__)
    views = "".join(
        (ROOT / f"src/deltawire/dashboard/{view}.py").read_text().replace("'", '"')
        for view in ("summary", "report", "live")
    )
    for row in FIGURES:
        shown = row.name in fields or f'"{row.name}"' in views
        assert shown or row.metric or row.tracked, row.name
        assert row.of(RunState()) is None
        assert row.text(None) == "—"


def test_before_the_first_step_the_views_say_how_much_is_sampled():
    state = RunState()
    view = LiveView(10, 4, name="run", clock=lambda: 9.0)
    state.add([Life(process="w0", at=0.0, role="worker", what="started")])
    assert view.plain_line(state) == "[0:09] starting"
    state.add([Span(process="w0", activity="sample", start=1.0, end=2.0)])
    assert view.plain_line(state) == "[0:09] sampling the first groups"
    sizes = enumerate((700, 600))
    state.add(
        [
            Generated(
                process="w0", at=3.0, sequence=number, versions=[0], reward_mean=0.0, tokens=tokens
            )
            for number, tokens in sizes
        ]
    )
    said = "sampling for the first step: 2 groups, 1,300 tokens stored"
    assert view.plain_line(state) == f"[0:09] {said}"
    assert said in drawn(view.render(state), 200)


def test_a_run_without_a_last_checkpoint_says_how_it_is_continued(run):
    state, summary = run
    words = "version 3 has no checkpoint"
    assert words not in drawn(screen(summary, report="r"), 200)
    summary = msgspec.structs.replace(summary, continues=words)
    assert words in drawn(screen(summary, report="r"), 200)
    assert words in page(summary, state)
