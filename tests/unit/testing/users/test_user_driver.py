"""Simulated users at a gateway, with OpenAI's client over loopback."""

import asyncio
import itertools
from types import SimpleNamespace

import pytest
from live_gateway import KEYS, TOKEN, live_serving, published

from deltawire.errors import InputError
from deltawire.testing.users import driver as driver_module
from deltawire.testing.users.driver import UserDriver
from deltawire.testing.users.population import Population, UserSettings
from deltawire.wire.receipts import read_receipt

QUICK = UserSettings(
    users=20, silence=0.2, duplicates=0.5, accept_delay_s=0.01, reject_delay_s=0.01,
    edit_delay_s=0.01,
)  # fmt: skip


def drive(tmp_path, monkeypatch, *, mode="tokens", token=TOKEN, **span):
    async def scenario():
        names = ["support"]  # A gateway refuses other names.
        async with live_serving(
            published(), tmp_path / "state", monkeypatch, model_names=names
        ) as gateway:
            gateway.fake.mode = mode
            population = Population(QUICK)
            run = gateway.recorder._run.id
            driver = UserDriver(
                f"http://127.0.0.1:{gateway.port}", token, population,
                claims=lambda text: read_receipt(text, keys=KEYS, run=run),
            )  # fmt: skip
            # A clock of its own, which a busy machine does not move: some thirty users come.
            ticks = itertools.count()
            clock = SimpleNamespace(monotonic=lambda: 0.001 * next(ticks))
            monkeypatch.setattr(driver_module, "time", clock)
            result = await driver.drive(**(span or {"rate": 60.0, "seconds": 0.5}))
            return result, await gateway.uploaded(), gateway.fake.seen

    return asyncio.run(scenario())


def test_every_answer_is_noted_and_every_report_is_stored_once(tmp_path, monkeypatch):
    result, (captures, reports), seen = drive(tmp_path, monkeypatch)
    counts = result.counts
    assert counts["asked"] == len(seen) == len(result.notes) > 10
    assert not counts["failed"]
    assert {bool(body.get("stream")) for body in seen} == {True, False}
    assert len(captures) == len(result.notes)
    assert {row.task for row in captures} == {note.kind for note in result.notes}
    assert all(row.user and row.cohort.startswith("week-") for row in captures)
    # The replica's answer has no style: nobody is satisfied, and whoever speaks rejects it.
    assert {(n.style, n.satisfaction, n.version) for n in result.notes} == {("", 0.0, 0)}
    spoke = [note for note in result.notes if note.reported]
    stored = [row for row in reports if row.source == "client"]
    assert len(stored) == counts["reports"] == len(spoke)
    assert counts["repeated"] > 0
    assert {row.kind for row in stored} == {note.reported for note in spoke}
    assert result.satisfaction() == 0.0
    assert result.satisfaction(since=1e9) != result.satisfaction(since=1e9)  # None: NaN.


@pytest.mark.parametrize("options", [{"mode": "error"}, {"token": "wrong"}])
def test_answers_that_fail_are_counted_and_end_nothing(tmp_path, monkeypatch, options):
    result, (captures, reports), _ = drive(tmp_path, monkeypatch, **options)
    assert result.counts["failed"] == result.counts["asked"] > 10
    assert not result.notes
    assert not captures
    assert not reports


def test_users_leave_where_there_is_no_place_or_wait_for_one(tmp_path, monkeypatch):
    """Users come faster than two at a time can be answered."""
    for name in ("AT_ONCE", "PATIENT_AT_ONCE"):
        monkeypatch.setattr(driver_module, name, 2)
    left, _, _ = drive(tmp_path / "left", monkeypatch, rate=1000.0, seconds=0.03)
    assert left.counts["turned_away"] == left.counts["asked"] - len(left.notes) > 0
    assert not left.counts["waited"]
    monkeypatch.setattr(driver_module, "AT_ONCE", 0)
    under_way, ask = [], UserDriver._ask

    def noted(self, request):
        under_way.append(self._asking)
        return ask(self, request)

    monkeypatch.setattr(UserDriver, "_ask", noted)
    waited, _, seen = drive(tmp_path / "waited", monkeypatch, rate=1000.0, requests=12)
    assert waited.counts["asked"] == len(waited.notes) == len(seen) == 12
    assert not waited.counts["turned_away"]
    assert waited.counts["waited"] > 0
    assert max(under_way) == 2
    assert waited.seconds > 0


def test_a_late_wake_up_makes_no_later_user_later(monkeypatch):
    """Users come every second; the first wakes up two and a half seconds late."""
    clock, asked = SimpleNamespace(now=0.0, late=2.5), []

    async def slept(seconds):
        if seconds > 0:
            clock.now, clock.late = clock.now + seconds + clock.late, 0.0
        await asyncio.tasks.sleep(0)

    async def asks(*_):
        asked.append(clock.now)

    stub = SimpleNamespace(**{**vars(asyncio), "sleep": slept})
    monkeypatch.setattr(driver_module, "asyncio", stub)
    monkeypatch.setattr(driver_module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(UserDriver, "_user", asks)
    population = Population(QUICK)
    monkeypatch.setattr(population, "arrivals", lambda _: iter([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]))
    driver = UserDriver("http://127.0.0.1:1", TOKEN, population)
    asyncio.run(driver.drive(rate=1.0, requests=5))
    assert asked[0] == 3.5
    assert driver.result.seconds == 5.0


def test_a_wrong_url_is_refused():
    with pytest.raises(InputError, match="http"):
        UserDriver("127.0.0.1:1", "t", Population(QUICK))
