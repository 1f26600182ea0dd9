"""A real Prometheus scrapes a run with the configuration of examples/monitoring, evaluates its
rules, and answers every question of its board."""

import json
import shutil
import socket
import subprocess
import tarfile
import threading
import time
import urllib.parse
import urllib.request
from pathlib import Path

import pytest
import yaml

from deltawire.dashboard.exporter import RunCollector, application, listen
from deltawire.dashboard.status import Watch
from deltawire.store import open_bucket
from deltawire.sync import newest_version

ROOT = Path(__file__).parents[2]
MONITORING = ROOT / "examples" / "monitoring"
KEPT = ROOT / "tests" / "compat" / "kept" / "0.1.0.tar.xz"
PATIENCE_S = 120.0

pytestmark = [
    pytest.mark.drills,
    pytest.mark.skipif(
        shutil.which("prometheus") is None, reason="the package prometheus is not installed"
    ),
]


class Server:
    """Prometheus with the example's configuration, on a port that was free a moment ago."""

    def __init__(self, folder, target):
        self.folder = folder
        shutil.copytree(MONITORING, folder)
        config = yaml.safe_load((folder / "prometheus.yml").read_text())
        config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        config["scrape_configs"][0]["static_configs"][0]["targets"] = [target]
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        (folder / "token").write_text("secret")
        self.process = None
        self.start()

    def start(self):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [
                    shutil.which("prometheus"),
                    f"--config.file={self.folder / 'prometheus.yml'}",
                    f"--storage.tsdb.path={self.folder / 'data'}",
                    f"--web.listen-address=127.0.0.1:{self.port}",
                ],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip

    def ask(self, path, **query):
        url = f"http://127.0.0.1:{self.port}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url, timeout=PATIENCE_S) as answer:
            return json.load(answer)["data"]

    def until(self, condition, what):
        deadline = time.monotonic() + PATIENCE_S
        while True:
            assert time.monotonic() < deadline, f"{what}: {(self.folder / 'log').read_text()}"
            try:
                if condition():
                    return
            except OSError:  # It does not listen yet.
                if self.process.poll() is not None:  # Another process took the port.
                    self.start()
            time.sleep(0.1)

    def close(self):
        self.process.terminate()
        self.process.wait(PATIENCE_S)


@pytest.fixture
def bucket(tmp_path):
    with tarfile.open(KEPT) as packed:
        packed.extractall(tmp_path / "bucket", filter="data")
    return open_bucket(str(tmp_path / "bucket"))


@pytest.fixture
def prometheus(tmp_path, bucket):
    app = application(RunCollector(Watch(bucket), every_s=1.0), token="secret")
    exporter = listen(app, host="127.0.0.1", port=0, token="secret")
    threading.Thread(target=exporter.serve_forever, daemon=True).start()
    server = Server(tmp_path / "monitoring", f"127.0.0.1:{exporter.server_port}")
    yield server
    server.close()
    exporter.shutdown()
    exporter.server_close()


def test_a_real_prometheus_scrapes_a_run_and_loads_rules_and_board(prometheus, bucket):
    def rules():
        (group,) = prometheus.ask("rules")["groups"]
        return group["rules"]

    def is_scraped():
        found = prometheus.ask("query", query="deltawire_version")["result"]
        return [one["value"][1] for one in found] == [str(newest_version(bucket))]

    prometheus.until(is_scraped, "the run's version")
    prometheus.until(lambda: all(one["health"] == "ok" for one in rules()), "evaluated rules")
    written = yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"][0]["rules"]
    assert [one["name"] for one in rules()] == [one["alert"] for one in written]
    (target,) = prometheus.ask("targets")["activeTargets"]
    assert (target["health"], target["lastError"]) == ("up", "")
    board = json.loads((MONITORING / "grafana.json").read_text())
    now = time.time()
    for panel in board["panels"]:
        for one in panel["targets"]:
            asked = one["expr"].replace("$__rate_interval", "1m")
            found = prometheus.ask("query_range", query=asked, start=now - 60, end=now, step=5)
            assert found["resultType"] == "matrix"
