"""The doctor's findings about stores: those that keep their promises, and those that do not."""

from contextlib import contextmanager

import pytest

from deltawire.errors import InputError
from deltawire.launch.doctor import examine_conformance, examine_store, stores
from deltawire.store import Bucket, open_bucket
from deltawire.testing.conformance import run_store_suite


class Overwrites(Bucket):
    """A store that ignores If-None-Match."""

    def create(self, key, data):
        self.put(key, data)
        return True


class Forgets(Bucket):
    """A store whose listings lack the newest object of a prefix."""

    def list_objects(self, prefix, *, after=None):
        return super().list_objects(prefix, after=after)[:-1]


class Refuses(Bucket):
    """A store that may only be read."""

    def put(self, key, data):
        raise InputError("cannot write: 403", hint="ask for permission", run=self.url, key=key)


def examined(monkeypatch, kind):
    """Findings by name about a memory store that breaks one promise."""

    @contextmanager
    def scratch(url):
        yield kind(open_bucket("memory://").store, url, local=True)

    monkeypatch.setattr(stores, "scratch_bucket", scratch)
    return {one.name: one for one in examine_store("memory://")}


def test_a_folder_keeps_every_promise_and_is_left_as_it_was(tmp_path):
    (tmp_path / "mine").write_text("kept")
    found = examine_store(str(tmp_path))
    assert {one.status for one in found} == {"ok"}
    assert {"create-if-absent", "listing", "clock", "latency of get"} <= {one.name for one in found}
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_missing_folder_is_one_problem_with_its_fix(tmp_path):
    (only,) = examine_store(str(tmp_path / "missing"))
    assert (only.name, only.status) == ("reachable", "problem")
    assert "path" in only.fix
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("kind", "name"), [(Overwrites, "create-if-absent"), (Forgets, "listing")])
def test_a_broken_promise_is_a_problem(monkeypatch, kind, name):
    found = examined(monkeypatch, kind)
    assert found[name].status == "problem"
    assert found[name].fix
    assert [one.name for one in found.values() if one.status == "problem"] == [name]


def test_a_store_that_may_only_be_read_is_a_note(monkeypatch):
    found = examined(monkeypatch, Refuses)
    assert [*found] == ["reachable", "writable"]
    assert found["writable"].status == "note"


def test_the_suite_runs_without_pytest_and_cleans_up(tmp_path):
    told = []
    found = examine_conformance(str(tmp_path), told.append)
    assert [one.found for one in found] == ["passed"] * len(told)
    assert len(told) >= 19
    assert not list(tmp_path.iterdir())


def test_the_suite_names_the_promise_that_a_store_breaks(monkeypatch):
    from deltawire.testing import conformance

    @contextmanager
    def scratch(url):
        yield Overwrites(open_bucket("memory://").store, url, local=True)

    monkeypatch.setattr(conformance, "scratch_bucket", scratch)
    failed = {case.name: case for case in run_store_suite("memory://") if not case.passed}
    assert {*failed} == {
        "create_after_put_and_after_delete",
        "create_once",
        "create_race_has_one_winner",
    }
    assert "first create wins" in failed["create_once"].promise
    assert "create" in failed["create_once"].failure


@pytest.mark.drills
def test_two_s3_servers_pass_the_suite_and_are_left_empty(s3_server, moto_server):
    for server in (s3_server, moto_server):
        cases = list(
            run_store_suite(
                "s3://drills/doctor",
                endpoint=server.endpoint,
                access_key_id="testing",
                secret_access_key="testing",
                region="us-east-1",
            )
        )
        assert not [case for case in cases if not case.passed]
        assert server.open_bare("s3://drills/doctor").list("") == []
