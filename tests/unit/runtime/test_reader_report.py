"""Reports of pulls, relays and ranks of vLLM: their content, how often they come, and views."""

import dataclasses
import io
import json
import socket
import time
from datetime import timedelta

import numpy as np
import pytest
from rich.console import Console

from deltawire.cli.main import main
from deltawire.dashboard.readers import EVERY_S as LOOK_S
from deltawire.dashboard.readers import ReaderWatch, readers_card
from deltawire.dashboard.status import Watch
from deltawire.dashboard.status_view import view
from deltawire.errors import InputError, RetryError
from deltawire.launch import pull, relay
from deltawire.runtime import reader_report
from deltawire.runtime.reader_report import (
    EVERY_S,
    GONE_S,
    KEPT_S,
    SILENT_S,
    ReaderReporter,
    ReaderReports,
)
from deltawire.store import DelegatingBucket, open_bare_bucket, traffic
from deltawire.store.request_limit import note_refusal
from deltawire.sync import open_publisher
from deltawire.wire import keys


class Clock:
    """A clock that stands at some seconds after the machine's present time."""

    def __init__(self):
        self.began = time.time()
        self.later_s = 0.0

    def __call__(self):
        return self.began + self.later_s


class Places(DelegatingBucket):
    """Counts the writes to a bucket, and may refuse them."""

    def __init__(self, inner, error=None):
        super().__init__(inner)
        self.error = error
        self.puts = 0

    def put(self, key, data):
        self.puts += 1
        if self.error is not None:
            raise self.error
        self.inner.put(key, data)


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def bucket(tmp_path):
    with open_publisher(tmp_path / "run", {"a": np.ones(64, np.float32)}) as publisher:
        for value in (2, 3):
            publisher.publish({"a": np.full(64, value, np.float32)})
    return open_bare_bucket(tmp_path / "run")


@pytest.fixture
def make(bucket, clock, tmp_path):
    def made(kind="pull", **options):
        return ReaderReporter(bucket, kind, folder=tmp_path / "host", clock=clock, **options)

    return made


def readers(bucket, clock):
    """The reports in the bucket, and the readers of the only one."""
    (report,) = ReaderReports(bucket, clock=clock).poll()
    return {one.process: one for one in report.readers}


def test_a_late_reader_says_how_late_it_is_and_why(bucket, make, clock):
    reporter = make(name="late")
    reporter.holds(0)
    reporter.waits("the store does not answer")
    clock.later_s = 90.0
    assert reporter.report()
    found = readers(bucket, clock)["late"]
    assert (found.kind, found.version, found.lag) == ("pull", 0, 2)
    assert 90.0 <= found.late_s < 150.0
    assert found.reason == "the store does not answer"
    assert found.traffic.requests > 0
    (line,) = ReaderWatch(bucket, clock=clock).lines()
    assert line.state == "late"
    assert line.words.startswith("2 versions, 1")
    assert line.words.endswith("late: the store does not answer")
    reporter.holds(2)
    clock.later_s += EVERY_S
    assert reporter.report()
    found = readers(bucket, clock)["late"]
    assert (found.version, found.lag, found.late_s, found.reason) == (2, 0, 0.0, "")


def test_a_store_that_refuses_requests_is_the_reason(bucket, make, clock):
    note_refusal(bucket.url)
    reporter = make(name="refused")
    reporter.holds(0)
    reporter.report()
    assert "the store has refused requests" in readers(bucket, clock)["refused"].reason


def test_a_host_writes_one_object_a_minute_for_all_its_readers(bucket, make, clock):
    place = Places(bucket)
    one, other = (make(name=name, places=[place]) for name in ("one", "other"))
    assert one.report()
    assert not other.report()
    clock.later_s = EVERY_S - 5
    assert not one.report()
    assert place.puts == 1
    clock.later_s = EVERY_S
    assert other.report()
    assert not one.report()
    assert place.puts == 2
    assert readers(bucket, clock).keys() == {"one", "other"}
    assert bucket.list(keys.READERS) == [keys.readers(next(iter(hosts(bucket))))]
    assert one.report(ended=True)
    assert readers(bucket, clock)["one"].ended
    clock.later_s += GONE_S
    assert other.report()
    assert readers(bucket, clock).keys() == {"other"}
    third = make(name="third", places=[place])
    third.report()
    clock.later_s += GONE_S
    assert third.report()
    assert readers(bucket, clock).keys() == {"other", "third"}, "one that hangs is stated as silent"
    clock.later_s += SILENT_S
    assert third.report()
    assert readers(bucket, clock).keys() == {"third"}


