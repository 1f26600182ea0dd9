"""The commands that delete, archive, copy, compact, prune, restore, forget or rebuild, each with a
small fixed run and an audit."""

from contextlib import contextmanager
from functools import partial

import msgspec
import pytest
from answer_damages import DAY_S, EPOCH, Command, Stage
from live_answers import NOW, answer, config_of, put_rows, report

from deltawire.errors import CorruptError, InputError, UnreadableError
from deltawire.events import Evaluated, encode_lines
from deltawire.live.compaction import compactor
from deltawire.live.compaction.compactor import StreamCompactor
from deltawire.live.compaction.stream_rows import ServedRows
from deltawire.live.erasure.forgetting import forget_user
from deltawire.live.erasure.rebuilding import rebuild_without
from deltawire.live.learning.grouping import GroupMaker
from deltawire.live.learning.learner import LiveGroups
from deltawire.live.learning.records import LiveRecords
from deltawire.rl.control.released_groups import ReleasedGroups
from deltawire.rl.control.rollout_retention import RolloutRetention
from deltawire.rl.trainer.rollbacks import RollbackWatch
from deltawire.runtime.compacted_segments import list_compacted, require_compacted
from deltawire.runtime.decision_log import DecisionLog
from deltawire.runtime.event_archive import EventArchiver, archived_segments
from deltawire.sync import load_mirror, newest_version, read_manifest, read_run
from deltawire.sync.chain.retention import prune
from deltawire.sync.chain.tags import add_tag, tagged_version
from deltawire.sync.maintain.fsck import check_run
from deltawire.sync.maintain.relay import Relay
from deltawire.sync.publish.compaction import Compactor
from deltawire.testing.tiny import same_bits, start_publisher, weights
from deltawire.train.checkpoint_folders import checkpoint_versions, keep_checkpoint
from deltawire.wire import keys
from deltawire.wire.decisions import FORGETS, Decision, RestoreRecord, ServedVersion
from deltawire.wire.ledger import CommitMetadata, ranges_of
from deltawire.wire.objects import decode_json, encode_json
from deltawire.wire.retained import Retained

USER = "b0" * 16
CHANGING = (keys.CLOCK, keys.DELETION_INTENTS)
"""Keys whose objects differ from run to run."""


def publish(bucket, versions, *, of=lambda version: version, metadata=None, **options):
    """Publishes versions, of which each has the weights ``of`` its number."""
    publisher = start_publisher(bucket, **{"anchor_every": 4, **options})
    for version in versions:
        publisher.publish(weights(of(version)), metadata=(metadata or {}).get(version, {}))
    publisher.close()
    return publisher.run


def assert_reads(bucket, versions, *, of=lambda version: version):
    """Every one of these versions is read, bit by bit."""
    run = read_run(bucket)
    for version in versions:
        try:
            mirror = load_mirror(bucket, run, at=version)
        except CorruptError as error:
            raise AssertionError(f"version {version} cannot be read: {error}") from error
        assert mirror is not None, f"version {version} is gone"
        assert same_bits(mirror.tensors, weights(of(version))), f"version {version} has other bits"


def assert_same_keys(stage, sound, name="run", *, but=CHANGING):
    """The second run left the objects that a sound run leaves."""
    left, right = (
        {key for key in one.sound(name).contents() if not key.startswith(but)}
        for one in (stage, sound)
    )
    assert left == right, f"not finished: {sorted(left ^ right)[:3]}"


# Retention


def retention_stage():
    """Versions 0 to 8 with anchors at 0, 4 and 8, and checkpoints at 5 and 8, so that 4 is the
    oldest one that is needed."""
    stage = Stage.begin("run")
    bucket = stage.sound()
    publish(bucket, range(8), compaction_strides=(2, 4))
    put_checkpoints(bucket, [5])
    stage.remember()
    publish(bucket, [8], compaction_strides=(2, 4))
    put_checkpoints(bucket, [8])
    stage.facts["run"] = read_run(bucket)
    return stage


def put_checkpoints(bucket, versions):
    for version in versions:
        bucket.put(keys.checkpoint_commit(version), b'{"format":1,"version":%d}' % version)
        bucket.put(keys.checkpoint_part(version, 0), b"state of %d" % version)


def run_retention(stage):
    return prune(stage.bucket(), stage.facts["run"], cutoff=8, grace_s=0)


