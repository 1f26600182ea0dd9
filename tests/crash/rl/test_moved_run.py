"""A running run is moved to another bucket: copied while it goes on, stopped, copied again, and
started at the new place."""

import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest
from copied_run import sync_run

from deltawire import codec
from deltawire.rl.evaluate.audit import audit_fates
from deltawire.runtime.fleet import read_trainer
from deltawire.store import open_bucket
from deltawire.sync import load_mirror, newest_version, read_manifest, read_run
from deltawire.sync.maintain.fsck import check_run

pytestmark = [pytest.mark.drills, pytest.mark.long, pytest.mark.timeout(1800)]

KEPT = Path(__file__).parents[2] / "compat" / "kept" / "0.1.0.tar.xz"
PATIENCE_S = 600.0
LATENCY_S = 0.03


class Run:
    """The trainer and a worker of a run at one place."""

    def __init__(self, server, url, folder):
        self.bucket, self.logs = server.open(url), []
        self.processes = []
        for words in (["trainer", url], ["worker", url, "--id", "w0"]):
            log = (folder / f"{words[0]}-{url.rpartition('/')[2]}.log").open("w+")
            self.logs.append(Path(log.name))
            environment = {**os.environ, **server.environment}
            self.processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "deltawire", *words],
                    env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                )
            )  # fmt: skip
            log.close()

    def printed(self):
        return [path.read_text()[-3000:] for path in self.logs]

    def reach(self, version):
        deadline = time.monotonic() + PATIENCE_S
        while newest_version(self.bucket) < version:
            assert all(one.poll() is None for one in self.processes), self.printed()
            assert time.monotonic() < deadline, "waited too long"
            time.sleep(0.2)

    def stop(self):
        for one in self.processes:
            one.send_signal(signal.SIGTERM)
        assert [one.wait(PATIENCE_S) for one in self.processes] == [0, 0], self.printed()

    def kill(self):
        for one in self.processes:
            one.kill()
            one.wait(PATIENCE_S)


def test_a_run_goes_on_in_another_bucket(s3_server, tmp_path):
    with tarfile.open(KEPT) as packed:
        packed.extractall(tmp_path / "kept", filter="data")
    old_url, new_url = "s3://drills/moved/old", "s3://drills/moved/new"
    old, new = s3_server.open(old_url), s3_server.open(new_url)
    sync_run(open_bucket(str(tmp_path / "kept")), old)
    s3_server.throttle(latency_s=LATENCY_S)
    running = []
    try:
        before = newest_version(old)
        running.append(Run(s3_server, old_url, tmp_path))
        running[0].reach(before + 3)
        began = time.monotonic()
        first = sync_run(old, new)
        first_s = time.monotonic() - began
        running[0].reach(newest_version(old) + 2)
        began = time.monotonic()
        running[0].stop()
        stopped_s = time.monotonic() - began
        second = sync_run(old, new)
        second_s = time.monotonic() - began - stopped_s
        newest = newest_version(new)
        assert newest == newest_version(old)
        assert check_run(new).faults == []
        running.append(Run(s3_server, new_url, tmp_path))
        running[1].reach(newest + 1)
        away_s = time.monotonic() - began
        running[1].reach(newest + 3)
        running[1].stop()
    finally:
        for one in running:
            one.kill()
        s3_server.throttle()
    sys.stdout.write(
        f"\nfirst pass {first} in {first_s:.1f} s; stopped in {stopped_s:.1f} s; second pass "
        f"{second} in {second_s:.1f} s; next version {away_s:.1f} s after the stop was asked for\n"
    )
    assert second.objects < first.objects, "most was copied while the run went on"
    last = newest_version(new)
    assert newest_version(old) == newest, "nothing wrote to the old place any more"
    assert read_trainer(new).phase == "stopped"
    fates = audit_fates(new, max_staleness=2)
    assert fates.consumed == 2 * last
    assert (fates.twice, fates.forgotten) == ([], [])
    run = read_run(new)
    digest = read_manifest(new, run, last).digest
    assert codec.digest_model(load_mirror(new, run, at=last).tensors).hex() == digest