def test_a_clock_that_goes_back_does_not_stop_reports(make, clock):
    clock.later_s = 86_400.0
    assert make(name="one").report()
    clock.later_s = 0.0
    assert make(name="one").report()


def test_a_reader_stays_as_late_as_it_is_if_the_next_manifest_is_replaced(bucket, make, clock):
    reporter = make(name="late")
    reporter.holds(0)
    clock.later_s = 5000.0
    reporter.report()
    late_s = readers(bucket, clock)["late"].late_s
    stored = bucket.head(keys.manifest(1))
    replaced = dataclasses.replace(stored, modified=stored.modified + timedelta(seconds=5000))
    reporter._bucket = Replaced(bucket, replaced)
    clock.later_s += EVERY_S
    assert reporter.report()
    assert readers(bucket, clock)["late"].late_s == pytest.approx(late_s + EVERY_S)


class Replaced(DelegatingBucket):
    """States another age of an object."""

    def __init__(self, inner, meta):
        super().__init__(inner)
        self.meta = meta

    def head(self, key):
        return self.meta if key == self.meta.key else self.inner.head(key)


def test_views_go_on_where_reports_may_not_be_read(bucket, make, clock):
    """Policies of earlier releases do not let views read them."""
    assert make(name="one").report()

    class Refusing(DelegatingBucket):
        def list_objects(self, prefix, *, after=None):
            raise InputError("403")

    watch = ReaderWatch(Refusing(bucket), clock=clock)
    assert watch.lines() == []
    assert watch.problems == ["reports of readers: 403"]


@pytest.mark.parametrize("wrong", [{"version": 10**400}, {"pid": 10**400}, {"at": -1.0}])
def test_numbers_out_of_range_are_refused(bucket, make, clock, wrong):
    assert make(name="one").report()
    (key,) = bucket.list(keys.READERS)
    stored = json.loads(bucket.get(key, limit=1 << 20))
    stored["readers"][0] |= wrong
    bucket.put(key, json.dumps(stored).encode())
    watch = ReaderWatch(bucket, clock=clock)
    assert watch.lines() == []
    assert key in watch.problems[0]


def test_the_newest_reports_of_a_bounded_number_of_hosts_are_read(bucket, make, clock, monkeypatch):
    monkeypatch.setattr(reader_report, "MAX_HOSTS", 2)
    assert make(name="one").report()
    (key,) = bucket.list(keys.READERS)
    stored = json.loads(bucket.get(key, limit=1 << 20))
    for host in ("h1", "h2", "h3"):
        bucket.put(keys.readers(host), json.dumps(stored | {"host": host}).encode())
    assert len(ReaderReports(bucket, clock=clock).poll()) == 2


def test_hosts_with_one_name_have_reports_of_their_own(bucket, make, tmp_path, monkeypatch):
    """By the machine's id, which stays; by that of the boot where a container has none."""
    system, boot = tmp_path / "machine-id", tmp_path / "boot_id"
    boot.write_text("e83897bf-eeae-405f-82bf-18fd39f4fbb2\n")
    monkeypatch.setattr(reader_report, "MACHINE_IDS", (system, boot))
    monkeypatch.setattr(socket, "gethostname", lambda: "node-1." + "x" * 80)
    for number, text in enumerate(["", "uninitialized\n", "ab" * 16, "cd" * 16, "ab" * 16]):
        system.write_text(text)
        assert make(name="one", places=[bucket]).report(ended=True)
        assert len(hosts(bucket)) == (1, 1, 2, 3, 3)[number]
    for host in hosts(bucket):
        assert host.startswith("node-1-xxx")
        assert "abab" not in host
        assert "e838" not in host
    boot.unlink()
    system.unlink()
    assert make(name="one", places=[bucket]).report(ended=True)
    assert len(hosts(bucket)) == 4
    assert min(hosts(bucket), key=len) == ("node-1-" + "x" * 80)[:54]


def hosts(bucket):
    return [keys.host_of(key) for key in bucket.list(keys.READERS)]