def audit_retention(stage, _found):
    bucket = stage.sound()
    newest = newest_version(bucket)
    assert newest is not None, "no version is left"
    # Version 9 is that of `publish_old_weights`.
    assert_reads(bucket, range(4, newest + 1), of=lambda version: version if version < 9 else 0)
    found = check_run(bucket, deep=False)
    assert not found.faults, f"fsck: {found.faults[0].key}: {found.faults[0].message}"


def finished_retention(stage, sound):
    run, bucket = read_run(stage.sound()), stage.sound()
    for version in range(4):
        manifest = read_manifest(bucket, run, version)
        assert manifest is not None, f"version {version} has no tombstone"
        assert manifest.pruned, f"version {version} is not pruned"
    if newest_version(bucket) == 8:
        assert_same_keys(stage, sound)


def publish_old_weights(stage):
    """Another process publishes the weights of version 0 again, whose blobs were deleted."""
    if newest_version(stage.sound()) == 8:
        publish(stage.sound(), [9], of=lambda _: 0, anchor_every=1)


def tagged_stage():
    """Versions 0 to 5 with anchors at 0, 2 and 4, and a tag at 3, so that 2 is the oldest one that
    is needed."""
    stage = Stage.begin("run")
    bucket = stage.sound()
    run = publish(bucket, range(5), anchor_every=2)
    stage.remember()
    add_tag(bucket, run, 3, "best")
    publish(bucket, [5], anchor_every=2)
    stage.facts["run"] = run
    return stage


def run_tagged(stage):
    return prune(stage.bucket(), stage.facts["run"], cutoff=5, grace_s=0)


def audit_tagged(stage, _found):
    assert_reads(stage.sound(), range(2, 6))
    assert tagged_version(stage.sound(), stage.facts["run"], "best") == 3


def finished_tagged(stage, sound):
    run, bucket = read_run(stage.sound()), stage.sound()
    assert all(read_manifest(bucket, run, version).pruned for version in range(2))
    assert_same_keys(stage, sound)


# A tag while retention has closed a version


def closed_stage():
    """As `tagged_stage`, without the tag; the floor is at 4, and nothing is deleted yet."""
    stage = Stage.begin("run")
    bucket = stage.sound()
    stage.facts["run"] = publish(bucket, range(5), anchor_every=2)
    stage.remember()
    prune(bucket, stage.facts["run"], cutoff=4, grace_s=1000)
    return stage


def run_tag(stage):
    """Tags a version that stays, and one that was closed."""
    bucket, run = stage.bucket(), stage.facts["run"]
    kept = add_tag(bucket, run, 4, "kept")
    try:
        add_tag(bucket, run, 3, "closed")
    except InputError:
        return kept
    raise AssertionError("a version that retention has closed was tagged")


def audit_tag(stage, tag):
    bucket, run = stage.sound(), stage.facts["run"]
    assert_reads(bucket, range(5))
    if tag is not None:
        assert tagged_version(bucket, run, "kept") == 4, "a tag that was reported is not there"


# Relay


def relay_stage():
    """A source with versions 0 to 4, and an empty destination."""
    stage = Stage.begin("source", "region")
    publish(stage.sound("source"), range(4), anchor_every=2)
    stage.remember()
    publish(stage.sound("source"), [4], anchor_every=2)
    return stage


def pruned_source_stage():
    """A relay had copied versions 0 to 6 before versions 0 to 3 were pruned at the source."""
    stage = Stage.begin("source", "region")
    publish(stage.sound("source"), range(7))
    relay = Relay(stage.sound("source"), stage.sound("region"), strides=(), start=0)
    relay.advance()
    relay.close()
    stage.remember()
    prune(stage.sound("source"), read_run(stage.sound("source")), cutoff=6, grace_s=0)
    publish(stage.sound("source"), [7])
    return stage


def run_relay(stage):
    relay = Relay(
        stage.bucket("source"), stage.bucket("region"),
        strides=(2,), start=0, grace_s=0,
    )  # fmt: skip
    try:
        relay.advance()
    finally:
        relay.close()
    return relay.alarm


def audit_relay(stage, _alarm):
    source, region = stage.sound("source").contents(), stage.sound("region").contents()
    for key in region.keys() & source.keys():
        if key == keys.RUN or key.startswith(keys.BLOBS):
            assert region[key] == source[key], f"{key} is not the source's"


