"""A planted text of a user is gone from every place in which a whole live run keeps files."""

import asyncio
import io
import json
import time
import zipfile
from contextlib import redirect_stdout

import live_gateway
import pytest
from aiohttp import web
from forgotten_users import train
from granted_groups import SECRET as TRAINER_SECRET
from granted_groups import start_with_groups
from heartbeats import put_heartbeat
from live_answers import LIVE
from live_gateway import GENERATION, TokenReplica, live_serving
from planted import all_files, holds, packed_copies

from deltawire.cli.main import main
from deltawire.launch.live_secret import SECRET_VARIABLE
from deltawire.live.capture.consent import ConsentRule
from deltawire.live.deployment_secret import secret_text
from deltawire.live.learning.grouping import GroupMaker
from deltawire.live.learning.learner import LiveGroups
from deltawire.live.learning.records import LiveRecords
from deltawire.rl.control.challenges import nonce_of
from deltawire.runtime.event_archive import EventArchiver
from deltawire.runtime.process import Process, open_run
from deltawire.watch.run_reader import RunReader
from deltawire.wire import keys
from deltawire.wire.objects import encode_json
from deltawire.wire.status import Challenge

ALICE = "alice.4711@example.com"
ASKED, ANSWERED, NOTE = "plantedquestion", "plantedanswer", "planted-feedback-note"
TRAIN = {
    "versions": 2, "groups_per_step": 1, "max_staleness": 100, "checkpoint_every": 1,
    "optimizer": {"learning_rate": 1e-2}, "loss": {"advantage": "given"},
}  # fmt: skip


class ByteReplica(TokenReplica):
    """Draws the bytes of `ANSWERED` as tokens where the question is `ASKED`, else those of ok."""

    async def chat(self, request):
        body = await request.json()
        asked = body["messages"][-1]["content"]
        answered = ANSWERED if asked.startswith(ASKED) else "ok"
        drawn = list(answered.encode())
        row = {
            "index": 0, "message": {"role": "assistant", "content": answered},
            "finish_reason": "stop", "token_ids": drawn,
            "logprobs": {"content": [{"token": "x", "logprob": -5.5} for _ in drawn]},
        }  # fmt: skip
        return web.json_response({
            "id": "c", "object": "chat.completion", "model": "m", "choices": [row], "created": 1,
            "prompt_token_ids": list(asked.encode()),
        })  # fmt: skip


class LiveRun:
    """The folders of a live run: its bucket and all others that anything writes to."""

    def __init__(self, folder):
        self.folder = folder
        sections = {"rollout": LIVE["rollout"], "live": {**LIVE["live"], "user_cap": 1.0}}
        self.bucket = start_with_groups(folder, groups=0, train=TRAIN, **sections)
        challenge = Challenge(worker="live", secret=TRAINER_SECRET)
        self.bucket.put(keys.challenge("live"), encode_json(challenge))
        self.run, self.config = open_run(self.bucket)
        self.state = folder / "state"
        self.state.mkdir(mode=0o700)
        self.pseudonym = GENERATION.pseudonyms.user(ALICE)
        self.reader = RunReader(self.bucket, folder / "index")

    def command(self, *arguments):
        """Runs a command; returns its output."""
        printed = io.StringIO()
        with redirect_stdout(printed):
            assert main(list(arguments)) == 0, arguments
        return printed.getvalue()

    def learn(self):
        """Three groups of four; two are trained on, each with a checkpoint, and one waits."""
        records = LiveRecords(self.bucket)
        records.poll()
        groups = LiveGroups(self.bucket, "live", GroupMaker(self.config, records), first=0)
        for number in range(3):
            assert groups.store(nonce_of(TRAINER_SECRET, 0, number), time.time() + 100)
        learner = Process(self.bucket, "live", "worker", supervised=False)
        learner.record_life("started", "a learner of a test")
        self.bucket.delete(keys.heartbeat("w0"))
        put_heartbeat(self.bucket, "live", stored=2, at=time.time())
        train(self.bucket, to=2)

    def publish_elsewhere(self):
        """The relay, a mirror, an archive of events, references, and the index of the page."""
        self.command("relay", self.bucket.url, str(self.folder / "relay"))
        self.command("pull", self.bucket.url, str(self.folder / "mirror"))
        EventArchiver(self.bucket, after_s=0.0, compact_segments=1).archive()
        for number in range(3):
            self.bucket.put(keys.reference("live", number), b"{}")
        self.reader.start()
        for _ in range(6000):
            row = self.reader.index.get("live", 1)
            if row is not None and row.status == "read":
                return
            time.sleep(0.01)
        raise AssertionError("the page's index has not read the groups")

    def show(self, name):
        """The report, and the samples of what was trained on, in a folder of this name."""
        shown = self.folder / name
        self.command("report", self.bucket.url, "--out", str(shown))
        samples = self.command("rollouts", self.bucket.url, "--count", "100", "--json")
        (shown / "rollouts.jsonl").write_text(samples)
        for number in range(3):
            place = f"live/{number}"
            if self.bucket.get(keys.rollout("live", number), limit=1 << 28) is not None:
                text = self.command("rollouts", self.bucket.url, "--group", place, "--json")
                (shown / f"group-{number}.json").write_text(text)

    def places(self, shown):
        """All files of the run by place; each file is in exactly one."""
        files = {
            name: data
            for name, data in all_files(self.folder).items()
            if not name.startswith("shown-") or name.startswith(shown)
        }
        prefixes = {
            "captures": "bucket/live/captures/", "feedback": "bucket/live/feedback/",
            "lineages": "bucket/live/lineage/", "erasures": "bucket/live/forgotten/",
            "gateways": "bucket/live/gateways/", "groups": "bucket/rollouts/",
            "references": "bucket/references/", "weights": "bucket/weights/",
            "checkpoints": "bucket/checkpoints/", "events": "bucket/events/",
            "archive": "bucket/archive/", "rest of the bucket": "bucket/",
            "spool of captures": "state/captures/", "spool of feedback": "state/feedback/",
            "rest of the gateway": "state/", "relay": "relay/", "mirror": ".mirror.deltawire/",
            "index of the page": "index/", "model": "model/",
            "report": f"{shown}/report", "rollouts": f"{shown}/",
        }  # fmt: skip
        found = {place: {} for place in prefixes}
        for name, data in files.items():
            places = (place for place, prefix in prefixes.items() if name.startswith(prefix))
            found[next(places, None) or pytest.fail(f"{name} is in no known place")][name] = data
        return found