def test_a_reader_that_may_not_write_goes_on_without_a_report(bucket, make):
    refused = Places(bucket, InputError("the store refused"))
    reporter = make(places=[refused])
    assert not reporter.report()
    assert not reporter.report()
    assert refused.puts == 1


def test_no_place_is_not_the_default_place(bucket, make):
    """A relay that must not report gives an empty list."""
    assert not make("relay", places=[]).report()
    assert bucket.list(keys.READERS) == []


def test_a_relay_reports_to_its_destination_if_it_may_not_write_to_the_source(
    bucket, make, clock, tmp_path
):
    copy = open_bare_bucket(tmp_path / "copy", create=True)
    reporter = make("relay", name="r", places=[Places(bucket, InputError("refused")), copy])
    assert reporter.report()
    assert readers(copy, clock).keys() == {"r"}
    assert bucket.list(keys.READERS) == []


def test_a_store_that_does_not_answer_gets_the_next_report(bucket, make, clock):
    place = Places(bucket, RetryError("no answer"))
    reporter = make(places=[place])
    assert not reporter.report()
    place.error = None
    assert reporter.report()
    assert place.puts == 2


def test_a_folder_of_another_user_does_not_stop_the_report(bucket, clock, tmp_path):
    (tmp_path / "file").write_text("no folder")
    reporter = ReaderReporter(bucket, "pull", folder=tmp_path / "file", clock=clock)
    assert reporter.report()


def test_views_leave_out_old_reports_and_name_damaged_ones(bucket, make, clock):
    assert make(name="old").report()
    watch = ReaderWatch(bucket, clock=clock)
    assert [one.state for one in watch.lines()] == ["alive"]
    clock.later_s = GONE_S + 1
    assert [one.state for one in watch.lines()] == ["silent"]
    bucket.put(keys.readers("far"), b"{")
    clock.later_s += LOOK_S
    assert len(watch.lines()) == 1
    assert "readers/far.json" in watch.problems[0]
    clock.later_s = KEPT_S + 60
    assert watch.lines() == []


def test_status_log_and_report_show_readers_and_escape_what_they_say(bucket, make, clock, capsys):
    reporter = make(name="<b>x")
    reporter.holds(0)
    reporter.waits("<i>why\x1b[31m")
    clock.later_s = 70.0
    assert reporter.report()
    status = Watch(bucket, clock=clock).poll()
    (line,) = status.readers
    console = Console(width=200, file=io.StringIO(), record=True)
    console.print(view(status))
    shown = console.export_text()
    assert "<b>x" in shown
    assert "2 versions, " in shown
    assert "\x1b" not in shown
    card = readers_card([line])
    assert "&lt;b&gt;x" in card
    assert "<i>" not in card
    assert main(["log", bucket.url, "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["readers"]
    assert found["worker"].endswith("/<b>x")
    assert (found["version"], found["lag"]) == (0, 2)


@pytest.mark.parametrize("kind", ["pull", "relay"])
def test_commands_that_follow_report_themselves(bucket, tmp_path, monkeypatch, clock, kind):
    """The pull and the relay end when the first report is there."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    stored = []

    def until_reported(*_):
        if keys.READERS in " ".join(bucket.list("")):
            stored.append(True)
            raise KeyboardInterrupt
        time.sleep(0.02)
        return 0.0

    monkeypatch.setattr(pull.Checkout, "pause_s", property(until_reported))
    monkeypatch.setattr(relay.Relay, "step", _stepping(relay.Relay.step, until_reported))
    words = [kind, bucket.url, str(tmp_path / "copy"), "--follow"]
    assert main([*words]) == 130
    assert stored
    (found,) = readers(bucket, clock).values()
    assert (found.kind, found.version, found.ended) == (kind, 2, True)


def _stepping(step, until_reported):
    def stepping(self):
        done = step(self)
        if done is None:
            until_reported()
        return done

    return stepping


def test_requests_and_bytes_are_counted(tmp_path):
    bucket, before = open_bare_bucket(tmp_path / "b", create=True), traffic()
    bucket.put("a", b"12345")
    assert bucket.create("b", b"123")
    assert bucket.get("a", limit=9) == b"12345"
    assert bucket.get("none", limit=9) is None
    bucket.read_ranges("a", [(1, 2)])
    after = traffic()
    assert after.requests - before.requests == 5
    assert after.written_bytes - before.written_bytes == 8
    assert after.read_bytes - before.read_bytes == 7