def finished_relay(stage, sound):
    newest = newest_version(stage.sound("source"))
    first = 4 if newest == 7 else 0
    assert newest_version(stage.sound("region")) == newest
    assert_reads(stage.sound("region"), range(first, newest + 1))
    # Compacted deltas are made where they can be made at once, and nothing depends on them.
    anchors, others = (
        {
            one
            for one in stage_.sound("region").list(keys.COMPACTED)
            if keys.compacted_of(one)[0] is None
        }
        for stage_ in (stage, sound)
    )
    assert anchors == others, "an anchor is not at the destination"


# Compaction


def compaction_stage():
    """Versions 0 to 4 without compacted deltas."""
    stage = Stage.begin("run")
    publish(stage.sound(), range(4), anchor_every=100)
    stage.remember()
    publish(stage.sound(), [4], anchor_every=100)
    stage.facts["run"] = read_run(stage.sound())
    return stage


def run_compaction(stage):
    compactor = Compactor(stage.bucket(), stage.facts["run"], (2, 4))
    return compactor.compact_up_to(4)


def audit_compaction(stage, _made):
    assert_reads(stage.sound(), [0, 2, 4])


# Archives of events


STREAMS = {"w7-n": range(6), "trainer-n": range(16)}


def archive_stage():
    """A stream of a worker that is gone, a long one of a trainer, and archives 2 and 3, of which
    one is six days old; groups below version 40 were deleted."""
    stage = Stage.begin("run")
    bucket, clock = stage.sound(), stage.clock
    put_floors(bucket, rollouts=30, archives=1)
    stage.remember()
    put_floors(bucket, rollouts=40, archives=2)
    for number, stream in ((2, "old-n"), (3, "recent-n")):
        bucket.put(keys.events(stream, 0), event(stream, 0))
        archiver = EventArchiver(bucket, after_s=0.0, clock=lambda: clock.now)
        archiver.archive()
        assert bucket.list(keys.ARCHIVE)[-1] == keys.archive(number)
        clock.advance(6 * DAY_S if number == 2 else 0.0)
    for stream, numbers in STREAMS.items():
        for number in numbers:
            bucket.put(keys.events(stream, number), event(stream, number))
            clock.advance(1.0)
    clock.advance(1000.0)
    bucket.put(keys.events("trainer-n", 16), event("trainer-n", 16))
    return stage


def put_floors(bucket, **floors):
    bucket.put(keys.RETAINED, encode_json(Retained(**floors)))


def event(stream, number):
    return encode_lines(
        [Evaluated(process=stream, at=0.0, version=number, accuracy=0.5, problems=1, seconds=1.0)]
    )


def run_archive(stage):
    clock = stage.clock
    archiver = EventArchiver(
        stage.bucket(), after_s=600.0, compact_segments=4, keep_days=4.0, clock=lambda: clock.now
    )
    archiver.archive()
    clock.advance(700.0)
    return archiver.archive()


def audit_archive(stage, _count):
    bucket = stage.sound()
    readable = {(one.stream, one.number): one.data for one in archived_segments(bucket)}
    for key in bucket.list(keys.EVENTS):
        stream = keys.stream_of(key)
        readable[stream, keys.trailing_number(key)] = bucket.get(key, limit=1 << 20)
    wanted = [(stream, n) for stream, numbers in STREAMS.items() for n in numbers]
    for stream, number in [("recent-n", 0), *wanted]:
        found = readable.get((stream, number))
        assert found == event(stream, number), f"segment {number} of {stream} is lost"
    assert_floors(bucket, rollouts=40, archives=2)


def assert_floors(bucket, *, rollouts, archives):
    stored = decode_json(bucket.get(keys.RETAINED, limit=4096), Retained, run="", key=keys.RETAINED)
    assert stored.rollouts >= rollouts, f"the floor of groups fell to {stored.rollouts}"
    assert stored.archives >= archives, f"the floor of archives fell to {stored.archives}"


def finished_archive(stage, _sound):
    left = stage.sound().list(keys.EVENTS)
    assert not [key for key in left if "w7-n" in key], "a stream is not archived"


# Groups


def groups_stage():
    """Version n consumed group n; those before version 2 were deleted, those before 5 are due."""
    stage = Stage.begin("run")
    bucket = stage.sound()
    steps = {v: CommitMetadata(step=v, consumed=[("w0", v)]).to_dict() for v in range(1, 8)}
    stage.facts["run"] = publish(bucket, range(7), metadata=steps)
    put_floors(bucket, rollouts=2, archives=6)
    stage.remember()
    publish(bucket, [7], metadata=steps)
    put_floors(bucket, rollouts=2, archives=7)
    for number in range(2, 9):
        bucket.put(keys.rollout("w0", number), b"group %d" % number)
    return stage


