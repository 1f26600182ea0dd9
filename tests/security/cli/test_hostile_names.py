"""Names that a bucket's writers choose neither steer a terminal nor become markup, anywhere."""

from __future__ import annotations

import logging
import re
import time
from contextlib import closing
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from heartbeats import put_heartbeat

import deltawire
from deltawire import codec
from deltawire.cli.exit_codes import FLAGGED
from deltawire.cli.main import main
from deltawire.dashboard.exporter import RunCollector
from deltawire.dashboard.status import Watch
from deltawire.display import legible, safe_json, safe_line
from deltawire.errors import CorruptError
from deltawire.events import Evaluated, Generated, Life, Published, Span, Step, encode_lines
from deltawire.launch.progress import bars
from deltawire.reward_monitor.monitor import Example, Point, ProbeState, ProbeStream
from deltawire.store import Bucket, open_bucket
from deltawire.sync import Publisher, create_run
from deltawire.sync.follow.mirror import Mirror
from deltawire.testing import tiny
from deltawire.wire import keys
from deltawire.wire.objects import encode_json
from deltawire.wire.run import Run, TensorSpec
from deltawire.wire.status import TrainerStatus

CONTROLS = {
    "CSI": "\x1b[2J\x1b[31m",
    "OSC title": "\x1b]0;owned\x07",
    "OSC link": "\x1b]8;;http://evil\x1b\\",
    "C1 CSI": "\x9b31m",
    "backspace": "a\x08\x08b",
    "carriage return": "real\rfake",
    "new line": "one\nerror: two",
    "delete": "\x7f",
    "bidi override": "\u202egnp.exe",
    "bidi isolate": "\u2067abc",
    "zero width": "a\u200bb",
    "line separator": "a\u2028b",
    "lone surrogate": "\ud800",
    "tag": "\U000e0041",
}
SHORT = "\x1b[2J\x9b1m\u202e"
MARKUP = "[red]:bomb:<b onclick=x>"
NAME = SHORT + MARKUP
"""Fits into the narrowest columns."""


