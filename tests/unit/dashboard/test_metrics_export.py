"""The exporter and the trackers: names that are documented, figures that are the run's, a door
that is shut."""

from __future__ import annotations

import http.client
import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from deltawire.cli.main import main
from deltawire.dashboard.exporter import MAX_LABELS, RunCollector, application, listen
from deltawire.dashboard.readers import ReaderLine
from deltawire.dashboard.release import ReleaseStatus
from deltawire.dashboard.state import RunState
from deltawire.dashboard.status import ProcessLine, RunStatus, Spread, StalenessSplit
from deltawire.dashboard.trackers import Forwarder, TensorBoard, open_tracker
from deltawire.errors import InputError, RetryError
from deltawire.estimates import BudgetScore
from deltawire.events import Evaluated, Event, Life, Published, Step, Swapped
from deltawire.store import open_bucket
from deltawire.sync import create_run
from deltawire.wire import keys
from deltawire.wire.objects import encode_json
from deltawire.wire.run import Run, TensorSpec
from deltawire.wire.status import Incident, StoreTraffic, TrainerStatus

WATCHING = Path(__file__).parents[3] / "docs" / "WATCHING.md"
TOKEN = "t-o-k-e-n"

STATUS = RunStatus(
    name="seen",
    lines={"fp8-block": 7, "int4-g32": None},
    release=ReleaseStatus(
        number=2,
        verdict="canary",
        serving=0,
        digest="0" * 32,
        candidate=2,
        share=0.25,
        waits_for="",
        restores=None,
        at=1.0,
        by="ann",
        reason="",
        decisions={"canary": 1},
        void=0,
        hold_back_difference=-0.02,
    ),
    bucket="memory://",
    at=0.0,
    phase="training",
    version=7,
    target=9,
    window_s=60.0,
    steps_per_minute=30.0,
    reward=0.5,
    loss=0.2,
    reward_spread=0.3,
    zero_advantage=0.25,
    pairs=24,
    pairs_total=96,
    completion_length=12.0,
    truncated=0.1,
    entropy=1.5,
    heldout=0.25,
    heldout_reward=0.4,
    heldout_version=6,
    heldout_sets={},
    heldout_loss=2.5,
    heldout_perplexity=12.2,
    heldout_loss_version=5,
    merge_kept=None,
    heldout_area=0.6,
    heldout_budgets=[
        BudgetScore(
            budget=budget,
            accuracy=budget / 16,
            pass_at={},
            majority=0.5,
            tokens=budget + 2.0,
            tokens_per_correct=None,
            forced=0.25,
        )
        for budget in (4, 8)
    ],
    thinking_length=5.5,
    forced_share=0.75,
    reused_length=3.0,
    heldout_sources={},
    staleness=StalenessSplit(
        bound=3,
        total=Spread(mean=1.5, max=3),
        in_flight=Spread(mean=1.0, max=2),
        queued=Spread(mean=0.5, max=1),
    ),
    trainer_idle=0.1,
    workers_idle=0.2,
    tokens_generated_per_s=100.0,
    tokens_trained_per_s=90.0,
    bytes_full=1000,
    bytes_per_version=10.0,
    changed_share=0.01,
    swap_ms=4.0,
    update_latency_ms=1500.0,
    update_latency_p95_ms=2500.0,
    update_latency_last_ms=2000.0,
    groups_per_s=0.5,
    blocked_ms=2.0,
    k3=1e-7,
    k3_max=1e-6,
    k3_same_version=1e-9,
    ratio_max=1.5,
    groups_in_flight=4,
    groups_stored=40,
    settings={},
    gateways={"captures_lost": 2.0},
    failures={'episode: "odd"\n\x1b[31m\\': 2, "groups dropped": 1},
    probes={"hidden tests": 0.5},
    processes=[
        ProcessLine(
            name="w0",
            role="worker",
            state="stuck",
            doing="sample",
            version=5,
            lag=2,
            idle=0.2,
            groups=40,
            restarts=1,
            supervised=True,
            age_s=1.0,
            host="h",
            traffic=StoreTraffic(requests=100, retries=7, refused=5, read_bytes=900, anchors=2),
        )
    ],
    readers=[
        ReaderLine(
            host="far",
            process="relay-7",
            kind="relay",
            state=state,
            version=4,
            lag=3,
            late_s=90.0,
            reason="late",
            alarm="other weights",
            age_s=20.0,
            build="",
            traffic=StoreTraffic(requests=50, cache_hits=9, pruned=1),
        )
        for state in ("late", "ended")
    ],
    problems=[],
    incidents=[Incident(worker="w3", kind="reward", count=2, quarantined=True)],
)