def run_groups(stage):
    kept = RolloutRetention(
        stage.bucket(), stage.facts["run"], keep=3, clock=lambda: stage.clock.now / 1e6
    )
    return kept.trim(newest=7, oldest_checkpoint=6)


def audit_groups(stage, _count):
    bucket = stage.sound()
    assert_floors(bucket, rollouts=2, archives=7)
    floor = decode_json(bucket.get(keys.RETAINED, limit=4096), Retained, run="", key="").rollouts
    assert floor <= 5
    for number in range(max(floor, 2), 9):
        assert bucket.exists(keys.rollout("w0", number)), f"group {number} is lost"


def finished_groups(stage, sound):
    assert_same_keys(stage, sound)


# Checkpoints, and a trainer that restores


def serve(bucket, run, number, verdict, serving, *, candidate=None, **more):
    def named(version):
        return ServedVersion(version, read_manifest(bucket, run, version).digest)

    made = Decision(
        number=number, run=run.id, verdict=verdict, at=0.0, by="ann", serving=named(serving),
        candidate=None if candidate is None else named(candidate), **more,
    )  # fmt: skip
    bucket.put(keys.live_decision(number), encode_json(made))


def restore_stage():
    """Version 2 served, then 4 was promoted and rolled back. Versions from 3 on consumed groups.
    Checkpoints are at 2, 4 and 6; those at 2 and 4 are kept."""
    stage = Stage.begin("run")
    bucket = stage.sound()
    steps = {v: CommitMetadata(step=v, consumed=[("w0", v)]).to_dict() for v in range(1, 7)}
    run = stage.facts["run"] = publish(bucket, range(6), metadata=steps)
    put_checkpoints(bucket, [2, 4])
    for version in (2, 4):
        keep_checkpoint(bucket, version)
    serve(bucket, run, 0, "serve", 1)
    serve(bucket, run, 1, "promote", 2)
    stage.remember()
    publish(bucket, [6], metadata=steps)
    put_checkpoints(bucket, [6])
    serve(bucket, run, 2, "rollback", 2, candidate=6)
    return stage


def run_restore(stage):
    watch = RollbackWatch(stage.bucket(), stage.facts["run"], checkpoints=1)
    decision = watch.poll(version=6)
    return None if decision is None else watch.record(decision, version=6)


def audit_restore(stage, record):
    bucket = stage.sound()
    for version in (2, 6):
        for key in (keys.checkpoint_commit(version), keys.checkpoint_part(version, 0)):
            assert bucket.exists(key), f"the state of version {version} is lost"
    if record is not None:
        assert record.restored.version == 2
        assert record.groups == ranges_of([("w0", v) for v in range(3, 7)]), (
            "a restore would consume groups a second time"
        )


def finished_restore(stage, sound):
    assert_same_keys(stage, sound)
    assert checkpoint_versions(stage.sound()) == [2, 6]


# Segments of answers and feedback


SEGMENTS, LATER = 4, 3
OLD = 2
"""The first segments are from a month before the others."""


