"""Captures and feedback over crashes, outages and disks that fail: nothing acknowledged is lost."""

import asyncio
import errno
import json
import os
import random
import signal
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
from live_gateway import KEYS, live_serving, published, rows_in

from deltawire.errors import RetryError
from deltawire.live.capture import spool as spools
from deltawire.live.capture.spool import Spool
from deltawire.live.capture.uploader import SpooledStream, SpoolUploader
from deltawire.store import DelegatingBucket, open_bare_bucket
from deltawire.wire import keys
from deltawire.wire.captures import FAILED, Feedback, decode_segment, encode_row, encode_segment


def append(spool, rows):
    """Appends rows and waits; returns which were stored."""
    results = {}
    done = threading.Event()

    def note(row):
        def stored(ok):
            results[row] = ok
            if len(results) == len(rows):
                done.set()

        return stored

    for row in rows:
        spool.append(row, note(row))
    assert done.wait(60)
    return results


def everything(spool):
    spool.seal().result(60)
    return [row for number in spool.sealed() for row in spool.read(number)]


def test_rows_are_there_after_a_restart_and_numbers_never_repeat(tmp_path):
    first = Spool(tmp_path / "s", limit_bytes=1 << 20)
    assert all(append(first, [b"one", b"two"]).values())
    first.close()
    second = Spool(tmp_path / "s", limit_bytes=1 << 20)
    assert second.sealed() == [0]
    assert second.read(0) == [b"one", b"two"]
    second.remove(0)
    second.close()
    third = Spool(tmp_path / "s", limit_bytes=1 << 20)
    append(third, [b"three"])
    third.seal().result(60)
    assert third.sealed() == [1]
    third.close()


