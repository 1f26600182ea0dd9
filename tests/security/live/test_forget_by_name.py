"""Erasure, readmission and export by a user's name: all gateways and keys, or nothing."""

import asyncio
import json
import urllib.request

import pytest
from forgotten_users import everything_in, learned
from heartbeats import put_heartbeat
from live_answers import answer, put_rows, report
from live_gateway import GENERATION, SECRET, live_serving, published, write_secret

from deltawire.cli.exit_codes import FORKED, UNKNOWN_USER
from deltawire.cli.main import main
from deltawire.launch.live_secret import SECRET_VARIABLE, SecretPlace
from deltawire.launch.live_users import old_versions
from deltawire.live.capture.consent import ConsentRule
from deltawire.live.capture.pseudonyms import Pseudonyms
from deltawire.live.deployment_secret import Generation
from deltawire.live.erasure.forgetting import GroupsNeededError
from deltawire.runtime.process import beats
from deltawire.store import open_bucket
from deltawire.sync import read_run
from deltawire.testing.tiny import start_run
from deltawire.wire import keys
from deltawire.wire.captures import GatewayState
from deltawire.wire.objects import encode_json
from deltawire.wire.signing import Ed25519Signer

ALICE = Pseudonyms(SECRET).user("alice")


@pytest.fixture(autouse=True)
def no_secret_of_this_machine(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state-home"))
    monkeypatch.delenv(SECRET_VARIABLE, raising=False)


@pytest.fixture
def deployment(tmp_path):
    """A folder bucket in which gateway g0 stored two answers of alice and one of another user."""
    bucket = published(1, str(tmp_path / "run"))
    secret = write_secret(bucket, read_run(bucket), tmp_path / "secret")
    rows = [answer(1, user=ALICE, text=b'{"texts": []}'), answer(2), answer(3, user=ALICE)]
    put_rows(bucket, 0, rows, [report(1, user=ALICE)])
    return bucket, secret


def older_gateway(bucket, name, key, names, first):
    """Returns the objects of a gateway of an earlier release: rows and its public key."""
    signer = Ed25519Signer.generate()
    signer.write(key)
    pseudonyms = Generation.adopt(signer).pseudonyms
    rows = [answer(first + n, user=pseudonyms.user(name)) for n, name in enumerate(names)]
    put_rows(bucket, 0, rows, gateway=name)
    run = read_run(bucket)
    state = GatewayState(
        gateway=name, run=run.id, started=0.0, at=0.0, public_key=signer.public_key
    )
    bucket.put(keys.live_gateway(name), encode_json(state))
    return {row.user for row in rows}


def run_json(capsys, *command):
    code = main([*command, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_an_unknown_user_is_unknown(deployment, capsys):
    bucket, secret = deployment
    code, found = run_json(capsys, "forget", bucket.url, "alicia", "--secret", secret)
    assert (code, found["known"], found["answers"]) == (UNKNOWN_USER, False, 0)
    assert main(["forget", bucket.url, "alicia", "--secret", secret]) == UNKNOWN_USER
    said = capsys.readouterr().out
    assert "unknown user" in said
    assert "deleted" not in said
    assert main(["live", "export", bucket.url, "alicia2", "--secret", secret]) == UNKNOWN_USER
    assert "unknown user" in capsys.readouterr().err
    code, found = run_json(capsys, "forget", bucket.url, "alice ", "--secret", secret)
    assert (code, found["known"], found["answers"], found["feedback"]) == (0, True, 2, 1)
    code, found = run_json(capsys, "forget", bucket.url, "alice", "--secret", secret)
    assert (code, found["known"], found["answers"]) == (0, True, 2), "known from the record"


@pytest.mark.parametrize("what", ["answers", "reports"])
def test_a_user_who_is_only_in_a_fork_is_known(deployment, capsys, what):
    bucket, secret = deployment
    fork = published(1, f"{bucket.url}/forks/one".removeprefix("file://"))
    user = Pseudonyms(SECRET).user("bob")
    rows = [answer(9, user=user)] if what == "answers" else []
    put_rows(fork, 0, rows, [] if rows else [report(9, user=user)])
    for _ in range(2):
        code, found = run_json(capsys, "forget", bucket.url, "bob", "--secret", secret)
        assert (code, found["known"], found["answers"]) == (0, True, 0)
        (there,) = found["in_forks"]
        assert (there["answers"], there["feedback"]) == ((1, 0) if rows else (0, 1))
    assert main(["forget", bucket.url, "bob", "--secret", secret]) == 0
    said = capsys.readouterr().out
    assert f"in the fork {fork.url}: deleted" in said
    assert "unknown user" not in said


def test_a_fork_of_a_fork_that_was_trained_on_the_user_is_named(deployment, capsys):
    bucket, secret = deployment
    fork = open_bucket(f"{bucket.url}/forks/one", create=True)
    start_run(fork)
    learned(fork, {2: Pseudonyms(SECRET).user("bob")})
    theirs = published(1, f"{fork.url}/forks/two".removeprefix("file://"))
    code, found = run_json(capsys, "forget", bucket.url, "bob", "--secret", secret)
    assert (code, found["known"]) == (FORKED, True)
    assert found["in_forks"][0]["versions"] == [1]
    assert found["forks"] == found["in_forks"][0]["forks"] == [theirs.url]
    assert main(["forget", bucket.url, "bob", "--secret", secret]) == FORKED
    assert f"the fork {theirs.url} began with weights" in capsys.readouterr().out


@pytest.mark.parametrize("at", ["parent", "fork"])
def test_groups_that_a_trainer_needs_delay_no_erasure_in_forks(tmp_path, capsys, at):
    user = Pseudonyms(SECRET).user("bob")
    parent = open_bucket(str(tmp_path / "run"), create=True)
    secret = write_secret(parent, start_run(parent), tmp_path / "secret")
    fork = open_bucket(f"{parent.url}/forks/one", create=True)
    start_run(fork)
    here, there = (parent, fork) if at == "parent" else (fork, parent)
    learned(here, {2: user})
    here.put(keys.checkpoint_commit(0), b"{}")
    put_rows(there, 0, [answer(9, user=user)])
    code = main(["forget", parent.url, "bob", "--secret", secret])
    said = capsys.readouterr()
    assert code == (FORKED if at == "fork" else GroupsNeededError.exit_code)
    assert "newest checkpoint" in said.out + said.err
    assert user.encode() not in there.get(keys.live_captures("g0", 0), limit=1 << 20)
    if at == "fork":
        assert f"{fork.url} still holds the user" in said.out


def test_groups_that_a_trainer_needs_are_not_given_up_while_one_is_alive(
    tmp_path, capsys, monkeypatch
):
    """A trainer is alive if its heartbeat changes while one looks."""
    user = Pseudonyms(SECRET).user("bob")
    parent = open_bucket(str(tmp_path / "run"), create=True)
    secret = write_secret(parent, start_run(parent), tmp_path / "secret")
    fork = open_bucket(f"{parent.url}/forks/one", create=True)
    start_run(fork)
    alive = [parent, fork]
    for bucket in alive:
        learned(bucket, {2: user})
        put_heartbeat(bucket, "trainer", "trainer")
    beat = iter(range(1, 100))

    def later(_):
        for bucket in alive:
            put_heartbeat(bucket, "trainer", "trainer", number=next(beat))

    monkeypatch.setattr(beats, "__kwdefaults__", {"wait": later})
    command = ["forget", parent.url, "bob", "--secret", secret, "--no-trainer"]
    before = parent.list(keys.LIVE)
    assert main(command) == 2
    assert "trainer is alive" in capsys.readouterr().err
    assert parent.list(keys.LIVE) == before
    alive.remove(parent)
    assert main(command) == FORKED
    assert f"{fork.url} still holds the user" in capsys.readouterr().out
    assert not parent.exists(keys.rollout("live", 0))
    assert fork.exists(keys.rollout("live", 0))
    alive.remove(fork)
    assert main(command) == FORKED
    assert "began with weights" in capsys.readouterr().out
    assert not fork.exists(keys.rollout("live", 0))


def test_another_gateways_key_stops_an_erasure_before_anything_is_changed(
    deployment, tmp_path, capsys
):
    bucket, secret = deployment
    lost = older_gateway(bucket, "g1", tmp_path / "g1.key", ["alice"], 10)
    found = older_gateway(bucket, "g2", tmp_path / "g2.key", ["alice", "bob"], 20)
    put_rows(bucket, 0, [answer(30)], gateway="g3")
    before = everything_in(bucket)
    command = ["forget", bucket.url, "alice", "--secret", secret]
    assert main(command) == 2
    said = capsys.readouterr().err
    assert "nothing was done" in said
    assert all(f"{name}: " in said for name in ("g1", "g2", "g3"))
    assert main(["live", "export", bucket.url, "alice", "--secret", secret]) == 2
    assert everything_in(bucket) == before
    adopt = ["live", "secret", "adopt", bucket.url, "--secret", secret]
    assert main([*adopt, "--gateway-key", str(tmp_path / "g2.key")]) == 0
    command += ["--without-gateway", "g1", "--without-gateway", "g3"]
    capsys.readouterr()
    code, done = run_json(capsys, *command)
    assert (code, done["answers"], done["without"]) == (0, 3, ["g1", "g3"])
    stored = everything_in(bucket)
    rows = (keys.live_captures("g2", 0), keys.live_captures("g0", 0))
    for key in rows:
        data = bucket.get(key, limit=1 << 20)
        assert not any(user.encode() in data for user in (ALICE, *found - {_bob(tmp_path)}))
    assert _bob(tmp_path).encode() in stored
    assert lost.pop().encode() in stored
    assert main(command) == 0
    assert "not searched, because their keys are lost: g1, g3" in capsys.readouterr().out


def _bob(tmp_path):
    signer = Ed25519Signer.read(tmp_path / "g2.key")
    return Generation.adopt(signer).pseudonyms.user("bob")


def test_a_run_without_a_secret_is_migrated_and_its_users_stay_erasable(tmp_path, capsys):
    bucket = published(1, str(tmp_path / "run"))
    names = ["jos\xe9", "jose\u0301", "jos\udce9", "jos\xe9 "]
    users = older_gateway(bucket, "g1", tmp_path / "g1.key", names, 10)
    users |= older_gateway(bucket, "g2", tmp_path / "g2.key", ["jos\xe9"], 20)
    assert len(users) == 5
    forget = ["forget", bucket.url, "jose\u0301"]
    assert main(forget) == 2
    assert "deltawire live secret create" in capsys.readouterr().err
    files = [word for n in (1, 2) for word in ("--gateway-key", str(tmp_path / f"g{n}.key"))]
    assert main(["live", "secret", "create", bucket.url, *files]) == 0
    said = capsys.readouterr().out
    assert [line.rpartition(", ")[2] for line in said.splitlines()[1:]] == [
        "adopted", "adopted", "in use"
    ]  # fmt: skip
    code, done = run_json(capsys, *forget)
    assert (code, done["answers"]) == (0, 5)
    for name in ("g1", "g2"):
        data = bucket.get(keys.live_captures(name, 0), limit=1 << 20)
        assert not any(user.encode() in data for user in users)


def test_a_forgotten_user_is_readmitted_and_what_waits_in_a_spool_stays_forgotten(
    tmp_path, monkeypatch, capsys
):
    bucket = published(1, str(tmp_path / "run"))
    secret = write_secret(bucket, read_run(bucket), tmp_path / "secret")

    async def scenario():
        options = {"consent": ConsentRule(share=1.0)}
        async with live_serving(bucket, tmp_path / "s", monkeypatch, **options) as at:

            async def command(*words):
                return await asyncio.to_thread(main, [*words, "--secret", secret])

            async def uploaded():
                at.recorder._state_at = float("-inf")
                return (await at.uploaded())[0]

            assert await command("live", "readmit", bucket.url, "alice") == 2
            assert "no user of this name is forgotten" in capsys.readouterr().err
            await at.receipt(user="alice")
            assert len(await uploaded()) == 1
            await at.receipt("waits in the spool", user="alice")
            assert await command("forget", bucket.url, "alice") == 0
            assert await command("live", "readmit", bucket.url, "alice") == 0
            assert await command("live", "readmit", bucket.url, "alice") == 2
            assert not await uploaded()
            await at.receipt("after", user="alice")
            (row,) = await uploaded()
            assert row.user == Pseudonyms(SECRET).user("alice", 1)
            assert await command("forget", bucket.url, "alice") == 0
            assert not await uploaded()
            await at.receipt("again", user="alice")
            assert not await uploaded()

    asyncio.run(scenario())


def test_an_export_has_every_row_of_the_user_and_no_other(deployment, capsys):
    bucket, secret = deployment
    assert main(["live", "export", bucket.url, "alice", "--secret", secret]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["kind"] for row in rows] == ["answer", "answer", "feedback"]
    assert rows[0]["tokens"] == answer(1).token_ids.tolist()
    assert rows[0]["text"] == {"texts": []}
    assert (rows[2]["report"], rows[2]["value"]) == (report(1).kind, report(1).value)
    assert {row["user"] for row in rows} == {ALICE}
    main(["forget", bucket.url, "alice", "--secret", secret])
    capsys.readouterr()
    assert main(["live", "export", bucket.url, "alice", "--secret", secret]) == 0
    (row,) = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert (row["kind"], row["user"], row["answers"]) == ("forgotten", ALICE, 2)


def test_an_export_has_what_was_learned_from_the_user(tmp_path, capsys):
    from forgotten_users import learned

    from deltawire.store import open_bucket
    from deltawire.testing.tiny import start_run

    bucket = open_bucket(str(tmp_path / "run"), create=True)
    run = start_run(bucket)
    learned(bucket, {2: ALICE, 6: ALICE})
    secret = write_secret(bucket, run, tmp_path / "secret")
    assert main(["live", "export", bucket.url, "alice", "--secret", secret]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    kinds = [row["kind"] for row in rows]
    assert [kinds.count(one) for one in ("answer", "feedback", "learned", "trajectory")] == [2] * 4
    drawn = [row["tokens"] for row in rows if row["kind"] == "trajectory"]
    assert drawn == [answer(n).token_ids.tolist() for n in (2, 6)]


def test_commands_refuse_a_missing_and_another_secret(deployment, tmp_path, capsys, monkeypatch):
    bucket, _ = deployment
    other = tmp_path / "other"
    other.write_text(f"{Generation.generate().text()}\n")
    damaged = tmp_path / "damaged"
    damaged.write_text("dwsecret-1234")
    gateway = ["gateway", bucket.url, "--replica", "http://127.0.0.1:1"]
    monkeypatch.setenv("DELTAWIRE_TOKEN", "a")
    monkeypatch.setenv("DELTAWIRE_ADMIN_TOKEN", "b")
    for command in (["forget", bucket.url, "alice"], gateway):
        for path, reason in (
            (None, "make it once with deltawire live secret create"),
            (other, "it lacks generation 0"),
            (damaged, "holds no secret of a deployment"),
        ):
            words = [] if path is None else ["--secret", str(path)]
            assert main([*command, *words]) == 2
            said = capsys.readouterr().err
            assert reason in said
            assert "1234" not in said
    monkeypatch.setenv(SECRET_VARIABLE, GENERATION.text())
    assert main(["live", "secret", "show", bucket.url]) == 0
    assert GENERATION.fingerprint in capsys.readouterr().out
    assert main(["live", "secret", "rotate", bucket.url]) == 2
    assert "which this command cannot change" in capsys.readouterr().err
    place = SecretPlace.of("", read_run(bucket))
    assert place.read(bucket, read_run(bucket)).current == GENERATION


def test_a_gateway_that_stored_under_an_older_key_does_not_start_without_it(
    tmp_path, capsys, monkeypatch
):
    bucket = published(1, str(tmp_path / "run"))
    monkeypatch.setenv("DELTAWIRE_TOKEN", "a")
    monkeypatch.setenv("DELTAWIRE_ADMIN_TOKEN", "b")
    older_gateway(bucket, "g1", tmp_path / "g1.key", ["alice"], 10)
    state = tmp_path / "state"
    state.mkdir(mode=0o700)
    (state / "name").write_text("g1\n")
    (state / "name").chmod(0o600)
    assert main(["live", "secret", "create", bucket.url]) == 0
    command = ["gateway", bucket.url, "--replica", "http://127.0.0.1:1", "--state", str(state)]
    assert main(command) == 2
    assert "adopt its private key" in capsys.readouterr().err


def keep_versions(server, name):
    """Turns the versions of a test server's bucket on."""
    body = b"<VersioningConfiguration><Status>Enabled</Status></VersioningConfiguration>"
    signed = "AWS4-HMAC-SHA256 Credential=testing/20260101/us-east-1/s3/aws4_request, "
    request = urllib.request.Request(
        f"{server.endpoint}/{name}?versioning=", body, method="PUT",
        headers={"Authorization": f"{signed}SignedHeaders=host, Signature=x"},
    )  # fmt: skip
    urllib.request.urlopen(request, timeout=60).close()


def test_a_store_that_keeps_versions_is_told_from_one_that_does_not(tmp_path, s3_server):
    for name, kept in (("versions-off", "none"), ("versions-on", "kept")):
        s3_server.make_bucket(name)
        if kept == "kept":
            keep_versions(s3_server, name)
        bucket = s3_server.open(f"s3://{name}/run")
        bucket.put("live/forgotten/a.json", b"{}")
        assert old_versions(bucket, "live/forgotten/a.json") == kept
    folder = published(1, str(tmp_path / "run"))
    assert old_versions(folder, keys.RUN) == "none"
    assert old_versions(folder, "absent") == "unknown"