class Stub:
    """Stands for a `Watch`."""

    def __init__(self, status: RunStatus | None) -> None:
        self.status = status
        self.looks = 0

    def poll(self) -> RunStatus:
        self.looks += 1
        if self.status is None:
            raise RetryError("no answer")
        return self.status


def scrape(watch: Stub) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    body = b"".join(
        application(RunCollector(watch, every_s=5), token="")(
            {"REQUEST_METHOD": "GET", "PATH_INFO": "/metrics", "QUERY_STRING": ""},
            lambda *_: None,
        )
    )
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(body.decode())
        for sample in family.samples
    }


def test_every_figure_under_its_name() -> None:
    found = scrape(Stub(STATUS))

    def value(name: str, /, **labels: str) -> float:
        return found[f"deltawire_{name}", frozenset(labels.items())]

    assert value("up") == 1
    assert value("run_info", name="seen", phase="training") == 1
    assert (value("version"), value("version_target")) == (7, 9)
    assert value("staleness_versions", part="in_flight", statistic="mean") == 1.0
    assert value("staleness_versions", part="queued", statistic="max") == 1
    assert value("idle_share", role="trainer") == 0.1
    assert value("tokens_per_second", kind="trained") == 90
    assert value("swap_seconds") == 0.004
    assert value("k3_nats", statistic="max") == 1e-6
    assert value("groups", state="in_flight") == 4
    assert value("probe", probe="hidden tests") == 0.5
    worker, relay = (
        {"process": name, "role": role, "host": host}
        for name, role, host in (("w0", "worker", "h"), ("relay-7", "relay", "far"))
    )
    for name, shown in (("requests", 100), ("retries", 7), ("refused", 5), ("read_bytes", 900)):
        assert value(f"store_{name}_total", **worker) == shown
    assert (value("anchors_total", **worker), value("pruned_versions_total", **relay)) == (2, 1)
    assert value("cache_hits_total", **relay) == 9
    reader = {"reader": "relay-7", "kind": "relay", "host": "far"}
    for name, shown in (("lag_versions", 3), ("late_seconds", 90), ("age_seconds", 20)):
        assert value(f"reader_{name}", **reader) == shown
    assert value("reader_alarm", **reader) == 1
    assert (value("thinking_tokens"), value("forced_close_share")) == (5.5, 0.75)
    assert value("reused_tokens") == 3.0
    assert value("heldout_budget_accuracy", budget="8") == 0.5
    assert value("heldout_budget_tokens", budget="4") == 6.0
    assert value("heldout_budget_forced_share", budget="4") == 0.25
    assert value("process_alive", process="w0", role="worker") == 0
    assert value("gateways", counter="captures_lost") == 2
    assert value("failures", cause='episode: "odd"··[31m\\') == 2


def test_the_names_are_those_of_the_documentation() -> None:
    documented = set(re.findall(r"`(deltawire_[a-z0-9_]+)`", WATCHING.read_text()))
    assert documented == {name for name, _ in scrape(Stub(STATUS))}


def test_unmeasured_metrics_are_omitted_and_an_outage_is_reported() -> None:
    nothing = dict.fromkeys(("reward", "k3", "k3_max", "k3_same_version"))
    bare = msgspec.structs.replace(STATUS, processes=[], **nothing)
    names = {name for name, _ in scrape(Stub(bare))}
    assert "deltawire_reward" not in names
    assert "deltawire_k3_nats" not in names
    assert scrape(Stub(None)) == {("deltawire_up", frozenset()): 0.0}


def test_labels_are_bounded_for_any_bucket_content() -> None:
    many = msgspec.structs.replace(
        STATUS, failures={f"{number}" * 200: 1 for number in range(10_000)}
    )
    causes = [labels for name, labels in scrape(Stub(many)) if name == "deltawire_failures"]
    assert len(causes) <= MAX_LABELS
    assert all(len(dict(labels)["cause"]) <= 80 for labels in causes)


