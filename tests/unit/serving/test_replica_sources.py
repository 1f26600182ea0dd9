"""Replicas that come and go: by a file of URLs, and by the addresses of a name."""

import asyncio
import socket
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp.test_utils import TestServer
from fake_replica import FakeVllm
from live_gateway import published

from deltawire.errors import InputError
from deltawire.serving import replica_set as replica_sets
from deltawire.serving import replica_sources
from deltawire.serving.app import build_app
from deltawire.serving.replica_set import ReplicaSet, TargetVersion
from deltawire.serving.replica_sources import ReplicaFile, ReplicaFollower, ReplicaName
from deltawire.serving.vllm import VllmReplica
from deltawire.testing.tiny import start_run


@pytest.fixture
def bucket():
    return published(versions=3)


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(replica_sets, "POLL_EVERY_S", 0.02)
    monkeypatch.setattr(replica_sources, "READ_EVERY_S", 3600.0)


@asynccontextmanager
async def followed(bucket, path, *, count=3, listed=1):
    """Fake replicas of which a file lists some, the follower of it, and a client's call."""
    run = start_run(bucket)
    fakes = [FakeVllm(bucket, run) for _ in range(count)]
    async with aiohttp.ClientSession() as upstream, aiohttp.ClientSession() as client:
        for fake in fakes:
            await fake.server.start_server()
        urls = [str(fake.server.make_url("/")) for fake in fakes]
        path.write_text("\n".join(urls[:listed]))
        replicas = ReplicaSet(bucket, run, [], changes=True)
        app = build_app(replicas, upstream, token="t", admin_token="a")
        follower = ReplicaFollower(
            replicas, ReplicaFile(str(path)), lambda u: VllmReplica(u, upstream, key="upstream")
        )
        app.cleanup_ctx.append(follower.run)
        server = TestServer(app)
        await server.start_server()

        async def ask(path="/v1/completions", **body):
            headers = {"Authorization": "Bearer t"}
            method, more = ("POST", {"json": {"model": "m", **body}}) if body else ("GET", {})
            async with client.request(
                method, server.make_url(path), headers=headers, **more
            ) as answer:
                return answer.status, await answer.read()

        try:
            yield fakes, urls, replicas, follower, ask
        finally:
            await server.close()
            for fake in fakes:
                await fake.server.close()


async def until(holds):
    async with asyncio.timeout(60):
        while not holds():
            await asyncio.sleep(0.01)


def names(replicas):
    return {member.replica.name for member in replicas.members}


def name_of(url):
    return url.split("//")[1].rstrip("/")


def test_replicas_are_added_and_removed_as_the_file_lists_them(bucket, tmp_path):
    async def go():
        path = tmp_path / "replicas"
        async with followed(bucket, path) as (fakes, urls, replicas, follower, ask):
            await until(lambda: replicas.ready)
            kept = replicas.members[0]
            path.write_text("# all\n\n" + "\n".join(urls))
            await follower.poll()
            assert names(replicas) == {name_of(urls[0])}, "one read may be of half a file"
            await follower.poll()
            assert names(replicas) == set(map(name_of, urls))
            assert replicas.members[0] is kept
            await until(lambda: replicas.ready)

            # A request that is under way on a replica that goes ends as it would.
            path.write_text("\n".join(urls[1:]))
            for fake in fakes[1:]:
                fake.status = 500
            kept.outlier = replica_sets.Outlier()
            for member in replicas.members[1:]:
                member.requests = 100
            asked = asyncio.create_task(ask(prompt="wait", wait=True))
            await fakes[0].started.wait()
            for _ in range(2):
                await follower.poll()
            assert names(replicas) == set(map(name_of, urls[1:]))
            assert kept.requests == 1
            fakes[0].finish.set()
            assert (await asked)[0] == 200
            assert kept.requests == 0

    asyncio.run(go())


def test_replicas_stay_where_the_source_lists_none(bucket, tmp_path):
    async def go():
        path = tmp_path / "replicas"
        async with followed(bucket, path) as (_, urls, replicas, follower, _):
            for data in (b"", b"# none\n", b"\xff\xfe", b"ftp://a\n", b"http://u:p@a\n", None):
                path.write_bytes(data) if data is not None else path.unlink()
                for _ in range(3):
                    await follower.poll()
                assert names(replicas) == {name_of(urls[0])}, data
            for twice in ("http://h:1\nhttps://h:1", "http://h:1\nhttp://u@h:1"):
                path.write_text(twice)
                for _ in range(3):
                    await follower.poll()
                assert names(replicas) == {name_of(urls[0])}, twice
            path.write_text("\n".join(f"http://h{n}" for n in range(1025)))
            for _ in range(3):
                await follower.poll()
            assert names(replicas) == {name_of(urls[0])}

    asyncio.run(go())


def test_a_replica_whose_url_changes_is_another_one(bucket, tmp_path):
    async def go():
        path = tmp_path / "replicas"
        async with followed(bucket, path) as (_, urls, replicas, follower, _):
            before = replicas.members[0]
            path.write_text(urls[0].replace("http://", "https://"))
            for _ in range(2):
                await follower.poll()
            (after,) = replicas.members
            assert after is not before
            assert after.replica.base_url.startswith("https://")
            assert before.removed

    asyncio.run(go())


