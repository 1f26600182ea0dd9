"""``deltawire status``: what it shows of a run, of what is left of one, and of none."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from heartbeats import make_heartbeat, put_heartbeat
from rich.console import Console

from deltawire.cli.main import main
from deltawire.dashboard.status import RunStatus, Watch, failures_by_cause
from deltawire.dashboard.status_view import view
from deltawire.errors import CorruptError, InputError, RetryError
from deltawire.estimates import BudgetScore
from deltawire.events import (
    Evaluated,
    Event,
    Generated,
    Life,
    Published,
    Served,
    Span,
    Step,
    Swapped,
    encode_lines,
)
from deltawire.store import Bucket, RetryingBucket, RetryPolicy, open_bare_bucket, open_bucket
from deltawire.sync import create_run
from deltawire.testing.faulty import FaultyBucket
from deltawire.wire import keys
from deltawire.wire.captures import GatewayState
from deltawire.wire.objects import encode_json
from deltawire.wire.run import Run, TensorSpec
from deltawire.wire.status import Heartbeat, TrainerStatus

NOW = 1_000_000.0
CONFIG = {"name": "seen", "model": {"path": "m"}, "train": {"versions": 9, "max_staleness": 3}}


def beat(name: str, role: str, *, age_s: float = 1.0, **changes) -> Heartbeat:
    return make_heartbeat(name, role, at=NOW - age_s, **changes)


def step(version: int, staleness: list[int], queued: list[int]) -> Step:
    return Step(
        process="trainer",
        at=NOW - 20 + version,
        version=version,
        groups=len(staleness),
        dropped=1,
        reward_mean=0.5,
        loss=0.0,
        grad_norm=1.0,
        k3=1e-7 * version,
        ratio_max=1.5,
        clipped=0.0,
        staleness=staleness,
        tokens=100,
        seconds=0.5,
        queued=queued,
        causes={"stale": 1} if version > 1 else {},
    )


def events_of_a_run() -> dict[str, list[Event]]:
    published = [
        Published(
            process="trainer",
            at=NOW - 20 + version,
            version=version,
            bytes_delta=1000,
            bytes_full=50_000,
            bytes_anchor=0,
            changed=10,
            elements=1000,
            blocked_ms=2.0,
            encode_ms=1.0,
            upload_ms=1.0,
        )
        for version in (1, 2, 3)
    ]
    trainer = [
        Life(process="trainer", at=NOW - 30, role="trainer", what="started"),
        Span(process="trainer", activity="train", start=NOW - 19, end=NOW - 18.5),
        Span(process="trainer", activity="wait", start=NOW - 18.5, end=NOW - 17),
        *published,
        step(1, [0, 0], [0, 0]),
        step(2, [1, 1], [1, 0]),
        step(3, [2, 3], [2, 1]),
    ]
    worker = [
        Life(process="w0", at=NOW - 30, role="worker", what="started"),
        Swapped(process="w0", at=NOW - 18, version=1, running=3, swap_ms=4.0, prepare_ms=1.0),
        Span(process="w0", activity="sample", start=NOW - 19, end=NOW - 17),
        *(
            Generated(
                process="w0",
                at=NOW - 20 + 5 * number,
                sequence=number,
                versions=[0],
                reward_mean=1.0,
                tokens=50,
                failed=number,
                cause="took longer than 5 s" if number else "",
            )
            for number in range(3)
        ),
    ]
    supervisor = [
        Life(
            process="w0",
            at=NOW - 40,
            role="worker",
            what="died",
            detail="killed: no sign of life for 31 s",
        )
    ]
    return {"trainer-a": trainer, "w0-a": worker, "supervisor-1": supervisor}


@pytest.fixture
def bucket(tmp_path) -> Bucket:
    found = open_bucket(str(tmp_path / "bucket"), create=True)
    tensors = [TensorSpec(name="a", dtype="BF16", shape=(4,))]
    create_run(
        found,
        Run(
            id="ab" * 16,
            name="seen",
            created_at=0.0,
            tensors=tensors,
            digest="0" * 32,
            config=CONFIG,
        ),
    )
    for series, events in events_of_a_run().items():
        found.put(keys.events(series, 0), encode_lines(events))
    put_heartbeat(found, "trainer", "trainer", at=NOW - 1)
    put_heartbeat(found, "w0", at=NOW - 1, version=1, lag=2, stored=3)
    status = TrainerStatus(
        phase="training", version=3, digest="", epoch=1, credits={"w0": 7, "gone": 9}, at=NOW
    )
    found.put(keys.TRAINER, encode_json(status))
    return found


def look(bucket: Bucket) -> RunStatus:
    return Watch(bucket, clock=lambda: NOW).poll()


def shown(status: RunStatus, width: int = 100) -> str:
    console = Console(width=width, record=True, file=Path("/dev/null").open("w"))  # noqa: SIM115
    with console.file:
        console.print(view(status))
        return console.export_text()


def test_every_figure(bucket) -> None:
    found = look(bucket)
    assert (found.phase, found.target, found.steps_per_minute) == ("training", 9, 60.0)
    stale = found.staleness
    assert (stale.bound, stale.total.max, stale.in_flight.max, stale.queued.max) == (3, 3, 2, 2)
    assert stale.total.mean == pytest.approx(7 / 6)
    assert stale.in_flight.mean == pytest.approx(3 / 6)
    assert stale.queued.mean == pytest.approx(4 / 6)
    assert found.trainer_idle == pytest.approx(0.75)
    assert found.workers_idle == 0
    assert found.tokens_trained_per_s == pytest.approx(100)
    assert found.tokens_generated_per_s == pytest.approx(10)
    assert found.groups_per_s == pytest.approx(0.2)
    assert found.update_latency_ms == found.update_latency_p95_ms == found.update_latency_last_ms
    assert (found.bytes_per_version, found.bytes_full, found.swap_ms) == (1000, 50_000, 4.0)
    assert (found.k3, found.k3_max, found.ratio_max) == pytest.approx((2e-7, 3e-7, 1.5))
    assert found.groups_in_flight == 4
    assert found.failures == {
        "episode: took longer than 5 s": 3,
        "group dropped: stale": 2,
        "group dropped": 1,
        "worker killed: no sign of life": 1,
    }
    assert found.problems == []
    states = {line.name: (line.role, line.state) for line in found.processes}
    assert states == {"trainer": ("trainer", "alive"), "w0": ("worker", "alive")}
    text = shown(found)
    for word in ("in flight", "queued", "trainer 75 %", "50x smaller", "took longer than 5 s"):
        assert word in text


@pytest.mark.parametrize(
    ("of", "state", "phase"),
    [
        (beat("trainer", "trainer", age_s=31), "silent", "trainer silent"),
        (beat("trainer", "trainer", quiet_s=6), "stalled", "trainer stalled"),
        (
            beat("trainer", "trainer", ended=True, age_s=NOW),
            "ended",
            "training",
        ),
    ],
)
def test_a_trainer_without_signs_of_life_is_distinguished(bucket, of, state, phase) -> None:
    bucket.put(keys.heartbeat("trainer"), encode_json(of))
    found = look(bucket)
    assert next(line.state for line in found.processes if line.name == "trainer") == state
    assert found.phase == phase


@pytest.mark.parametrize(
    ("build", "words", "problems"),
    [
        ("0.1.0", "build: 0.1.0", []),
        ("0.2.0", "builds: 0.1.0 (trainer); 0.2.0 (w0)", []),
        ("", "builds: without a name (w0); 0.1.0 (trainer)", []),
        ("0.3.0", "builds: 0.1.0 (trainer); 0.3.0 (w0)", ["builds 0.1.0 and 0.3.0 are more than"]),
    ],
)
def test_builds_of_processes_are_shown(bucket, build, words, problems) -> None:
    put_heartbeat(bucket, "trainer", "trainer", at=NOW - 1, build="0.1.0")
    put_heartbeat(bucket, "w0", at=NOW - 1, version=1, lag=2, stored=3, build=build)
    put_heartbeat(bucket, "w9", at=NOW - 1, build="9.0.0", ended=True)
    found = look(bucket)
    assert words in shown(found)
    assert [one[:36] for one in found.problems if one.startswith("builds")] == problems
    assert {line.name: line.build for line in found.processes}["w0"] == build


def test_releases_without_names_of_builds_are_shown_without(bucket) -> None:
    assert "build" not in shown(look(bucket))


def test_groups_of_the_dead_are_not_in_flight(bucket) -> None:
    put_heartbeat(bucket, "gone", stored=1, at=NOW - 3600)
    found = look(bucket)
    assert {line.name: line.state for line in found.processes}["gone"] == "silent"
    assert found.groups_in_flight == 4


def test_what_is_damaged_is_named_and_the_rest_shown(bucket) -> None:
    for key in (keys.TRAINER, keys.heartbeat("w0"), keys.events("w0-a", 0)):
        bucket.put(key, b"\x1b[31m{")
    found = look(bucket)
    assert len(found.problems) == 3
    for word in ("trainer.json", "heartbeats/w0.json", "w0-a: 1 segment of events"):
        assert any(word in problem for problem in found.problems)
    assert found.bytes_per_version == 1000
    assert "\x1b" not in shown(found)


def test_only_the_window_is_read_and_nothing_twice(bucket, monkeypatch) -> None:
    watch = Watch(bucket, clock=lambda: NOW)
    watch.poll()
    read: list[str] = []
    get = bucket.get

    def spy(key: str, *, limit: int) -> bytes | None:
        read.append(key)
        return get(key, limit=limit)

    monkeypatch.setattr(bucket, "get", spy)
    bucket.put(keys.events("trainer-a", 1), encode_lines([step(4, [1], [1])]))
    assert watch.poll().reward == 0.5
    assert [key for key in read if key.startswith(keys.EVENTS)] == [keys.events("trainer-a", 1)]


def test_old_segments_are_left_out_but_for_each_series_last_words(bucket, monkeypatch) -> None:
    import os

    folder = Path(bucket.url.removeprefix("file://")) / "events" / "trainer-a"
    for number in range(9):
        bucket.put(keys.events("trainer-a", number), encode_lines([step(4, [1], [1])]))
        os.utime(folder / f"{number:010d}.jsonl", (NOW, NOW))
    watch = Watch(bucket, window_s=60, clock=lambda: NOW)
    watch.poll()
    kept = [key for key in watch._events._kept if "trainer-a" in key]
    assert sorted(kept) == [keys.events("trainer-a", n) for n in (6, 7, 8)]


def test_late_writes_of_processes_replaced_long_ago_cost_no_reads(bucket) -> None:
    """They are read whenever they were said; the figures are of the window all the same."""
    before = look(bucket)
    long_ago = NOW - 10_000
    stored = Generated(
        process="w9", at=long_ago, sequence=0, versions=[0], reward_mean=0.0, tokens=1
    )
    first = msgspec.structs.replace(step(0, [9], [0]), at=long_ago)
    bucket.put(keys.events("trainer-z", 0), encode_lines([first]))
    bucket.put(keys.events("w9-z", 0), encode_lines([stored]))
    after = look(bucket)
    assert after.steps_per_minute == before.steps_per_minute == 60.0
    assert after.tokens_trained_per_s == before.tokens_trained_per_s
    assert after.tokens_generated_per_s == before.tokens_generated_per_s
    assert (after.window_s, after.staleness) == (before.window_s, before.staleness)
    slow = Watch(bucket, window_s=1, clock=lambda: NOW).poll()
    assert slow.steps_per_minute == 60.0, "two steps at least"


def test_steps_that_moved_nothing_are_counted(bucket) -> None:
    before = look(bucket)
    lost = msgspec.structs.replace(step(9, [0], [0]), loss=None, grad_norm=None)
    bucket.put(keys.events("trainer-x", 0), encode_lines([lost]))
    after = look(bucket)
    assert after.failures["step without effect: a gradient that is no number"] == 1
    assert "step without effect: a gradient that is no number" not in before.failures


@pytest.mark.parametrize(
    ("shares", "warned"), [([0.3, 0.1, 0.2], True), ([0.6, 0.1, 0.2], False), ([0.1, 0.2], False)]
)
def test_training_that_does_not_reach_the_fleet_is_a_problem(bucket, shares, warned) -> None:
    trainer = events_of_a_run()["trainer-a"]
    published = [one for one in trainer if isinstance(one, Published)][: len(shares)]
    layers = {"layers.1": 0.01, "layers.0": 0.5}
    events = [
        msgspec.structs.replace(one, served=Served(since=0, share=share, layers=layers))
        for one, share in zip(published, shares, strict=True)
    ]
    others = [one for one in trainer if not isinstance(one, Published)]
    bucket.put(keys.events("trainer-a", 0), encode_lines([*others, *events]))
    found = look(bucket)
    assert found.served_share == shares[-1]
    problem = [one for one in found.problems if "of the training since version 0" in one]
    assert bool(problem) == warned
    if warned:
        assert problem[0].startswith("published weights contain 20% of the training")
        assert "least: layers.1 1%, layers.0 50%" in problem[0]
        assert 'train.masters = "dithered"' in problem[0]


def test_the_first_groups_are_seen_before_one_is_stored(tmp_path) -> None:
    bucket = open_bucket(str(tmp_path / "first"), create=True)
    tensors = [TensorSpec(name="a", dtype="BF16", shape=(4,))]
    create_run(
        bucket,
        Run(id="ab" * 16, name="seen", created_at=0.0, tensors=tensors, digest="0" * 32,
            config=CONFIG),
    )  # fmt: skip
    bucket.put(keys.events("trainer-a", 0), encode_lines(events_of_a_run()["trainer-a"][:1]))
    put_heartbeat(bucket, "trainer", "trainer", at=NOW - 1)
    status = TrainerStatus(
        phase="training", version=0, digest="", epoch=1, credits={"w0": 7}, at=NOW
    )
    bucket.put(keys.TRAINER, encode_json(status))
    put_heartbeat(bucket, "w0", at=NOW - 1)
    assert look(bucket).phase == "training"
    put_heartbeat(bucket, "w0", at=NOW - 1, episodes=12, tokens=3456)
    put_heartbeat(bucket, "w1", at=NOW - 1, episodes=3, tokens=44)
    found = look(bucket)
    assert (found.sampled_episodes, found.sampled_tokens) == (15, 3500)
    assert found.phase == "drawing the first groups"
    assert "15 episodes, 3,500 tokens so far" in shown(found)


def test_a_run_that_was_published_from_elsewhere(tmp_path) -> None:
    bucket = open_bucket(str(tmp_path / "other"), create=True)
    tensors = [TensorSpec(name="a", dtype="BF16", shape=(4,))]
    create_run(
        bucket, Run(id="ab" * 16, name="other", created_at=0.0, tensors=tensors, digest="0" * 32)
    )
    found = look(bucket)
    assert (found.phase, found.target, found.processes) == ("starting", None, [])
    assert "other" in shown(found)


def test_no_run_and_a_damaged_one(tmp_path, capsys) -> None:
    bucket = open_bucket(str(tmp_path / "empty"), create=True)
    with pytest.raises(InputError, match="there is no run here"):
        look(bucket)
    assert main(["status", bucket.url]) == 2
    assert main(["status", str(tmp_path / "nowhere")]) == 2
    assert main(["status", bucket.url, "--watch", "--every", "nan"]) == 2
    bucket.put(keys.RUN, b"{}")
    with pytest.raises(CorruptError):
        look(bucket)
    assert main(["status", bucket.url]) == 3
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 4
    assert all(line.startswith("error: ") for line in lines)


def test_json_is_one_object_and_watching_ends_with_the_run(bucket, capsys) -> None:
    ended = TrainerStatus(phase="finished", version=3, digest="", epoch=1, credits={}, at=NOW)
    bucket.put(keys.TRAINER, encode_json(ended))
    assert main(["status", bucket.url, "--json", "--watch"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["phase"] == "finished"
    assert found["at"] == pytest.approx(time.time(), abs=60)
    assert {line["state"] for line in found["processes"]} == {"silent"}


def test_a_manifest_that_readers_pass_over_is_a_problem(bucket) -> None:
    watch = Watch(bucket, clock=lambda: NOW)
    bucket.put(keys.manifest(9_999_999_999), b"junk")
    put_heartbeat(bucket, "w1", at=NOW, alarm="version 4 is junk")
    put_heartbeat(bucket, "w2", at=NOW, alarm="version 4 is junk")
    put_heartbeat(bucket, "w3", at=NOW, alarm="version 3 is junk", ended=True)
    put_heartbeat(bucket, "trainer", "trainer", at=NOW, alarm="retained.json cannot be read")
    reason = "3 answers of 1 users can be trained on, a group takes 32"
    put_heartbeat(bucket, "live", at=NOW, learns=True, waits=reason)
    put_heartbeat(bucket, "gone", at=NOW, learns=True, waits=reason, ended=True)
    found = watch.poll()
    assert found.version is None, "no version can be read"
    assert len(found.problems) == 4
    assert found.problems[2] == f"live learns nothing: {reason}"
    assert found.problems[3] == "trainer: retained.json cannot be read"
    assert keys.manifest(9_999_999_999) in found.problems[0]
    assert found.problems[1] == "2 workers pass over an object: version 4 is junk"
    assert "2 workers pass over" in shown(found, width=200)


def test_counters_of_gateways_are_added_up(bucket) -> None:
    assert look(bucket).gateways == {}
    for number in range(2):
        state = GatewayState(
            gateway=f"g{number}",
            run="a" * 32,
            public_key="b" * 64,
            started=NOW,
            at=NOW,
            counts={"answers": 700.0, "captures_lost": float(number)},
            rates={"retry": 0.2 * number},
        )
        bucket.put(keys.live_gateway(f"g{number}"), encode_json(state))
    found = look(bucket)
    assert found.gateways == {"answers": 1400.0, "captures_lost": 1.0, "rate_retry": 0.1}
    assert "1,400" in shown(found)
    bucket.put(keys.live_gateway("g0"), b"{")
    damaged = look(bucket)
    assert damaged.gateways == {}
    assert any("live/gateways/g0.json" in problem for problem in damaged.problems)


def test_groups_that_allocation_leaves_out_are_no_failures() -> None:
    step = SimpleNamespace(causes={"skipped": 3, "stale": 1}, grad_norm=1.0, dropped=4)
    state = SimpleNamespace(processes={}, steps={1: step}, parity={})
    assert failures_by_cause(state) == {"group dropped: stale": 1}


def test_thinking_budgets_are_whole_in_a_narrow_terminal(bucket) -> None:
    thinking = msgspec.structs.replace(
        step(4, [1, 1], [0, 0]), thinking_length=812.0, forced_share=0.25, reused_length=640.0
    )
    scores = [
        BudgetScore(
            budget=budget, accuracy=0.25, pass_at={"16": 0.5}, majority=0.375, tokens=1234.0,
            tokens_per_correct=4936.0, forced=0.125,
        )
        for budget in (256, 32_768)
    ]  # fmt: skip
    tested = Evaluated(
        process="evaluator", at=NOW - 1, version=4, accuracy=0.5, problems=9, seconds=1.0,
        area=0.25, budgets=scores,
    )  # fmt: skip
    bucket.put(keys.events("trainer-b", 0), encode_lines([thinking]))
    bucket.put(keys.events("evaluator-a", 0), encode_lines([tested]))
    found = look(bucket)
    assert (found.thinking_length, found.forced_share) == (812.0, 0.25)
    assert found.reused_length == 640.0
    text = shown(found, width=80)
    words = ("32,768", "50.0 % of 16", "37.5 %", "12.5 %", "area under it", "812 tokens", "640")
    assert [word for word in words if word not in " ".join(text.split())] == []
    table = text[text.index("thinking budget") :].splitlines()[:4]
    assert "…" not in "".join(table)


def test_a_run_without_budgets_shows_no_thinking(bucket) -> None:
    found = look(bucket)
    assert found.thinking_length is None
    assert "reused tokens" not in shown(found)


def test_a_renewed_view_outlasts_one_lost_request_for_its_run():
    faulty = FaultyBucket(open_bare_bucket("memory://"))
    tensors = [TensorSpec(name="a", dtype="BF16", shape=(4,))]
    create_run(
        faulty, Run(id="ab" * 16, name="seen", created_at=0.0, tensors=tensors, digest="0" * 32)
    )
    retrying = RetryingBucket(faulty, RetryPolicy(first_pause_s=0.0))
    watch = Watch(faulty, retrying=retrying)
    for _ in range(2):
        faulty.fail("get", keys.RUN, times=1)
        assert "seen" in shown(watch.poll())
    faulty.fail("get", keys.RUN, times=99)
    before = len(faulty.operations)
    with pytest.raises(RetryError):
        watch.poll()
    assert len(faulty.operations) - before == 2, "it shows an outage and does not wait for its end"


def test_a_single_look_outlasts_faults_of_the_store(bucket):
    faulty = FaultyBucket(bucket)
    watch = Watch(RetryingBucket(faulty, RetryPolicy(first_pause_s=0.0)))
    faulty.fail("get", keys.RUN, times=3)
    assert watch.poll().name