def test_many_scrapes_are_one_look() -> None:
    now, watch = [0.0], Stub(STATUS)
    collector = RunCollector(watch, every_s=5, clock=lambda: now[0])
    for _ in range(10):
        list(collector.collect())
    assert watch.looks == 1
    now[0] = 5
    list(collector.collect())
    assert watch.looks == 2


@pytest.fixture
def address() -> Iterator[tuple[str, int]]:
    app = application(RunCollector(Stub(STATUS), every_s=5), token=TOKEN)
    with listen(app, host="127.0.0.1", port=0, token=TOKEN) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server.server_address[0], server.server_address[1]
        server.shutdown()
        thread.join(120)


def ask(
    address: tuple[str, int], path: str, headers: Mapping[str, str], method: str = "GET"
) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(*address, timeout=120)
    try:
        connection.request(method, path, headers=dict(headers))
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def test_the_token_is_required(address) -> None:
    right = {"Authorization": f"Bearer {TOKEN}"}
    status, body = ask(address, "/metrics", right)
    assert status == 200
    assert b"deltawire_version 7.0" in body
    wrong = ["", "Bearer", "Bearer ", f"Bearer {TOKEN}x", f"Basic {TOKEN}"]
    wrong += [f"Bearer {TOKEN[:-1]}", "Bearer \xff\xfe", f" Bearer {TOKEN} x"]
    for given in wrong:
        status, body = ask(address, "/metrics", {"Authorization": given})
        assert (status, b"deltawire" in body) == (401, False), given
    assert ask(address, "/metrics", {})[0] == 401
    assert ask(address, "/", right)[0] == 404
    assert ask(address, "/metrics", right, "POST")[0] == 405


def test_a_token_may_hold_other_letters_than_ascii() -> None:
    app = application(RunCollector(Stub(STATUS), every_s=5), token="gehört-mir")
    started: list[str] = []
    header = "Bearer gehört-mir".encode().decode("latin-1")  # As WSGI servers pass it.
    environ = {"REQUEST_METHOD": "GET", "PATH_INFO": "/nothing", "HTTP_AUTHORIZATION": header}
    app(environ, lambda status, _: started.append(status))  # type: ignore[arg-type, return-value]
    assert started == ["404 Not Found"]


def test_without_a_token_only_on_this_machine() -> None:
    app = application(RunCollector(Stub(STATUS), every_s=5), token="")
    with pytest.raises(InputError, match="needs a token"):
        listen(app, host="0.0.0.0", port=0, token="")
    with (
        listen(app, host="127.0.0.1", port=0, token="") as taken,
        pytest.raises(InputError, match="cannot listen"),
    ):
        listen(app, host="127.0.0.1", port=taken.server_address[1], token="")


def test_the_command_on_wrong_input(tmp_path, capsys) -> None:
    bucket = str(tmp_path)
    for arguments, says in [
        ([bucket], "there is no run"),
        ([str(tmp_path / "none")], "no bucket"),
        ([bucket, "--every", "0"], "--every"),
        ([bucket, "--port", "70000"], "not a port"),
    ]:
        assert main(["metrics", *arguments]) == 2
        assert says in capsys.readouterr().err


def events(version: int) -> list[Event]:
    at = float(version)
    return [
        Step(
            process="trainer",
            at=at,
            version=version,
            groups=2,
            dropped=0,
            reward_mean=version / 10,
            loss=float("nan") if version == 2 else 0.5,
            grad_norm=1.0,
            k3=1e-7,
            ratio_max=1.0,
            clipped=0.0,
            staleness=[1, 2],
            tokens=10,
            seconds=0.1,
            queued=[1, 1],
        ),
        Published(
            process="trainer",
            at=at,
            version=version,
            bytes_delta=100 * version,
            bytes_full=1000,
            bytes_anchor=0,
            changed=1,
            elements=100,
            blocked_ms=1.0,
            encode_ms=1.0,
            upload_ms=1.0,
        ),
    ]


class Memory:
    """A tracker that remembers."""

    def __init__(self) -> None:
        self.logged: list[tuple[int, dict[str, float]]] = []

    def log(self, version: int, figures: Mapping[str, float]) -> None:
        self.logged.append((version, dict(figures)))

    def close(self) -> None:
        pass


