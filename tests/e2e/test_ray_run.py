"""A run on a real Ray cluster of two CPUs: placed, logged, killed, restarted and interrupted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_config

from deltawire.events import Life
from deltawire.launch.ray_launcher import LOST, RayLauncher
from deltawire.runtime.event_tail import EventTail
from deltawire.runtime.supervisor import ChildError, Supervisor
from deltawire.store import Bucket, open_bucket
from deltawire.wire import keys

pytestmark = [pytest.mark.drills, pytest.mark.long, pytest.mark.timeout(900)]

CONFIG = f"""
name = "placed"
{tiny_config.MODEL}[task]
heldout = 4
{tiny_config.ROLLOUT.replace("workers = 2", "workers = 1")}[train]
versions = VERSIONS
groups_per_step = 2
[evaluate]
every = 0
"""
BUNDLES = {"trainer": {"CPU": 1.0}, "w0": {"CPU": 1.0}}
WAIT_S = 250.0


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    ray = pytest.importorskip("ray")
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield ray
    ray.shutdown()


@pytest.fixture
def launcher(ray: Any) -> Iterator[RayLauncher]:
    made = RayLauncher(BUNDLES, grows=False, leaves=False)
    yield made
    made.close()


def until(condition: Any, supervisor: Supervisor | None = None) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        if supervisor is not None:
            supervisor.check()
        time.sleep(0.05)


def test_a_failing_process_ends_the_supervisor_with_its_own_words(
    launcher: RayLauncher, tmp_path: Path
) -> None:
    bucket = open_bucket(str(tmp_path / "bucket"), create=True)
    code = "import sys; print('error: the data is gone'); sys.exit(2)"
    command = (sys.executable, "-c", code)
    supervisor = Supervisor(bucket, tmp_path / "logs", command=command, launcher=launcher)
    supervisor.start()
    supervisor.add("w0", "worker", [])
    with pytest.raises(ChildError, match="the data is gone") as caught:
        until(lambda: False, supervisor)
    assert caught.value.exit_code == 2
    supervisor.stop()
    assert (tmp_path / "logs" / "w0.log").read_text() == "error: the data is gone\n"


def test_a_process_whose_actor_is_gone_is_started_again(
    launcher: RayLauncher, ray: Any, tmp_path: Path
) -> None:
    """The supervisor's rules, not Ray's: the child's name, its log and its bundle stay."""
    bucket = open_bucket(str(tmp_path / "bucket"), create=True)
    marks = tmp_path / "marks"
    marks.mkdir()
    code = (
        "import os, pathlib, sys, time\n"
        f"marks = pathlib.Path({str(marks)!r})\n"
        "again = any(marks.iterdir())\n"
        "(marks / str(os.getpid())).touch()\n"
        "parent = os.getppid()\n"
        "while not again and os.getppid() == parent: time.sleep(0.05)\n"
    )
    command = (sys.executable, "-c", code)
    supervisor = Supervisor(bucket, tmp_path / "logs", command=command, launcher=launcher)
    supervisor.start()
    supervisor.add("trainer", "trainer", [])
    until(lambda: any(marks.iterdir()))
    child = supervisor._children[0]
    first = child.process
    assert first is not None
    ray.kill(first._actor)  # type: ignore[attr-defined]
    until(supervisor.check)
    assert first.returncode == LOST
    assert len(list(marks.iterdir())) == 2
    supervisor.stop()
    lives = [event for event in EventTail(bucket).read(everything=True) if isinstance(event, Life)]
    assert [one.what for one in lives if one.process == "trainer"] == ["died", "restarted"]
    assert "actor is gone" in next(one.detail for one in lives if one.what == "died")


def test_a_cluster_that_is_too_small_is_refused_at_once(ray: Any) -> None:
    del ray
    wide = {"trainer": {"CPU": 1.0}, "w0": {"CPU": 2.0}}
    with pytest.raises(Exception, match=r"asks for 3 CPU in 2 bundles, and this machine has 2"):
        RayLauncher(wide, grows=False, leaves=False)


def begin(folder: Path, ray: Any, versions: int) -> tuple[subprocess.Popen[bytes], Bucket]:
    (folder / "run.toml").write_text(CONFIG.replace("VERSIONS", str(versions)))
    bucket = open_bucket(str(folder / "bucket"), create=True)
    with (folder / "printed").open("w") as printed:
        process = subprocess.Popen(
            [sys.executable, "-m", "deltawire", "run", "run.toml", "--launcher", "ray", "--plain",
             "--out", "out", "--bucket", bucket.url],
            cwd=folder,
            env={**os.environ, "RAY_ADDRESS": ray.get_runtime_context().gcs_address},
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
    return process, bucket


def processes_of(folder: Path, *words: str) -> list[int]:
    """Processes that have the folder, and these words, in their command line."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and entry.name != str(os.getpid()):
            try:
                line = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if str(folder).encode() in line and {w.encode() for w in words} <= {*line.split(b"\0")}:
                found.append(int(entry.name))
    return found


def test_a_killed_worker_returns_and_an_interrupt_ends_everything(ray: Any, tmp_path: Path) -> None:
    """Every condition that is awaited holds from then on, and the run has no last version."""
    process, bucket = begin(tmp_path, ray, 100_000)
    tail, lives = EventTail(bucket), []

    def ended() -> bool:
        return process.poll() is not None

    def stored() -> int:
        return len(bucket.list(keys.rollouts_of("w0")))

    def returned() -> bool:
        lives.extend(event for event in tail.read() if isinstance(event, Life))
        return "restarted" in {one.what for one in lives if one.process == "w0"}

    try:
        until(lambda: ended() or stored() > 0)
        (worker,) = processes_of(tmp_path, "worker")
        os.kill(worker, signal.SIGKILL)
        until(lambda: ended() or returned())
        before = stored()
        until(lambda: ended() or stored() > before)
        process.send_signal(signal.SIGINT)
        code = process.wait(WAIT_S)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    output = (tmp_path / "printed").read_text()
    assert code == 130, output
    assert "the same command continues it" in output
    until(lambda: not processes_of(tmp_path))
    assert "died" in {one.what for one in lives if one.process == "w0"}
    assert (tmp_path / "out" / "logs" / "trainer.log").exists()
    # Its placement group is gone; Ray's own count follows a little later.
    until(lambda: ray.available_resources().get("CPU") == 2.0)