def test_a_torn_tail_is_cut_off_at_every_byte(tmp_path):
    first = Spool(tmp_path / "s", limit_bytes=1 << 20)
    append(first, [b"one"])
    append(first, [b"two"])
    first.close()
    (path,) = (tmp_path / "s").glob("*.rows")
    data = path.read_bytes()
    for length in range(len(data)):
        folder = tmp_path / f"t{length}"
        folder.mkdir(mode=0o700)
        (folder / "0000000000.open").write_bytes(data[:length])
        (folder / "0000000000.open").chmod(0o600)
        again = Spool(folder, limit_bytes=1 << 20)
        found = [row for number in again.sealed() for row in again.read(number)]
        assert found == [b"one", b"two"][: 0 if length < len(data) // 2 else 1]
        append(again, [b"next"])
        assert everything(again)[-1] == b"next"
        again.close()


def test_a_full_spool_refuses_and_counts_aloud(tmp_path):
    spool = Spool(tmp_path / "s", limit_bytes=1000)
    results = append(spool, [bytes([n]) * 100 for n in range(1, 12)])
    assert 0 < sum(results.values()) < 11
    assert spool.lost == 11 - sum(results.values())
    kept = everything(spool)
    assert len(kept) == sum(results.values())
    for number in spool.sealed():
        spool.remove(number)
    assert all(append(spool, [b"again"]).values())
    spool.close()


def test_a_disk_that_fails_loses_only_what_it_refused(tmp_path, monkeypatch):
    fail = SimpleNamespace(on=False)

    def fsync(descriptor):
        if fail.on:
            raise OSError(errno.ENOSPC, "No space left on device")
        os.fsync(descriptor)

    monkeypatch.setattr(spools, "os", SimpleNamespace(**{**vars(os), "fsync": fsync}))
    spool = Spool(tmp_path / "s", limit_bytes=1 << 20)
    kept = []
    for turn in range(6):
        fail.on = turn % 2 == 1
        row = b"row %d" % turn
        assert append(spool, [row])[row] is not fail.on
        kept += [] if fail.on else [row]
    fail.on = False
    assert everything(spool) == kept
    assert spool.lost == 3
    spool.close()


class Outage(DelegatingBucket):
    """Fails each write with a chance, before or after it was made."""

    def __init__(self, inner, seed):
        super().__init__(inner)
        self.random = random.Random(seed)
        self.down = False

    def create(self, key, data):
        fault = self.random.random()
        if self.down or fault < 0.3:
            raise RetryError("planted", run=self.url, key=key)
        made = super().create(key, data)
        if fault > 0.7:
            raise RetryError("planted after the write", run=self.url, key=key)
        return made


@pytest.mark.parametrize("seed", range(20))
def test_an_outage_of_the_bucket_loses_nothing_and_repeats_nothing(tmp_path, seed):
    bucket = Outage(open_bare_bucket("memory://"), seed)
    spool = Spool(tmp_path / "s", limit_bytes=1 << 20)
    stream = SpooledStream(spool, keys.live_feedback, Feedback)
    uploader = SpoolUploader(bucket, "g0", [stream])
    rows = []
    for turn in range(10):
        batch = [a_row(f"{turn}-{n}") for n in range(3)]
        append(spool, batch)
        rows += [f"{turn}-{n}" for n in range(3)]
        uploader.upload()
    while spool.sealed() or not uploader.upload():
        uploader.upload()
    spool.close()
    found = []
    for key in bucket.list(keys.LIVE_FEEDBACK):
        number = int(key.rsplit("/", 1)[-1])
        data = bucket.get(key, limit=1 << 30)
        found += decode_segment(data, Feedback, gateway="g0", number=number, run="", key=key)
    assert sorted(row.id for row in found) == sorted(rows)
    assert spool.lost == 0


def test_a_segment_of_another_gateway_is_not_replaced_and_rows_wait(tmp_path):
    """Two machines with one state folder, for example from a copied image."""
    bucket = open_bare_bucket("memory://")
    with closing(Spool(tmp_path / "s", limit_bytes=1 << 20)) as spool:
        append(spool, [a_row("mine")])
        spool.seal().result()
        (number,) = spool.sealed()
        key = keys.live_feedback("g0", number)
        theirs = encode_segment("g0", number, [a_row("theirs")])
        bucket.put(key, theirs)
        uploader = SpoolUploader(bucket, "g0", [SpooledStream(spool, keys.live_feedback, Feedback)])
        assert not uploader.upload()
        assert "another gateway" in uploader.alarm
        assert bucket.get(key, limit=1 << 20) == theirs
        assert spool.sealed() == [number]


def a_row(name):
    return encode_row(
        Feedback(
            id=name, answer="1" * 32, conversation="2" * 32, arm="serving", kind="accept",
            value=1.0, at=1.0, received=1.0, served_at=1.0,
        )
    )  # fmt: skip


def test_answers_go_on_while_the_bucket_is_gone(tmp_path, monkeypatch):
    bucket = published(1)

    async def scenario():
        async with live_serving(bucket, tmp_path / "state", monkeypatch) as at:
            uploader = at.recorder.uploader
            uploader._bucket = outage = Outage(bucket, 0)
            outage.down = True
            at.recorder._bucket = outage
            texts = [await at.receipt(f"q{n}") for n in range(5)]
            assert not await asyncio.to_thread(uploader.upload)
            assert [(await at.report(text))[0] for text in texts] == [200] * 5
            assert uploader.alarm == "planted"
            uploader._bucket = bucket
            captures, feedback = await at.uploaded()
            assert len(captures) == len(feedback) == 5
            assert at.recorder.state().counts["captures_lost"] == 0

    asyncio.run(scenario())


def test_a_full_spool_slows_no_answer_and_takes_no_feedback(tmp_path, monkeypatch):
    bucket = published(1)

    async def scenario():
        options = {"spool_bytes": 100}
        async with live_serving(bucket, tmp_path / "state", monkeypatch, **options) as at:
            text = await at.receipt()
            assert at.recorder.state().counts["captures_lost"] == 1
            status, body = await at.report(text)
            assert status == 503
            assert "try again later" in body["error"]["message"]

    asyncio.run(scenario())


def test_a_replica_that_dies_in_mid_stream_breaks_the_stream_and_leaves_no_receipt(
    tmp_path, monkeypatch
):
    bucket = published(1)

    async def scenario():
        async with live_serving(bucket, tmp_path / "state", monkeypatch) as at:
            at.fake.mode = "break"
            with pytest.raises(Exception, match=r"(?i)payload|closed|transfer|lost|reset"):
                await at.ask(stream=True)
            assert at.recorder.counts["broken"] == 1
            (broken,) = (await at.uploaded())[0]
            assert (broken.finish, broken.tokens) == (FAILED, b"")
            assert "failed" in broken.unusable
            at.fake.mode = "tokens"
            assert (await at.ask(stream=True))[0] == 200

    asyncio.run(scenario())


GATEWAY = """
import asyncio, json, sys
from pathlib import Path
import pytest
from live_gateway import live_serving, rows_in
from deltawire.live.capture.uploader import SpoolUploader
from deltawire.store import open_bare_bucket
async def main():
    bucket = open_bare_bucket(sys.argv[1])
    with pytest.MonkeyPatch.context() as patch:
        async with live_serving(bucket, Path(sys.argv[2]), patch) as at:
            at.recorder.uploader._every_s = 0.01
            async def ask(number):
                while True:
                    text = await at.receipt(f"{number}")
                    print("answer", text, flush=True)
                    status, body = await at.report(text)
                    assert status == 200, body
                    print("feedback", body["id"], flush=True)
            async def upload():
                while True:
                    await asyncio.to_thread(at.recorder.uploader.upload)
                    await asyncio.sleep(0.01)
            await asyncio.gather(upload(), *(ask(n) for n in range(4)))
asyncio.run(main())
"""


def kill_once(url, state, after_lines):
    """Runs a gateway until it acknowledged so much, then kills it; returns what it did."""
    support = str(Path(sys.modules["live_gateway"].__file__).parent)
    path = os.pathsep.join([support, os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        [sys.executable, "-c", GATEWAY, url, str(state)],
        stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    lines = []
    try:
        for line in process.stdout:
            lines.append(line.split())
            if len(lines) == after_lines:
                break
    finally:
        process.send_signal(signal.SIGKILL)
    lines += [line.split() for line in process.stdout if line.endswith("\n")]
    process.wait(60)
    process.stdout.close()
    assert len(lines) >= after_lines
    return lines


def check_nothing_lost(bucket, url, state, lines):
    """Starts a gateway on the same state and compares the bucket with what was acknowledged."""
    from deltawire.wire.receipts import read_receipt

    with pytest.MonkeyPatch.context() as patch:

        async def after():
            async with live_serving(bucket, state, patch) as at:
                return await at.uploaded()

        captures, feedback = asyncio.run(after())
    run = json.loads(bucket.get(keys.RUN, limit=1 << 26))["id"]
    answers = [read_receipt(text, keys=KEYS, run=run) for kind, text in lines if kind == "answer"]
    assert {one.answer for one in answers if one.recorded} <= {row.answer for row in captures}
    assert {name for kind, name in lines if kind == "feedback"} <= {row.id for row in feedback}
    assert all(one.recorded for one in answers)
    for names in ([row.answer for row in captures], [row.id for row in feedback]):
        assert len(set(names)) == len(names)
    assert rows_in(bucket) == [captures, feedback]


def test_a_killed_gateway_loses_nothing_that_it_acknowledged(tmp_path):
    url = str(tmp_path / "run")
    bucket = published(1, url)
    lines = kill_once(url, tmp_path / "state", 40)
    check_nothing_lost(bucket, url, tmp_path / "state", lines)


@pytest.mark.drills
@pytest.mark.long
def test_many_kills_lose_nothing_and_repeat_nothing(tmp_path):
    url = str(tmp_path / "run")
    bucket = published(1, url)
    chance = random.Random(0)
    lines = []
    for _ in range(8):
        lines += kill_once(url, tmp_path / "state", chance.randrange(3, 60))
    check_nothing_lost(bucket, url, tmp_path / "state", lines)
