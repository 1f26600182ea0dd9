"""Warnings of a run's training: in status, closing screen and report."""

from __future__ import annotations

import msgspec
import pytest

from deltawire.dashboard.live import screen
from deltawire.dashboard.problems import problems_of
from deltawire.dashboard.report import page
from deltawire.dashboard.state import RunState
from deltawire.dashboard.status import Watch
from deltawire.dashboard.summary import summarize
from deltawire.dashboard.training_warnings import training_warnings
from deltawire.events import Published, Served, Step, encode_lines
from deltawire.store import open_bucket
from deltawire.sync import create_run
from deltawire.wire import keys
from deltawire.wire.run import Run, TensorSpec

NOW = 1_000_000.0


def published(version: int, share: float, *, elements: int = 134_515_008, served: bool = True):
    return Published(
        process="trainer", at=NOW - 50 + version, version=version, bytes_delta=1000,
        bytes_full=2 * elements, bytes_anchor=0, changed=int(share * elements), elements=elements,
        blocked_ms=1.0, encode_ms=1.0, upload_ms=1.0,
        served=Served(since=0, share=0.99) if served else None,
    )  # fmt: skip


def step(version: int, k3: float, *, stale: int = 1) -> Step:
    return Step(
        process="trainer", at=NOW - 50 + version, version=version, groups=2, dropped=0,
        reward_mean=0.5, loss=0.0, grad_norm=1.0, k3=k3, ratio_max=1.5, clipped=0.0,
        staleness=[0, stale], tokens=100, seconds=0.5,
    )  # fmt: skip


def state_of(*events) -> RunState:
    state = RunState()
    state.add(list(events))
    return state


def test_steps_that_change_more_than_a_tenth_are_named():
    events = [published(0, 1.0), published(1, 0.04), published(2, 0.14), published(3, 0.11)]
    [words] = training_warnings(state_of(*events))
    assert words.startswith("2 of 3 steps changed more than 10% of the weights, version 2 14%")
    assert "lower train.optimizer.learning_rate" in words


@pytest.mark.parametrize(
    "changes",
    [{"share": 0.099}, {"share": 0.4, "elements": 9_999_999}, {"share": 1.0, "served": False}],
    ids=["few", "toy", "float32"],
)
def test_other_steps_are_not(changes):
    assert training_warnings(state_of(*(published(n, **changes) for n in range(1, 9)))) == []


def grown(before: float, now: float, count: int = 10, stale: int = 1):
    return [step(n + 1, before if n < 5 else now, stale=stale) for n in range(count)]


def test_a_divergence_that_grew_tenfold_is_named():
    [words] = training_warnings(state_of(*grown(2e-4, 3e-3)))
    assert words.startswith(
        "k3 between sampler and trainer has grown from 0.0002 (versions 1 to 5)"
    )
    assert "0.003 nats a token (versions 6 to 10)" in words
    assert "train.max_staleness" in words


@pytest.mark.parametrize(
    "events",
    [
        grown(2e-4, 1.9e-3),
        grown(1e-9, 9e-4),
        grown(2e-4, 3e-3, count=9),
        [*grown(2e-4, 2e-4), *(step(n, 3e-3, stale=4) for n in range(11, 16))],
    ],
    ids=["less", "harmless", "short", "staler"],
)
def test_other_divergence_is_not(events):
    assert training_warnings(state_of(*events)) == []


def test_growth_with_a_rising_rate_is_expected():
    events = grown(2e-4, 3e-3)
    assert training_warnings(state_of(*events), warmup=1) == []
    later = [msgspec.structs.replace(one, version=one.version + 20) for one in events]
    assert len(training_warnings(state_of(*later), warmup=20)) == 1


def test_the_report_and_the_closing_screen_state_them(tmp_path):
    from rich.console import Console

    state = state_of(published(1, 0.2))
    summary = summarize(state, workers=[], wall_s=1.0, bound=1, target_versions=1, name="x", seed=0)
    assert len(summary.warnings) == 1
    assert "1 of 1 steps changed more than 10% of the weights" in page(summary, state)
    console = Console(width=300, record=True, file=(tmp_path / "out").open("w"))
    with console.file:
        console.print(screen(summary, report="r"))
        assert "1 of 1 steps changed more than 10% of the weights" in console.export_text()


def test_the_status_states_them_after_the_warm_up(tmp_path):
    bucket = open_bucket(str(tmp_path / "bucket"), create=True)
    tensors = [TensorSpec(name="a", dtype="BF16", shape=(4,))]
    config = {"name": "x", "model": {"path": "m"}, "train": {"schedule": {"warmup_steps": 0}}}
    run = Run(id="ab" * 16, name="x", created_at=0.0, tensors=tensors, digest="0" * 32,
              config=config)  # fmt: skip
    create_run(bucket, run)
    events = [published(1, 0.2), *grown(2e-4, 3e-3)]
    bucket.put(keys.events("trainer-a", 0), encode_lines(events))
    status = Watch(bucket, clock=lambda: NOW).poll()
    assert [words[:24] for words in status.problems] == [
        "1 of 1 steps changed mor", "k3 between sampler and t",
    ]  # fmt: skip
    assert {one.severity for one in problems_of(status)} == {"warning"}