def test_a_new_replica_gets_the_version_that_decisions_name(bucket, tmp_path):
    async def go():
        path = tmp_path / "replicas"
        async with followed(bucket, path) as (fakes, urls, replicas, follower, _):
            await until(lambda: replicas.ready)
            run, digests = replicas.run, {}
            for version in (1, 2):
                digests[version] = replicas._digest_of(version)
            serving, candidate = (TargetVersion(v, digests[v], "all") for v in (1, 2))
            await replicas.aim(serving, candidate, 0.3)
            await until(lambda: fakes[0].mirror.version == 1)
            assert not replicas.serves(2), "a candidate needs a second replica"
            path.write_text("\n".join(urls))
            for _ in range(2):
                await follower.poll()
            await until(lambda: replicas.ready)
            assert sorted(fake.mirror.version for fake in fakes) == [1, 1, 2]
            assert run.id

    asyncio.run(go())


def test_without_a_replica_the_gateway_is_not_ready_and_says_so(bucket, tmp_path):
    async def go():
        path = tmp_path / "replicas"
        async with followed(bucket, path, listed=0) as (_, urls, replicas, follower, ask):
            assert not replicas.ready
            assert (await ask("/readyz"))[0] == 503
            assert (await ask(prompt="a"))[0] == 503
            path.write_text(urls[0])
            await follower.poll()
            await until(lambda: replicas.ready)
            assert (await ask("/readyz"))[0] == 200

    asyncio.run(go())


def test_each_address_of_a_name_is_a_replica(monkeypatch):
    found = [("10.0.0.2", 8000), ("10.0.0.1", 8000), ("10.0.0.2", 8000), ("fd00::1", 8000, 0, 0)]
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda *_, **__: [(2, 1, 6, "", place) for place in found]
    )
    assert ReplicaName("http://replicas:8000/base/").read() == (
        "http://10.0.0.1:8000/base",
        "http://10.0.0.2:8000/base",
        "http://[fd00::1]:8000/base",
    )


def test_a_name_without_an_address_is_named(monkeypatch):
    def fails(*_, **__):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fails)
    with pytest.raises(InputError, match="nowhere has no address"):
        ReplicaName("http://nowhere:1").read()


@pytest.mark.parametrize(
    "url", ["https://replicas:8000", "replicas:8000", "http://a:b@c", "http://"]
)
def test_a_url_that_names_no_replicas_is_refused(url):
    with pytest.raises(InputError):
        ReplicaName(url)


def test_a_file_is_read_up_to_a_size_and_each_url_counts_once(tmp_path):
    path = tmp_path / "replicas"
    path.write_text("http://a:1\n http://b:1/ \nhttp://a:1/\n#http://c:1\n")
    assert ReplicaFile(str(path)).read() == ("http://a:1", "http://b:1")
    path.write_text("# " + "x" * replica_sources.MAX_FILE_BYTES + "\nhttp://a:1\n")
    with pytest.raises(InputError, match="more than 1 MiB"):
        ReplicaFile(str(path)).read()


def test_a_failed_read_resets_the_agreement_of_two_reads(bucket, tmp_path, caplog, monkeypatch):
    async def idle(self):
        """Reads nothing between the test's own reads."""

    monkeypatch.setattr(ReplicaFollower, "_follow", idle)

    async def go():
        path = tmp_path / "replicas"
        async with followed(bucket, path) as (_, urls, replicas, follower, _):
            both = "\n".join(urls[:2])
            for text in (both, "", "", both):
                path.write_text(text)
                await follower.poll()
                assert names(replicas) == {name_of(urls[0])}
            await follower.poll()
            assert names(replicas) == set(map(name_of, urls[:2]))

    asyncio.run(go())
    said = [one for one in caplog.records if "the replicas before stay in use" in one.message]
    assert len(said) == 1, "a fault that stays is named once"


def test_a_source_that_fails_in_an_unknown_way_ends_no_following(bucket, tmp_path, monkeypatch):
    async def go():
        path = tmp_path / "replicas"
        monkeypatch.setattr(replica_sources, "READ_EVERY_S", 0.01)
        async with followed(bucket, path) as (_, urls, replicas, follower, _):
            failed = []

            def fail():
                failed.append(1)
                raise ValueError("odd")

            monkeypatch.setattr(follower._source, "read", fail)
            await until(lambda: len(failed) > 2)
            monkeypatch.undo()
            path.write_text("\n".join(urls[:2]))
            await until(lambda: names(replicas) == set(map(name_of, urls[:2])))

    asyncio.run(go())


def test_a_replica_with_an_upstreams_name_is_refused(bucket, tmp_path):
    async def go():
        path = tmp_path / "replicas"
        async with followed(bucket, path) as (_, urls, replicas, follower, _):
            upstream = VllmReplica(urls[1], None, key="")
            upstream.upstream = "openai"
            replicas._members.append(replica_sets.TrackedReplica(upstream))
            path.write_text("\n".join(urls[:2]))
            for _ in range(3):
                await follower.poll()
            assert len(replicas.members) == 2, "nothing is replaced"
            assert name_of(urls[1]) in follower._fault, "and the operator is told"
            replicas._members.pop()

    asyncio.run(go())
