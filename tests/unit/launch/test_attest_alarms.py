"""A watch of an engine is an alarm of the run that it is compared with, and writes metrics."""

import json
import re
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import save_file

from deltawire.attest.verdicts import TensorVerdict, report_of
from deltawire.cli import attest
from deltawire.cli.main import main
from deltawire.dashboard.problems import problems_of
from deltawire.dashboard.readers import ReaderWatch
from deltawire.dashboard.status import Watch
from deltawire.launch.attest import note_found
from deltawire.launch.black_box.judging import BlackBoxReport
from deltawire.runtime import reader_report
from deltawire.store import open_bucket
from deltawire.sync import open_publisher


@pytest.fixture
def weights(tmp_path):
    """A run of two versions, and the folder in which an engine's weights lie."""
    served = tmp_path / "served"
    served.mkdir()
    with open_publisher(tmp_path / "run", {"a": np.ones(64, np.float32)}) as publisher:
        publisher.publish({"a": np.full(64, 2, np.float32)})
    return SimpleNamespace(run=str(tmp_path / "run"), served=served, folder=tmp_path)


def serve(weights, value):
    save_file({"a": np.full(64, value, np.float32)}, weights.served / "model.safetensors")


def watched(weights, monkeypatch, between, *options):
    """Watches for as many looks as ``between`` has calls, and one more."""
    left = list(between)

    def sleep(_):
        if not left:
            raise KeyboardInterrupt
        left.pop(0)()

    monkeypatch.setattr(attest, "time", SimpleNamespace(sleep=sleep))
    return main(["attest", str(weights.served), "--against", weights.run, "--watch", "9", *options])


@pytest.fixture
def reports(weights, monkeypatch):
    """Reports at once, and reads what the run says then."""
    monkeypatch.setattr(reader_report, "FIRST_S", 0.01)
    monkeypatch.setattr(reader_report, "EVERY_S", 0.05)
    monkeypatch.setattr(reader_report.tempfile, "gettempdir", lambda: str(weights.folder))
    original = reader_report.ReaderReporter.__init__

    def start(self, *arguments, **options):
        original(self, *arguments, **options | {"every_s": 0.05})
        made.append(self)

    made = []
    monkeypatch.setattr(reader_report.ReaderReporter, "__init__", start)
    bucket = open_bucket(weights.run)

    def read():
        if made:
            made[-1].report()
            reader_report.time.sleep(0.06)
            made[-1].report()
        found.append(
            ([one.alarm for one in ReaderWatch(bucket).lines()],
             [one.text for one in problems_of(Watch(bucket).poll()) if one.severity == "alarm"])
        )  # fmt: skip

    found = []
    return SimpleNamespace(read=read, found=found)


def test_other_weights_are_an_alarm_of_the_run_until_they_are_replaced(
    weights, reports, monkeypatch
):
    serve(weights, 1)

    def update():
        reports.read()
        serve(weights, 2)

    assert watched(weights, monkeypatch, [update, reports.read]) == 0
    (alarm,), problems = reports.found[0]
    assert "holds other weights than version 1 in 1 of 1 tensors: a" in alarm
    assert problems == [alarm]
    assert reports.found[1] == ([""], [])


def test_a_watch_stores_nothing_with_no_report(weights, reports, monkeypatch):
    serve(weights, 1)
    assert watched(weights, monkeypatch, [reports.read], "--no-report") == 5
    assert reports.found == [([], [])]


def test_a_look_writes_metrics(weights, tmp_path, capsys):
    from prometheus_client.parser import text_string_to_metric_families

    place = tmp_path / "attest.prom"
    command = ["attest", str(weights.served), "--against", f"{weights.run}@1", "--json"]
    for value, alarm in ((2, 0.0), (1, 1.0)):
        serve(weights, value)
        assert main([*command, "--prometheus", str(place)]) == (5 if alarm else 0)
        found = {
            (sample.name, sample.labels.get("verdict", "")): sample.value
            for family in text_string_to_metric_families(place.read_text())
            for sample in family.samples
        }
        assert found["deltawire_attest_alarm", ""] == alarm
        assert found["deltawire_attested", "differs"] == alarm
        assert found["deltawire_attested", "equal"] == 1 - alarm
        assert json.loads(capsys.readouterr().out)["equal"] is not bool(alarm)
    assert re.search(r'engine="[^"]*served"', place.read_text())
    assert place.stat().st_mode & 0o777 == 0o644, "node_exporter is another user"
    assert main([*command, "--prometheus", str(tmp_path / "no" / "a")]) == 2


def test_a_version_is_held_only_if_the_look_says_so():
    noted = []
    reporter = SimpleNamespace(alarms=lambda _: None, holds=noted.append, waits=noted.append)
    for equal in (True, False):
        odd = TensorVerdict(name="a", verdict="equal" if equal else "not readable")
        note_found(reporter, report_of("e", "r", [odd]), 7)
    for verdict in ("same", "cannot tell"):
        found = BlackBoxReport(
            endpoint="e", reference="r", verdict=verdict, error=0.1, sequences=1, tokens=1,
            noise=0.0, gaps={},
        )  # fmt: skip
        note_found(reporter, found, 8)
    unknown = "nothing tells which weights the engine holds"
    assert noted == [7, unknown, 8, unknown]


def test_a_watch_goes_on_if_a_later_look_cannot_be_announced(weights, monkeypatch, capsys):
    serve(weights, 1)
    place = weights.folder / "metrics"
    place.mkdir()

    def away():
        shutil.rmtree(place)
        serve(weights, 2)

    options = ["--no-report", "--prometheus", str(place / "attest.prom")]
    assert watched(weights, monkeypatch, [away, lambda: None], *options) == 0
    shown = capsys.readouterr()
    assert shown.err.count("cannot write") == 2
    assert "1 equal" in shown.out


def test_a_first_look_that_cannot_be_announced_is_shown(weights, capsys):
    serve(weights, 1)
    command = ["attest", str(weights.served), "--against", f"{weights.run}@1"]
    assert main([*command, "--prometheus", str(weights.folder / "no" / "a")]) == 2
    assert "1 differs" in capsys.readouterr().out