class Elements(HTMLParser):
    """Collects the elements of a page and their attributes' names."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, list[str]]] = []

    def handle_starttag(self, tag, attrs) -> None:
        self.found.append((tag, [name for name, _ in attrs]))


def is_inert(text: str) -> bool:
    return all(letter.isprintable() or letter == "\n" for letter in text)


@pytest.mark.parametrize("text", CONTROLS.values(), ids=CONTROLS)
def test_the_helper_leaves_nothing_that_a_terminal_obeys(text) -> None:
    assert legible(text, 100).isprintable()
    assert safe_line(f"before {text} after").isprintable()
    assert str(CorruptError(text, key=text, hint=text)).isprintable()
    if text != CONTROLS["lone surrogate"]:  # JSON of the wire holds none.
        assert safe_json({text: [text]}).isascii()
        assert safe_json({text: [text]}).isprintable()


def test_no_module_has_a_filter_of_its_own() -> None:
    root = Path(deltawire.__file__).parent
    own = [path for path in root.rglob("*.py") if '"·" for' in path.read_text(encoding="utf-8")]
    assert own == [root / "display.py"]


def _events(now: float) -> list:
    def step(version: int) -> list:
        return [
            Published(
                process=NAME, at=now - 9 + version, version=version, bytes_delta=10,
                bytes_full=100, bytes_anchor=0, changed=1, elements=10, blocked_ms=1.0,
                encode_ms=1.0, upload_ms=1.0,
            ),
            Step(
                process=NAME, at=now - 9 + version, version=version, groups=1, dropped=1,
                reward_mean=0.5, loss=0.1, grad_norm=1.0, k3=1e-4, ratio_max=1.1, clipped=0.0,
                staleness=[0], tokens=10, seconds=1.0, workers={NAME: 1}, causes={NAME: 2},
                failures={NAME: 1},
            ),
        ]  # fmt: skip

    lives = [
        Life(process=NAME, at=now - 30, role="worker", what=what, host=NAME, detail=NAME)
        for what in ("started", "died", "restarted")
    ]
    sampled = Generated(
        process=NAME, at=now - 5, sequence=0, versions=[0], reward_mean=1.0, tokens=5, failed=1,
        cause=NAME,
    )  # fmt: skip
    spans = [
        Span(process=name, activity="sample", start=now - 20, end=now - 10)
        for name in (NAME, f"{NAME}$x^2$", "$\\frac$")
    ]
    evaluated = Evaluated(process=NAME, at=now, version=1, accuracy=0.5, problems=2, seconds=1.0)
    return [*lives, *step(1), *step(2), sampled, *spans, evaluated]


@pytest.fixture(scope="module")
def bucket(tmp_path_factory) -> Bucket:
    """A run in which every text that a writer may choose is hostile."""
    folder = tmp_path_factory.mktemp("hostile") / "bucket"
    found = open_bucket(str(folder), create=True)
    tensors = [TensorSpec(NAME, (4,), "BF16")]
    bits = {NAME: np.zeros(4, codec.unsigned_of("BF16"))}
    config = {
        "name": "seen",
        "model": {"path": NAME},
        "task": {"dataset": NAME, "options": {NAME: NAME}},
        "train": {"versions": 9},
    }
    run = Run(
        id="ab" * 16,
        name=NAME[:64],
        created_at=time.time(),
        tensors=tensors,
        digest=codec.digest_model(bits).hex(),
        config=config,
    )
    create_run(found, run)
    with closing(Publisher(found, run, Mirror(bits, -1, codec.ZERO), epoch=0)) as publisher:
        publisher.publish(bits)
    now = time.time()
    found.put(keys.events("trainer-a", 0), encode_lines(_events(now)))
    put_heartbeat(found, "w0", at=now, host=NAME, doing=NAME[:32], nonce="n")
    status = TrainerStatus(
        phase="training", version=0, digest="", epoch=1, credits={NAME: 7}, at=now
    )
    found.put(keys.TRAINER, encode_json(status))
    example = Example(
        worker=NAME, sequence=0, episode=0, task=NAME, reward=1.0, probe=0.0, version=1
    )
    stream = ProbeStream(
        family=NAME, probe=NAME, number=1, groups=1, reward=1.0, excess=1.0, flagged_at=1,
        flagged_after=1, points=[Point(version=1, groups=1, reward=1.0)], examples=[example],
    )  # fmt: skip
    found.put(keys.PROBES, encode_json(ProbeState(version=2, streams=[stream])))
    _plant_objects(folder, "[red]:bomb:")
    return found


PLACES = ("heartbeats", "events", "rollouts", "weights/manifests", "weights/blobs")


def _plant_objects(folder: Path, name: str) -> None:
    """Put objects whose keys no command of deltawire writes."""
    for place in PLACES:
        (folder / place).mkdir(parents=True, exist_ok=True)
        (folder / place / f"{name}.json").write_bytes(b"\x1b[31m{")


@pytest.mark.parametrize("json", [False, True], ids=["text", "json"])
@pytest.mark.parametrize("command", ["status", "log", "fsck", "report", "probes"])
def test_commands_print_hostile_names_inertly(command, json, bucket, tmp_path, capfd) -> None:
    words = [command, bucket.url.removeprefix("file://")]
    words += ["--out", str(tmp_path)] if command == "report" else []
    words += ["--json"] if json else []
    code = main(words)
    captured = capfd.readouterr()
    assert code in (0, 3, FLAGGED), captured.err
    assert captured.out.strip()
    assert is_inert(captured.out)
    assert is_inert(captured.err)
    if json:
        assert captured.out.isascii()
    elif command in ("status", "report", "probes"):
        # Not taken for markup: rich would drop a tag, and draw an emoji.
        assert "[red]:bomb:" in re.sub(r"\s", "", captured.out)
    if command == "report":
        _check_report(tmp_path)


@pytest.mark.parametrize("command", ["status", "log", "fsck", "report"])
def test_an_object_whose_key_holds_a_control_sequence_is_named_inertly(
    command, tmp_path, capfd
) -> None:
    bucket = open_bucket(str(tmp_path / "bucket"), create=True)
    tiny.start_run(bucket)
    _plant_objects(tmp_path / "bucket", NAME.replace("/", ""))
    main([command, str(tmp_path / "bucket")])
    captured = capfd.readouterr()
    assert "error: " in captured.err
    assert is_inert(captured.out + captured.err)


def _check_report(folder: Path) -> None:
    text = (folder / "report.json").read_text(encoding="utf-8")
    assert text.isascii()
    assert is_inert(text)
    html = (folder / "report.html").read_text(encoding="utf-8")
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", html)
    elements = Elements()
    elements.feed(html)
    assert "b" not in {tag for tag, _ in elements.found}
    assert "script" not in {tag for tag, _ in elements.found}
    assert not [name for _, names in elements.found for name in names if name.startswith("on")]
    assert "&lt;b onclick=x&gt;" in html


def test_metrics_hold_hostile_names_inertly(bucket) -> None:
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry()
    registry.register(RunCollector(Watch(bucket), every_s=0.0))
    text = generate_latest(registry).decode()
    assert is_inert(text), [line for line in text.split("\n") if not line.isprintable()]


def test_lines_above_progress_bars_and_descriptions_are_inert(capfd) -> None:
    with bars(hidden=True) as bar:
        bar.begin(NAME, 1)
        bar.log(f"{NAME} is skipped")
    captured = capfd.readouterr()
    assert "[red]:bomb:" in captured.err
    assert is_inert(captured.out + captured.err)


def test_errors_and_wrong_arguments_are_inert(tmp_path, capfd) -> None:
    hostile = str(tmp_path / NAME.replace("/", ""))
    assert main(["status", hostile]) == 2
    with pytest.raises(SystemExit):
        main(["status", hostile, NAME])
    with pytest.raises(SystemExit):
        main([NAME])
    captured = capfd.readouterr()
    assert captured.err
    assert is_inert(captured.out + captured.err)


def test_the_logs_of_serving_name_no_more_than_a_type(caplog) -> None:
    from deltawire.serving.app import _OneLineLogger

    with caplog.at_level(logging.ERROR):
        try:
            raise ValueError(NAME)
        except ValueError:
            _OneLineLogger("deltawire.serving.http").exception("while handling %s", NAME)
    assert "ValueError" in caplog.text
    assert is_inert(caplog.text)
