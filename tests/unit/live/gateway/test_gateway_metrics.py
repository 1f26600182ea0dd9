"""A gateway shows metrics by arm, request ids and logs."""

import asyncio
import json
import logging
import re

import pytest
from live_gateway import ADMIN, live_serving, published
from prometheus_client.parser import text_string_to_metric_families

from deltawire.launch.server_logs import configure_logs
from deltawire.serving.app import CallLimits
from deltawire.store import open_bucket
from deltawire.wire.decisions import Assignment


@pytest.fixture
def serve(tmp_path, monkeypatch):
    def run(scenario, **options):
        async def whole():
            async with live_serving(published(), tmp_path / "state", monkeypatch, **options) as at:
                await scenario(at)

        asyncio.run(whole())

    return run


async def metrics_of(at):
    status, data, _ = await at.call("GET", "/metrics", ADMIN)
    assert status == 200
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(data.decode())
        for sample in family.samples
    }


def requests(found, **labels):
    return sum(
        value
        for (name, *given), value in found.items()
        if name == "deltawire_gateway_requests_total" and labels.items() <= dict(given).items()
    )


def histogram(found, name, arm):
    return found[f"deltawire_gateway_{name}_seconds_count", ("arm", arm)]


def test_requests_are_counted_by_arm_status_and_end(serve):
    async def scenario(at):
        arms = {"alice": "serving", "bob": "candidate"}
        by = {user: name for name in arms for user in at.recorder.users(name)}
        at.recorder.assign = lambda user, _: Assignment(arms[by[user]], 1.0, 0)
        for user in ("alice", "alice", "bob"):
            assert (await at.ask(user=user))[0] == 200
        assert (await at.ask(user="bob", stream=True))[0] == 200
        at.fake.mode = "error"
        assert (await at.ask(user="bob"))[0] == 400
        at.fake.mode = "fail"
        assert (await at.ask(user="alice"))[0] == 500
        await at.report("dw2.none")
        assert (await at.call("GET", "/v1/anything"))[0] == 404
        found = await metrics_of(at)
        chat = "/v1/chat/completions"
        assert requests(found, route=chat, arm="serving", status="200", ended="whole") == 2
        assert requests(found, route=chat, arm="candidate", status="200", ended="whole") == 2
        assert requests(found, arm="candidate", status="400") == 1
        assert requests(found, arm="serving", status="500", ended="error") == 1
        assert requests(found, route="/v1/feedback", status="404", arm="") == 1
        assert requests(found) == 7, "paths that do not exist are no time series"
        assert histogram(found, "first_token", "candidate") >= 2
        assert histogram(found, "answer", "candidate") == 3
        assert found["deltawire_gateway_in_flight", ("arm", "serving")] == 0
        assert found["deltawire_gateway_events_total", ("event", "answers")] >= 4
        replicas = [v for (n, *_), v in found.items() if n.endswith("replica_takes_requests")]
        assert replicas == [1.0]

    serve(scenario)


def test_a_client_that_leaves_and_a_replica_that_hangs_are_counted(serve):
    async def scenario(at):
        at.fake.mode = "hang"
        task = asyncio.create_task(at.ask(stream=True))
        while not at.fake.seen:
            await asyncio.sleep(0.01)
        found = await metrics_of(at)
        assert found["deltawire_gateway_in_flight", ("arm", "serving")] == 1
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        async with asyncio.timeout(10):
            while not requests(found := await metrics_of(at)):
                await asyncio.sleep(0.01)
        assert requests(found, status="499", ended="left") == 1
        assert found["deltawire_gateway_in_flight", ("arm", "serving")] == 0
        assert (await at.ask(stream=True))[0] == 503
        assert requests(await metrics_of(at), status="503", ended="error") == 1

    serve(scenario, call_limits=CallLimits(first_s=0.3))


def test_metrics_need_the_admin_token(serve):
    """Rates by arm let a client guess its own."""

    async def scenario(at):
        assert (await at.call("GET", "/metrics"))[0] == 403
        assert (await at.call("GET", "/metrics", "none"))[0] == 401

    serve(scenario)


def test_each_answer_has_the_id_of_its_request(serve):
    async def scenario(at):
        for stream in (False, True):
            _, _, headers = await at.ask(stream=stream)
            assert re.fullmatch("[0-9a-f]{32}", headers["X-Request-Id"])
        _, _, headers = await at.call(
            "GET", "/livez", headers={"X-Request-Id": "trace-17:a.b/c+d=e"}
        )
        assert headers["X-Request-Id"] == "trace-17:a.b/c+d=e"
        for odd in ("a b", "x" * 129, "a;b"):
            _, _, headers = await at.call("GET", "/v1/models", "x", headers={"X-Request-Id": odd})
            assert re.fullmatch("[0-9a-f]{32}", headers["X-Request-Id"])

    serve(scenario)


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_log_line_names_time_level_and_request(serve, capsys, form):
    logger = logging.getLogger("deltawire")
    before = logger.handlers[:], logger.level, logger.propagate

    async def scenario(at):
        at.fake.mode = "hang"
        headers = {"X-Request-Id": "trace-17"}
        body = {"model": "m", "messages": [{"role": "user", "content": "Hi\nthere"}]}
        await at.call("POST", "/v1/chat/completions", headers=headers, json=body | {"stream": True})
        logging.getLogger("deltawire.live").warning("two\nlines of \x1b[31m%s", "text")

    try:
        configure_logs(form)
        serve(scenario, call_limits=CallLimits(first_s=0.2))
    finally:
        logger.handlers[:], logger.level, logger.propagate = before[0], before[1], before[2]
    lines = capsys.readouterr().err.splitlines()
    found = [line for line in lines if "trace-17" in line and "does not answer" in line]
    assert found, lines
    if form == "json":
        row = json.loads(found[0])
        assert row["request"] == "trace-17"
        assert (row["level"], row["logger"]) == ("WARNING", "deltawire.serving")
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", row["at"])
        assert "request" not in json.loads(lines[-1])
    else:
        assert re.match(r"\d{4}-\S+Z WARNING deltawire\.serving \[trace-17\] replica", found[0])
        assert "\x1b" not in lines[-1]
        assert lines[-1].endswith("text")


def test_readiness_says_that_uploads_wait_and_no_folder_is_made_again(tmp_path, monkeypatch):
    """Segments once went into a new folder, which no other process reads."""
    url = (tmp_path / "bucket").as_uri()
    open_bucket(url, create=True)
    published(url=url)

    async def whole():
        bucket = open_bucket(url)
        async with live_serving(bucket, tmp_path / "state", monkeypatch) as at:
            assert (await at.ask())[0] == 200
            await at.uploaded()
            (tmp_path / "bucket").rename(tmp_path / "moved")
            assert (await at.ask())[0] == 200
            assert not await asyncio.to_thread(at.recorder.uploader.upload)
            status, data, _ = await at.call("GET", "/readyz", "no token")
            assert (status, json.loads(data)["ready"]) == (200, True)
            assert "wait on this machine" in json.loads(data)["warnings"][0]
            assert str(tmp_path) not in data.decode()
            assert not (tmp_path / "bucket").exists()
            (tmp_path / "moved").rename(tmp_path / "bucket")
            captures, _ = await at.uploaded()
            assert len(captures) == 2
            _, data, _ = await at.call("GET", "/readyz")
            assert json.loads(data)["warnings"] == []

    asyncio.run(whole())