BEFORE = {
    "captures": {"asked", "answered", "pseudonym"},
    "feedback": {"note", "pseudonym"},
    "lineages": {"pseudonym"},
    "groups": {"asked", "answered"},
    "spool of captures": {"asked", "answered", "pseudonym"},
    "spool of feedback": {"note", "pseudonym"},
    "rollouts": {"asked", "answered"},
}
"""The places that hold something of a user before an erasure. All others never do."""
AFTER = {"erasures": {"pseudonym"}}


def found_in(places, pseudonym):
    """Returns what of the user each place holds, in names or in contents."""
    texts = {
        "asked": ASKED, "answered": ANSWERED, "note": NOTE, "pseudonym": pseudonym, "name": ALICE
    }  # fmt: skip
    found = {}
    for place, files in places.items():
        data = b"\0".join(name.encode() + b"\0" + content for name, content in files.items())
        held = {name for name, text in texts.items() if holds(data, text)}
        if held:
            found[place] = held
    return found


async def ask_and_report(at, user, *, report=True):
    text = f"{ASKED} 1" if user == ALICE else f"question of {user}"
    receipt = await at.receipt(text, user=user)
    if report:
        more = {"note": NOTE, "id": f"{NOTE}-{receipt[-20:]}"} if user == ALICE else {}
        status, _ = await at.report(receipt, "accept", len(user) // 2 % 2 * 1.0, **more)
        assert status == 200


async def live_until_shown(at, run):
    """Users ask; what they said is learned from, shown, and waits in the spool."""
    for number in range(12):
        await ask_and_report(at, ALICE if number % 4 == 1 else f"user{'x' * number}")
    await ask_and_report(at, ALICE, report=False)  # Held: no group has it.
    await at.uploaded()
    await asyncio.to_thread(run.learn)
    await asyncio.to_thread(run.publish_elsewhere)
    await asyncio.to_thread(run.show, "shown-before")
    await ask_and_report(at, ALICE)
    spool = run.state / "captures"
    at.recorder.captures.seal().result(60)
    for path in spool.glob("*.rows"):
        path.write_bytes(path.read_bytes() + b"damage")
    await at.uploaded()
    assert list(spool.glob("*.damaged")), "set aside, since it cannot be read"
    await ask_and_report(at, ALICE)


def test_a_planted_text_is_gone_from_every_place(tmp_path, monkeypatch):
    run = LiveRun(tmp_path)
    monkeypatch.setenv(SECRET_VARIABLE, secret_text([GENERATION]))
    monkeypatch.setattr(live_gateway, "start_run", lambda bucket: run.run)
    options = {"consent": ConsentRule(share=1.0), "keep_text": True, "replica": ByteReplica}

    async def scenario():
        async with live_serving(run.bucket, run.state, monkeypatch, **options) as at:
            await live_until_shown(at, run)
            before = run.places("shown-before")
            assert [place for place, files in before.items() if not files] == ["erasures"]
            assert found_in(before, run.pseudonym) == BEFORE
            said = await asyncio.to_thread(run.command, "forget", run.bucket.url, ALICE, "--json")
            record = json.loads(said)
            assert record["answers"] == 4
            assert record["feedback"] > 4, "what detectors found in the user's turns too"
            assert record["groups"] == [["live", 0], ["live", 1], ["live", 2]]
            assert record["versions"] == [1, 2]
            await at.uploaded()
            remembered = at.recorder.conversations._last.values()
            assert not [one for one in remembered if ASKED in one.asked]
            await ask_and_report(at, ALICE)
            await at.uploaded()

    try:
        asyncio.run(scenario())
        put_heartbeat(run.bucket, "live", stored=3, at=time.time())
        train(run.bucket, to=3)
        run.show("shown-after")
        after = run.places("shown-after")
        empty = {place for place, files in after.items() if not files}
        assert empty <= {"references", "spool of captures"}
        assert found_in(after, run.pseudonym) == AFTER
    finally:
        run.reader.close()
    assert found_in(run.places("shown-after"), run.pseudonym) == AFTER, "also of a closed index"
    records = LiveRecords(run.bucket)
    records.poll()
    assert (records.counts["answers"], records.counts["reports"]) == (9, 9)


def test_the_search_sees_through_compression_and_encodings():
    for name, data in packed_copies(ASKED).items():
        assert holds(data, ASKED), name
        assert not holds(data, ASKED[::-1]), name
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("note.txt", f"{ASKED} " * 20)
    assert ASKED.encode() not in packed.getvalue()
    assert holds(packed.getvalue(), ASKED)