@contextmanager
def few_segments():
    """Two objects make one, and the newest segment stays."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compactor, "FAN_IN", 2)
        patch.setattr(compactor, "KEPT", 1)
        yield


def compaction_of_answers_stage(*, compacted=False):
    """Streams of seven segments of two answers each, of which six are due."""
    stage = Stage.begin("run")
    bucket = stage.sound()
    stage.facts["run"] = publish(bucket, range(1))
    for number in range(SEGMENTS + LATER):
        if number == SEGMENTS:
            stage.remember()
        at = NOW - 30 * DAY_S * (number < OLD)
        pair = (2 * number, 2 * number + 1)
        users = [USER if one % 6 == 1 else None for one in pair]
        put_rows(
            bucket, number,
            [answer(n, user=user, at=at) for n, user in zip(pair, users, strict=True)],
            [report(n, user=user, at=at) for n, user in zip(pair, users, strict=True)],
        )  # fmt: skip
        stage.clock.advance(2.0)
    if compacted:
        run_compaction_of_answers(stage, bucket)
    return stage


def run_compaction_of_answers(stage, bucket=None):
    bucket = bucket or stage.bucket()
    made = 0
    for stream in ("captures", "feedback"):
        one = StreamCompactor(bucket, ServedRows(stream), "g0", clock=age_of(stage.clock))
        with few_segments():
            made += one.compact()
        if one.alarm:
            raise UnreadableError(one.alarm)
    return made


def age_of(clock):
    """Objects in `DatedBucket` are dated from `EPOCH` on."""
    return lambda: EPOCH.timestamp() + clock.now


def answers_left(stage):
    rows = LiveRecords(stage.sound())
    rows.poll()
    assert not rows.alarm, rows.alarm
    answers = {int(one, 16) for one in rows.answers}
    for number in answers:
        stored = rows.answers[f"{number:032x}"]
        assert stored.tokens == answer(number).tokens, f"answer {number} has other tokens"
    assert answers == {int(one, 16) for one, about in rows.reports.items() if about}
    return answers


def audit_compaction_of_answers(stage, _made):
    assert answers_left(stage) == set(range(2 * (SEGMENTS + LATER))), "an answer is lost"


def finished_compaction_of_answers(stage, sound):
    for stream in ("captures", "feedback"):
        left, wanted = (
            [
                (one.span, len(require_compacted(at.sound(), one)))
                for one in list_compacted(at.sound(), stream, "g0").segments
            ]
            for at in (stage, sound)
        )
        assert sum(count for _, count in left) >= sum(count for _, count in wanted)
        listing = list_compacted(stage.sound(), stream, "g0")
        assert listing.segments.keys() <= listing.indexes.keys(), "a segment has no index"


def run_expiry(stage):
    bucket = stage.bucket()
    return sum(
        StreamCompactor(bucket, ServedRows(stream), "g0").expire(NOW - 10 * DAY_S)
        for stream in ("captures", "feedback")
    )


def audit_expiry(stage, _deleted):
    left, every = answers_left(stage), set(range(2 * (SEGMENTS + LATER)))
    assert left >= every - set(range(2 * OLD)), "an answer that is young is lost"


def finished_expiry(stage, _sound):
    assert not answers_left(stage) & set(range(2 * OLD)), "an old answer is still there"


def audit_forget_compacted(stage, record):
    left, every = answers_left(stage), set(range(2 * (SEGMENTS + LATER)))
    mine = {n for n in every if n % 6 == 1}
    assert left >= every - mine, "an answer of another user is lost"
    if record is None:
        return
    store = stage.sound().contents()
    assert store.pop(keys.live_forgotten(USER), b""), "the record of the erasure is lost"
    data = b"".join(key.encode() + body for key, body in store.items())
    assert USER.encode() not in data, (
        "the user's name is still stored, and the erasure was reported"
    )
    for number in mine:
        assert answer(number).tokens not in data, "an answer is stored, its erasure was reported"


def finished_forget_compacted(stage, sound):
    assert answers_left(stage) == answers_left(sound)


# A user who is forgotten


def live_stage():
    """Three groups of four answers; versions 2 and 3 consumed those of the user, a third waits."""
    stage = Stage.begin("run")
    bucket = stage.sound()
    owners = {2: USER, 6: USER, 10: USER}
    records = LiveRecords(bucket)
    steps = {2: [("live", 0)], 3: [("live", 1)]}
    groups = None
    for number in range(3):
        numbers = range(4 * number + 1, 4 * number + 5)
        put_rows(
            bucket, number,
            [answer(n, user=owners.get(n)) for n in numbers],
            [report(n, user=owners.get(n), value=float(n % 3 == 0)) for n in numbers],
        )  # fmt: skip
        records.poll()
        # One user answers in every group, which the default ratio would not allow.
        maker = GroupMaker(config_of(user_ratio=0.0), records)
        groups = groups or LiveGroups(bucket, "live", maker, first=0)
        if number == 2:
            stage.remember()
        assert groups.store(f"n{number}", NOW + 100)
    metadata = {
        version: CommitMetadata(step=version, consumed=consumed).to_dict()
        for version, consumed in steps.items()
    }
    run = stage.facts["run"] = publish(bucket, range(3), metadata=metadata)
    stage.earlier["run"] = bucket.copy(stage.clock)
    publish(bucket, [3], metadata=metadata)
    bucket.put(keys.checkpoint_commit(3), b"{}")
    serve(bucket, run, 0, "serve", 0)
    serve(bucket, run, 1, "promote", 1)
    return stage


def run_forget(stage):
    return forget_user(stage.bucket(), stage.facts["run"], USER)


def audit_forget(stage, record):
    store = stage.sound().contents()
    rows = LiveRecords(stage.sound())
    rows.poll()
    assert rows.counts["damaged_segments"] == 0
    for number in range(1, 13):
        if number not in (2, 6, 10):
            key = answer(number).answer
            assert key in rows.answers, f"answer {number} of another user is lost"
            assert rows.reports.get(key), f"the report about answer {number} is lost"
    assert keys.rollout("live", 2) in store, "a group that waits for the trainer is lost"
    if record is None:
        return
    forgotten = store.pop(keys.live_forgotten(USER), b"")
    assert forgotten, "the record of the erasure is lost"
    data = b"".join(key.encode() + body for key, body in store.items())
    assert USER.encode() not in data, (
        "the user's name is still stored, and the erasure was reported"
    )
    for number in (2, 6, 10):
        assert answer(number).tokens not in data, "an answer is stored, its erasure was reported"
    assert set(record.versions) == {2, 3}, f"the erasure reports versions {record.versions}"


def finished_forget(stage, sound):
    assert_same_keys(stage, sound)
    data = stage.sound().contents()[keys.live_forgotten(USER)]
    assert msgspec.json.decode(data)["versions"] == [2, 3]


# A run that is rebuilt without a user


def run_rebuild(stage):
    bucket = stage.bucket()
    return rebuild_without(bucket, stage.facts["run"], [3], by="ann", now=1.0)


def audit_rebuild(stage, rebuild):
    if rebuild is None:
        return
    assert rebuild.state == "waits_for_trainer", "a rebuild was reported as not needed"
    log = DecisionLog(stage.sound(), stage.facts["run"].id)
    log.poll()
    assert log.newest.verdict == "rollback", "a rebuild was reported, and nothing asks for it"
    assert FORGETS in log.newest.evidence
    assert log.newest.serving.version == rebuild.restores == 1, "another version is restored"


def finished_rebuild(stage, sound):
    assert_same_keys(stage, sound)


# Groups that a rebuild released


def release_stage():
    """As `live_stage`, and the trainer has restored version 1 in version 4."""
    stage = live_stage()
    bucket, run = stage.sound(), stage.facts["run"]
    serve(bucket, run, 2, "rollback", 1, candidate=3, evidence={FORGETS: 2.0})
    stage.remember()
    record = RestoreRecord(
        decision=2, restored=ServedVersion(1, read_manifest(bucket, run, 1).digest), first=2,
        last=3, state="weights", groups=ranges_of([("live", 0), ("live", 1)]),
    )  # fmt: skip
    publish(bucket, [4], of=lambda _: 1, metadata={4: record.to_dict()})
    return stage


def run_release(stage):
    released = ReleasedGroups(stage.bucket(), stage.facts["run"])
    released.poll()
    stage.faulty["run"].heal()
    released.poll()
    return released.groups


def audit_release(_stage, groups):
    if groups is not None:
        assert groups == {("live", 0), ("live", 1)}, "groups that were released stay claimed"


def unchanged(stage, sound):
    assert_same_keys(stage, sound)


COMMANDS = [
    Command(
        "prune", retention_stage, run_retention, audit_retention, finished_retention,
        meanwhile=publish_old_weights,
    ),
    Command("prune, a tag", tagged_stage, run_tagged, audit_tagged, finished_tagged),
    Command("tag", closed_stage, run_tag, audit_tag, assert_same_keys),
    Command("relay", relay_stage, run_relay, audit_relay, finished_relay),
    Command("relay prunes", pruned_source_stage, run_relay, audit_relay, finished_relay),
    Command("compact", compaction_stage, run_compaction, audit_compaction, assert_same_keys),
    Command("archive", archive_stage, run_archive, audit_archive, finished_archive),
    Command("trim groups", groups_stage, run_groups, audit_groups, finished_groups),
    Command("restore", restore_stage, run_restore, audit_restore, finished_restore),
    Command(
        "compact answers", compaction_of_answers_stage, run_compaction_of_answers,
        audit_compaction_of_answers, finished_compaction_of_answers,
    ),
    Command(
        "expire answers", partial(compaction_of_answers_stage, compacted=True), run_expiry,
        audit_expiry, finished_expiry,
    ),
    Command(
        "forget, compacted", partial(compaction_of_answers_stage, compacted=True), run_forget,
        audit_forget_compacted, finished_forget_compacted,
    ),
    Command("forget", live_stage, run_forget, audit_forget, finished_forget),
    Command("rebuild", live_stage, run_rebuild, audit_rebuild, finished_rebuild),
    Command("release", release_stage, run_release, audit_release, unchanged),
]  # fmt: skip