def test_each_version_is_handed_on_once_in_order() -> None:
    tracker, state = Memory(), RunState()
    forwarder = Forwarder(tracker)
    first = events(1)
    state.add(first[:1])
    assert forwarder.forward(state) == 0, "its size is still to come"
    state.add([*first[1:], events(3)[1]])
    assert forwarder.forward(state) == 1
    life = Life(process="w0", at=0.0, role="worker", what="started")
    swap = Swapped(process="w0", at=2, version=2, running=1, swap_ms=3.0, prepare_ms=1.0)
    measured = Evaluated(process="evaluator", at=1, version=1, accuracy=0.5, problems=2, seconds=1)
    state.add([*events(2), *events(3), life, swap, measured])
    forwarder.forward(state)
    forwarder.forward(state, over=True)
    assert [version for version, _ in tracker.logged] == [1, 2, 3]
    second = tracker.logged[1][1]
    assert "loss" not in second, "no plot can show it"
    assert (second["swap_ms"], second["heldout/accuracy"]) == (3.0, 0.5)
    assert (second["staleness/in_flight"], second["staleness/queued"]) == (0.5, 1.0)


def test_numbers_that_a_publisher_skipped_cost_nothing() -> None:
    tracker, state = Memory(), RunState()
    state.add([*events(1), *events(10**10)])
    assert Forwarder(tracker).forward(state) == 10**10
    assert [version for version, _ in tracker.logged] == [1, 10**10]


def test_tensorboard_files_hold_what_was_logged(tmp_path) -> None:
    from tensorboardX.proto.event_pb2 import Event as BoardEvent

    board = TensorBoard(tmp_path / "board")
    state = RunState()
    state.add([*events(1), *events(2)])
    Forwarder(board).forward(state, over=True)
    board.close()
    found = {}
    for file in (tmp_path / "board").iterdir():
        data = file.read_bytes()
        while data:  # A record: its length, a checksum, itself, a checksum.
            size = int.from_bytes(data[:8], "little")
            event = BoardEvent.FromString(data[12 : 12 + size])
            found |= {(v.tag, event.step): v.simple_value for v in event.summary.value}
            data = data[16 + size :]
    assert found["reward", 2] == pytest.approx(0.2)
    assert found["bytes/delta", 2] == 200
    assert ("loss", 2) not in found


def test_a_tracker_that_is_not_installed_is_named(tmp_path) -> None:
    bucket = open_bucket(str(tmp_path / "bucket"), create=True)
    tensors = [TensorSpec(name="a", dtype="BF16", shape=(4,))]
    create_run(
        bucket, Run(id="ab" * 16, name="r", created_at=0.0, tensors=tensors, digest="0" * 32)
    )
    code = (
        "import sys; sys.modules['wandb'] = None\n"
        "from deltawire.cli.main import main\n"
        f"sys.exit(main(['metrics', {bucket.url!r}, '--to', 'wandb', '--offline']))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert result.returncode == 2
    assert "deltawire[wandb]" in result.stderr


def test_handing_on_ends_with_the_run(tmp_path, capsys) -> None:
    bucket = open_bucket(str(tmp_path / "bucket"), create=True)
    tensors = [TensorSpec(name="a", dtype="BF16", shape=(4,))]
    create_run(
        bucket, Run(id="ab" * 16, name="r", created_at=0.0, tensors=tensors, digest="0" * 32)
    )
    over = TrainerStatus(phase="finished", version=2, digest="", epoch=1, credits={}, at=0.0)
    bucket.put(keys.TRAINER, encode_json(over))
    from deltawire.events import encode_lines

    bucket.put(keys.events("trainer-a", 0), encode_lines([*events(1), *events(2)]))
    arguments = ["metrics", bucket.url, "--to", "tensorboard", "--out", str(tmp_path / "board")]
    assert main(arguments) == 0
    assert "forwarded versions up to 2 to tensorboard" in capsys.readouterr().err
    assert len(list((tmp_path / "board").iterdir())) == 1
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot write"):
        open_tracker(
            "tensorboard",
            tmp_path / "file" / "x",
            project="p",
            name="n",
            config={},
            offline=True,
        )
